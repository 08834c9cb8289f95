"""Check by ssh that the hosts of a job are alike. Standard library only."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from imgkit_builder.base.checks import Check
from imgkit_builder.base.process import MOST_BYTES
from imgkit_builder.job.ssh import fanout

CLOCKS_S = 5.0
"""Larger differences make times in logs misleading. The figure includes the time that ssh takes to start."""

_LINE_BYTES = 100
"""What a line takes in memory, whatever its length."""

Run = Callable[[Sequence[tuple[str, str]], fanout.Show], None]
"""A function that runs each host's line and shows its output."""

# Each line of the answer is a name, a blank and a value. After a `!` the value is the last line of an error.
_PROBE = """\
echo "clock $(date +%s.%N)"
if address=$(getent ahosts {head}); then echo "head ${{address%% *}}"; fi
command -v orted >/dev/null && echo "orted there"
nvidia-smi --query-gpu=driver_version,name --format=csv,noheader 2>/dev/null | sed "s/^/gpu /"
{image}
echo "end"
"""
_IMAGES = {
    "docker": "{command} image inspect --format {{{{.Id}}}} {image}",
    "singularity": "sha256sum {image}",
}


@dataclass(slots=True, kw_only=True)
class _Answer:
    """The answer of one host."""

    values: dict[str, list[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    ahead_s: float | None = None
    """Seconds by which its clock is ahead of this machine's; None where date prints no time."""
    left_bytes: int = MOST_BYTES
    """What it may still print."""

    def first(self, name: str) -> str:
        return self.values.get(name, [""])[0]


def examine(
    hosts: Sequence[str], *, kind: str, command: str, image: str, gpus: bool = True, run: Run | None = None
) -> tuple[Check, ...]:
    """One check of ssh for each host, then comparisons of the hosts that answered.

    Parameters
    ----------
    kind, command : the recipe's runtime; for ``host``, no image is compared.
    image : reference of a docker image, or path of a .sif on the hosts.
    gpus : whether the hosts must have GPUs.
    """
    head = hosts[0].rpartition("@")[2]
    look = ""
    if kind in _IMAGES:
        ask = _IMAGES[kind].format(command=shlex.quote(command), image=shlex.quote(image))
        look = f'id=$({ask} 2>&1) && echo "image ${{id%% *}}" || echo "image ! $(echo "$id" | tail -n 1)"'
    probe = _PROBE.format(head=shlex.quote(head), image=look)
    answers: dict[str, _Answer] = {host: _Answer() for host in hosts}

    def show(host: str, text: bytes, error: bool) -> None:
        answer, line = answers[host], text.decode(errors="replace").strip()
        name, _, value = line.partition(" ")
        answer.left_bytes -= len(text) + _LINE_BYTES
        if answer.left_bytes < 0:
            return
        if error:
            answer.errors.append(line)
            return
        answer.values.setdefault(name, []).append(value)
        if name == "clock" and (clock := re.match(r"[0-9]{1,12}(?![0-9])(\.[0-9]{1,9})?", value)):
            answer.ahead_s = float(clock[0]) - time.time()

    (run or _by_ssh)([(host, f"sh -c {shlex.quote(probe)}") for host in hosts], show)
    reached = {host: answer for host, answer in answers.items() if "end" in answer.values}
    return (
        *(_ssh(host, answer) for host, answer in answers.items()),
        *_alike(reached, head, kind, image, gpus=gpus),
    )


def _by_ssh(remote: Sequence[tuple[str, str]], show: fanout.Show) -> None:
    fanout.run(remote, show=show, say=lambda _: None)


def _ssh(host: str, answer: _Answer) -> Check:
    name = f"ssh {host}"
    if "end" in answer.values:
        return Check(name=name, verdict="ok", found="without a password")
    message = answer.errors[-1] if answer.errors else "no answer"
    hint = fanout.after(message, host)
    if "resolve hostname" in message:
        hint = "use an address in --hosts, or add a line for it to /etc/hosts"
    return Check(name=name, verdict="fail", found=message, hint=hint)


def _alike(
    answers: Mapping[str, _Answer], head: str, kind: str, image: str, *, gpus: bool
) -> Iterator[Check]:
    if not answers:
        return
    lost = [host for host, answer in answers.items() if not answer.first("head")]
    yield Check(
        name="head",
        verdict="fail" if lost else "ok",
        found=f"the name {head} cannot be resolved on {', '.join(lost)}"
        if lost
        else f"all resolve the name {head}",
        hint="use its address as the first of --hosts" if lost else "",
    )
    if kind in _IMAGES:
        yield _image(answers, kind, image)
    if gpus:
        drivers = {host: _gpus(answer, 0) for host, answer in answers.items()}
        yield _same("driver", drivers, hint="install the same driver on all: CUDA and NCCL depend on it")
        models = {host: _gpus(answer, 1) for host, answer in answers.items()}
        yield _same("GPUs", models, hint="the slowest GPU slows all of them down")
    without_mpi = [host for host, answer in answers.items() if not answer.first("orted")]
    yield Check(
        name="Open MPI",
        verdict="warn" if without_mpi else "ok",
        found=f"not on the PATH of {', '.join(without_mpi)}" if without_mpi else "on all",
        hint="apt-get install openmpi-bin there, or use --ssh" if without_mpi else "",
    )
    yield _clocks(answers)


def _clocks(answers: Mapping[str, _Answer]) -> Check:
    ahead_s = [answer.ahead_s for answer in answers.values() if answer.ahead_s is not None]
    if len(ahead_s) < len(answers):
        silent = ", ".join(host for host, answer in answers.items() if answer.ahead_s is None)
        return Check(name="clock", verdict="warn", found=f"date prints no time on {silent}", hint="date +%s")
    apart_s = max(ahead_s) - min(ahead_s)
    return Check(
        name="clock",
        verdict="warn" if apart_s > CLOCKS_S else "ok",
        found=f"{apart_s:.1f} s apart",
        hint="on each: timedatectl set-ntp true" if apart_s > CLOCKS_S else "",
    )


def _image(answers: Mapping[str, _Answer], kind: str, image: str) -> Check:
    ids = {host: answer.first("image") for host, answer in answers.items()}
    errors = {
        host: message.removeprefix("! ")
        for host, message in ids.items()
        if message.startswith("!") or not message
    }
    source = next((host for host in ids if host not in errors), "")
    differing = [host for host in ids if ids[host] != ids.get(source)]
    if not differing:
        return Check(name="image", verdict="ok", found=f"{image}, {_short(ids[source])} on all")
    if not source:
        message = f"no host has it: {next(iter(errors.values())) or 'no answer'}"
        return Check(name="image", verdict="fail", found=message, hint="imgkit build, then imgkit save")
    copy = (
        f"docker save {shlex.quote(image)} | ssh {differing[0]} docker load"
        if kind == "docker"
        else f"scp {shlex.quote(image)} {differing[0]}:{shlex.quote(image)}"
    )
    return Check(
        name="image",
        verdict="fail",
        found=_listed({h: errors.get(h) or _short(ids[h]) for h in ids}),
        hint=f"on {source}: {copy}",
    )


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def _gpus(answer: _Answer, column: int) -> str:
    """Driver (column 0), or number and model (1) of the GPUs; ``unknown`` if nvidia-smi prints nothing."""
    rows = [[part.strip() for part in line.split(",", 1)] for line in answer.values.get("gpu", [])]
    values = sorted(row[column] for row in rows if len(row) == 2)
    if not values:
        return "unknown"
    kinds = sorted(set(values))
    return ", ".join(kinds if column == 0 else (f"{values.count(kind)} x {kind}" for kind in kinds))


def _same(name: str, values: Mapping[str, str], *, hint: str) -> Check:
    kinds = set(values.values())
    if len(kinds) > 1:
        return Check(name=name, verdict="warn", found=_listed(values), hint=hint)
    only = kinds.pop()
    if only == "unknown":
        return Check(
            name=name,
            verdict="warn",
            found="unknown: nvidia-smi does not answer",
            hint="run nvidia-smi on each",
        )
    return Check(name=name, verdict="ok", found=f"{only} on all")


def _listed(values: Mapping[str, str]) -> str:
    return "; ".join(f"{host}: {value}" for host, value in values.items())
