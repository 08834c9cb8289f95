"""Recognize scheduler options that users type by habit, such as ``-N 2``, and say what to type instead.

Each row of the tables is about an option that ``imgkit run`` does not have. It says which option of imgkit to
use instead. If there is none, ``--option`` passes the option on to the scheduler.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints.errors import UsageError


class Row(NamedTuple):
    """A scheduler's option, and what to type instead in ``imgkit run``."""

    names: str
    """The names of the option, separated by blanks."""
    value: str
    """A regular expression for the whole value. Empty if the option takes no value."""
    replacement: str
    """The options of imgkit to type. ``{0}`` is the first group of `value`. Empty if nothing is needed."""
    note: str = ""
    """An additional sentence for the user. ``{name}`` is the name of the option."""


# Regular expressions for values.
ANY = "(.+)"
NUMBER = r"(\d+)"


def _make_option_rows(*names: str) -> tuple[Row, ...]:
    """Return table rows for options that imgkit does not have, to be replaced by ``--option=NAME=VALUE``.

    Each item of `names` has one or more names of the same option, such as ``"-d --dependency"``. The last
    name is passed to the scheduler. It is joined to the value by ``=``, because a directive of Slurm must be
    one word.
    """
    return tuple(Row(row_names, ANY, f"--option={row_names.split()[-1]}={{0}}") for row_names in names)


def _make_flag_rows(*names: str) -> tuple[Row, ...]:
    """Return table rows for options without a value that imgkit does not have: ``--option=--exclusive``."""
    return tuple(Row(name, "", f"--option={name}") for name in names)


# Notes that are used in several rows.
_ONE_OUTPUT = "{name}: the output is in the job's folder (--directory), and imgkit logs ID prints it"
_GPU_TYPE = r"([A-Za-z][\w.-]*)"
_TYPE_NOTE = "the type of GPUs is system.node.gres in a recipe: gpu:{0}"
_SLURM = (
    # For a range of nodes, such as 2-4, use its lower end.
    Row("-N", rf"{NUMBER}(?:-\d+)?", "--nodes {0}"),
    Row("-p --partition", ANY, "--queue {0}"),
    # In Slurm, a time that is one number is in minutes.
    Row("-t", NUMBER, "--time {0}m"),
    Row("-t", ANY, "--time {0}"),
    # A value such as 0-9 is not a name: in PBS, -J 0-9 asks for an array of jobs.
    Row("-J --job-name", r"((?!\d+-\d).+)", "--name {0}"),
    # GPUs are given as a number, or as a type and a number: gpu:4, gpu:a100:4.
    Row("--gres", f"gpu:{NUMBER}", "--gpus {0}"),
    Row("--gres", f"gpu:{_GPU_TYPE}:{NUMBER}", "--gpus {1}", _TYPE_NOTE),
    Row("--gpus-per-node", NUMBER, "--gpus {0}"),
    Row("--gpus-per-node", f"{_GPU_TYPE}:{NUMBER}", "--gpus {1}", _TYPE_NOTE),
    Row("-G", NUMBER, "--gpus G --nodes N", "{name}: --gpus counts the GPUs of one node"),
    Row(
        "-n --ntasks",
        NUMBER,
        "",
        "{name}: dist-run starts a process for each GPU of --nodes N; --nproc P: P processes on each node",
    ),
    Row("--ntasks-per-node --tasks-per-node", NUMBER, "--nproc {0}"),
    Row(
        "-c --cpus-per-task",
        NUMBER,
        "--cpus {0}",
        "{name}: --cpus counts those of a node, for all its processes",
    ),
    Row("-D --chdir", ANY, "--directory {0}"),
    Row("-o --output --error", ANY, "", _ONE_OUTPUT),
    Row("-e", "[^=]+", "", _ONE_OUTPUT),  # -e NAME=VALUE is a variable in RunAI
    Row("--export", ANY, "", "{name}: --env NAME or --env NAME=VALUE for each variable"),
    Row("--signal", ANY, "--stop-before SECONDS"),
    Row("--test-only", "", "--dry-run"),
    # Options that pyxis adds to srun.
    Row("--container-image", ANY, "--image {0}"),
    Row("--container-mounts", ANY, "--bind {0}"),
    # imgkit has no options for the following.
    *_make_flag_rows("--exclusive", "--contiguous", "--requeue", "--no-requeue", "--hold", "--overcommit"),
    *_make_option_rows("-d --dependency", "-a --array", "-C --constraint", "-w --nodelist", "-x --exclude"),
    *_make_option_rows(
        "-b --begin", "-L --licenses", "-M --clusters", "-m --distribution", "--exclusive", "--gres"
    ),
    *_make_option_rows(
        "--mail-type", "--mail-user", "--comment", "--reservation", "--nice", "--tmp", "--switches"
    ),
    *_make_option_rows("--mem-per-cpu", "--deadline", "--priority", "--wckey", "--threads-per-core"),
)
_PBS = (
    # In PBS, -N is the name of the job, which begins with a letter.
    Row("-N", r"([A-Za-z].*)", "--name {0}"),
    # Resources of -l, such as "-l select=2:ngpus=4", are looked up one by one under their own names.
    Row(
        "select nodes",
        NUMBER,
        "--nodes {0}",
        "-l: other resources of a chunk are system.queue.chunk in a recipe",
    ),
    Row("ncpus", NUMBER, "--cpus {0}"),
    Row("ngpus", NUMBER, "--gpus {0}"),
    Row("mem", r"(\d+[mgtMGT][bB])", "--mem {0}"),
    Row("walltime", ANY, "--time {0}"),
    Row(
        "mpiprocs ppn ompthreads",
        ANY,
        "",
        "{name}: imgkit starts one node agent on each node; --nproc P: P processes",
    ),
    # A directive of PBS has the name and the value of an option in two words.
    Row("place", ANY, "--option=-l --option=place={0}"),
    Row("-P", ANY, "-A {0}"),
    Row("-I", "", "--interactive"),
    Row("-J", r"(\d+-\d.*)", "--option=-J --option={0}"),
    Row("-W", r"(\w+=.+)", "--option=-W --option={0}"),
    Row("-m", "([abejnp]+)", "--option=-m --option={0}"),
    Row("-M", "(.+@.+)", "--option=-M --option={0}"),
    Row("-p", r"(-?\d+)", "--option=-p --option={0}"),
    Row("-j", "(oe|eo|n)", "", _ONE_OUTPUT),
    Row("-o -e", "(.*[:/].*)", "", _ONE_OUTPUT),
    Row("-V", "", "", "{name}: --env NAME for each variable"),
)
_RUNAI = (
    Row("-g --gpu --gpu-devices-request", NUMBER, "--gpus {0}"),
    Row("-p --project", ANY, "--queue {0}"),
    Row("--cpu --cpu-core-request", NUMBER, "--cpus {0}"),
    Row("--workers", NUMBER, "--nodes N", "{name}: --nodes counts the first pod and {0} workers"),
    Row("--existing-pvc", "claimname=([^,]+),path=([^,]+)", "--pvc {0}:{1}"),
    Row("-e --environment --environment-variable", r"(\w+=.*)", "--env {0}"),
    Row("--memory --cpu-memory-request", r"(\d+[MGT]i?)", "--mem {0}"),
    *_make_option_rows("--node-pools", "--node-type", "--run-as-user"),
    *_make_flag_rows("--large-shm", "--preemptible"),
)
# If the user's options fit two schedulers equally well, the first one in this order is chosen.
OPTION_TABLES: Mapping[str, tuple[Row, ...]] = {"Slurm": _SLURM, "PBS": _PBS, "RunAI": _RUNAI}
"""The rows for each scheduler.

If several rows have the name of an option, the first row whose `value` matches is used.
"""


class TypedOption(NamedTuple):
    """An option that imgkit does not have, as a user typed it."""

    flag: str
    """The option as typed, such as ``-l``."""
    name: str
    """The name to look up in the tables. It is equal to `flag`, except for the option ``-l`` of PBS.

    For ``-l select=2``, it is the resource ``select``.
    """
    value: str
    """The value that is joined to the option, such as ``2`` in ``-N2``. Empty if there is none."""
    next_argument: str = ""
    """The argument that follows the option. It may be the value of the option."""


class MatchedOption(NamedTuple):
    """An option that a user typed, with the table row that says what to type instead."""

    option: TypedOption
    row: Row
    match: re.Match[str]
    """The match of ``row.value`` with the option's value."""


def refuse_scheduler_options(args: Sequence[str], own_options: Mapping[str, bool]) -> None:
    """Raise UsageError if `args` has options of a scheduler. The hint has the options to type instead.

    If no scheduler has any of the options, nothing is raised. The caller then reports an unknown option.

    Users type such options by habit. For example, ``imgkit run -N 2 -p gpu`` results in the hint ``--nodes 2
    --queue gpu``.

    Parameters
    ----------
    args : the arguments before ``--``.
    own_options : the names of the verb's own options, and for each whether it takes a value.
    """
    typed_options = tuple(_find_foreign_options(args, own_options))
    # The options that each scheduler has, by the name of the scheduler.
    matched_options = {}
    for name, rows in OPTION_TABLES.items():
        matched_options[name] = tuple(_match_options(rows, typed_options))
    # Options such as -N and -p have different meanings in different schedulers. The user probably means the
    # scheduler that knows most of the options.
    scheduler = max(matched_options, key=lambda name: len(matched_options[name]))
    if matched_options[scheduler]:
        raise _foreign_options_error(scheduler, matched_options[scheduler])


def _foreign_options_error(scheduler: str, matched_options: Sequence[MatchedOption]) -> UsageError:
    """Return the error for options of `scheduler`, with a hint about what to type instead.

    Parameters
    ----------
    matched_options : each option that was typed, such as ``--gres=gpu:4``, with its table row and the match
        of its value. The row has a text with the option of imgkit to type instead (``--gpus {0}``), a note,
        or both. The groups of the match (``4``) are inserted into these texts.
    """
    flags = []
    replacements = []
    notes = []
    for option, row, match in matched_options:
        values = match.groups()
        flags.append(option.flag)
        if row.replacement:
            quoted_values = map(shlex.quote, values)
            replacements.append(row.replacement.format(*quoted_values))
        if row.note:
            notes.append(row.note.format(*values, name=option.name))
    # A dict keeps the order and drops repeated entries.
    unique_flags = list(dict.fromkeys(flags))
    hints = list(dict.fromkeys(notes))
    if replacements:
        hints.insert(0, " ".join(replacements))
    kind = "an option" if len(unique_flags) == 1 else "options"
    message = f"{kind} of {scheduler}, not of imgkit"
    return UsageError(message, where=", ".join(unique_flags), hint="\n".join(hints))


def _find_foreign_options(args: Sequence[str], own_options: Mapping[str, bool]) -> Iterator[TypedOption]:
    """Yield the options in `args` that the verb (such as ``imgkit run``) does not have.

    They may be options of a scheduler. Arguments without a dash are skipped.

    Parameters
    ----------
    own_options : the names of the verb's own options, and for each whether it takes a value.
    """
    for argument, next_argument in _skip_own_options(args, own_options):
        flag, value = _split_option(argument)
        if flag == "-l":  # an option of PBS with a list of resources, each of which has a table row
            yield from _split_pbs_resources(flag, value or next_argument)
        elif re.match("--?[A-Za-z]", flag):
            # It is unknown whether this option takes a value. An argument with a dash is the next option.
            possible_value = "" if next_argument.startswith("-") else next_argument
            yield TypedOption(flag=flag, name=flag, value=value, next_argument=possible_value)


def _skip_own_options(args: Sequence[str], own_options: Mapping[str, bool]) -> Iterator[tuple[str, str]]:
    """Yield the arguments that are neither an option of the verb nor the value of such an option.

    Each is yielded with the argument that follows it in `args`, or with "" if it is the last one.

    Parameters
    ----------
    own_options : the names of the verb's options, and for each whether it takes a value.
    """
    is_value = False  # whether the argument is the value of the option before it, even if it has a dash
    for argument, next_argument in zip(args, (*args[1:], ""), strict=True):
        if is_value:
            is_value = False
            continue
        flag, value = _split_option(argument)
        if flag in own_options:
            is_value = own_options[flag] and not value
        else:
            yield argument, next_argument


def _split_option(argument: str) -> tuple[str, str]:
    """Return the name and the value of the option `argument`. The value is empty if none is joined to it.

    ``--time=1h`` -> ``--time``, ``1h``; ``-N2`` -> ``-N``, ``2``
    """
    if re.match("-[A-Za-z]", argument):
        return argument[:2], argument[2:]
    flag, _, value = argument.partition("=")
    return flag, value


def _split_pbs_resources(flag: str, value: str) -> Iterator[TypedOption]:
    """Yield each resource in `value` as an option of its own. `flag` is the option ``-l`` of PBS.

    ``select=2:ngpus=4,walltime=1:00:00`` -> ``select`` 2, ``ngpus`` 4, ``walltime`` 1:00:00
    """
    # A colon or comma separates two resources only if a name and "=" follow it. Values such as 1:00:00 also
    # contain colons.
    for resource in re.split("[:,](?=[a-z_]+=)", value):
        name, _, resource_value = resource.partition("=")
        yield TypedOption(flag=flag, name=name, value=resource_value)


def _match_options(rows: Sequence[Row], typed_options: Sequence[TypedOption]) -> Iterator[MatchedOption]:
    """Yield each option that a row describes, with the first such row. Other options are left out.

    `rows` is the table of one scheduler. A row that needs a special value comes before the general one.
    """
    for option in typed_options:
        for row in rows:
            match = _match_option(row, option)
            if match is not None:
                yield MatchedOption(option, row, match)
                break


def _match_option(row: Row, option: TypedOption) -> re.Match[str] | None:
    """Return the match of the option's value if `row` is about this option and value, otherwise None."""
    if option.name not in row.names.split():
        return None
    takes_value = row.value != ""
    if takes_value and not option.value:
        # No value is joined to the option, so the next argument may be its value.
        return re.fullmatch(row.value, option.next_argument)
    return re.fullmatch(row.value, option.value)
