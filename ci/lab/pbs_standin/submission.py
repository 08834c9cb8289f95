"""What a call of qsub asks for, in its options and in the ``#PBS`` lines of the script."""

from __future__ import annotations

import getopt
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pbs_standin.protocol import RefusedError

QSUB_OPTIONS = "A:J:N:S:V:e:I:j:k:l:o:p:q:r:v:"
"""The options of qsub, as ``getopt`` takes them; each has a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of ``-l``: ``select=2:ncpus=8:mpiprocs=4,place=scatter,walltime=00:10:00``."""

    select: str
    """The value of ``select``, for messages."""
    chunks: int
    ncpus: str = "1"
    mpiprocs: int = 1
    is_scattered: bool = False
    """Each chunk has a host of its own."""
    walltime_s: int | None = None

    def list_hosts(self, nodes: Sequence[str]) -> list[str]:
        """Return the lines of the node file: for each chunk, its host as often as it has ``mpiprocs``."""
        if self.is_scattered and self.chunks > len(nodes):
            raise unsatisfiable(self.select)
        lines = []
        for chunk in range(self.chunks):
            host = nodes[chunk] if self.is_scattered else nodes[0]
            lines += [host] * self.mpiprocs
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One call of qsub."""

    script: str
    cwd: str
    """The folder of qsub, which gets the job's output."""
    resources: Resources
    name: str = "STDIN"
    queue: str = "workq"
    shell: str = "/bin/bash"
    account: str = ""
    has_joined_streams: bool = False
    """Output and errors are one file (``-j oe``)."""
    indices: range | None = None
    """The indices of the subjobs; None for a job that is no array."""


def parse_submission(script: str, args: Sequence[str], cwd: str) -> Submission:
    """Return what qsub is asked for.

    Of an option that is given twice, the last value counts. The command line comes after the directives.
    """
    options = [*parse_directives(script), *parse_options(args)]
    by_flag = dict(options)
    indices = parse_indices(by_flag["-J"]) if "-J" in by_flag else None
    return Submission(
        script=script,
        cwd=cwd,
        resources=parse_resources([value for flag, value in options if flag == "-l"]),
        name=by_flag.get("-N", "STDIN"),
        queue=by_flag.get("-q", "workq"),
        shell=by_flag.get("-S", "/bin/bash"),
        account=by_flag.get("-A", ""),
        has_joined_streams=by_flag.get("-j") == "oe",
        indices=indices,
    )


def parse_directives(script: str) -> Iterator[tuple[str, str]]:
    """Yield the options in the ``#PBS`` lines of a script, up to its first command."""
    for line in script.splitlines():
        if line.startswith("#PBS "):
            yield from parse_options(shlex.split(line.removeprefix("#PBS ")))
        elif line.strip() and not line.startswith("#"):
            return


def parse_options(args: Sequence[str]) -> list[tuple[str, str]]:
    """Return qsub's options with their values: ``["-N", "job"] -> [("-N", "job")]``."""
    try:
        options, rest = getopt.getopt(list(args), QSUB_OPTIONS)
    except getopt.GetoptError as error:
        raise RefusedError(f"qsub: {error}\n") from None
    if rest:
        raise RefusedError(f"qsub: illegal words {rest}\n")
    return options


def parse_resources(values: Sequence[str]) -> Resources:
    """Return the resources in all values of ``-l``. The last value of a resource counts."""
    limits: dict[str, str] = {}
    for value in values:
        # Commas separate resources; a select itself has none.
        limits |= parse_pairs(value.split(","))
    walltime_s = parse_walltime(limits.get("walltime", ""))
    select = limits.get("select", "1")
    chunks, *chunk_limits = select.split(":")
    if not chunks.isdigit():
        raise unsatisfiable(select)
    chunk = parse_pairs(chunk_limits)
    return Resources(
        select=select,
        chunks=int(chunks),
        ncpus=chunk.get("ncpus", "1"),
        mpiprocs=int(chunk.get("mpiprocs", "1")),
        is_scattered=limits.get("place", "free").partition(":")[0] == "scatter",
        walltime_s=walltime_s,
    )


def parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    """Return texts such as ``"ncpus=8"`` as names with their values."""
    pairs = {}
    for text in texts:
        name, _, value = text.partition("=")
        pairs[name] = value
    return pairs


def parse_walltime(text: str) -> int | None:
    """Return the seconds of ``[[HH:]MM:]SS``; None for an empty text, which is no limit."""
    if not text:
        return None
    seconds = 0
    for part in text.split(":"):
        if not part.isdigit():
            raise RefusedError(f"qsub: Illegal attribute or resource value: walltime={text}\n")
        seconds = seconds * 60 + int(part)
    return seconds


def parse_indices(text: str) -> range:
    """Return the indices of ``FIRST-LAST[:STEP]``."""
    limits, _, step = text.partition(":")
    first, _, last = limits.partition("-")
    step = step or "1"
    if not (first.isdigit() and last.isdigit() and step.isdigit()) or int(first) >= int(last):
        raise RefusedError("qsub: illegal -J value\n")
    return range(int(first), int(last) + 1, int(step))


def unsatisfiable(select: str) -> RefusedError:
    """Return the error for a selection of chunks that this cluster can never give."""
    return RefusedError(f"qsub: Resource request can never run: select={select}\n")
