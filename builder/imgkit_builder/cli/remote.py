"""``imgkit remote``: the clusters that ``imgkit run`` reaches over ssh."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.base.process import INTERRUPTED
from imgkit_builder.cli.common import JSON, show, show_checks
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import ImgkitError

if TYPE_CHECKING:
    from imgkit_builder.base.process import Finished
    from imgkit_builder.job.request import SubmittedJob
    from imgkit_builder.project.history import JobReport
    from imgkit_builder.remote.connection import Connection


_group = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Manage clusters that are reached over ssh.",
)
GROUPS = {"remote": _group}
"""Verbs that are groups of verbs."""

NAME: str = typer.Argument(metavar="NAME", help="Name of a remote (imgkit remote list).")


@_group.command("add")
def add(
    name: str = typer.Argument(metavar="NAME", help="A name of your choice, for example mn5."),
    address: str = typer.Argument(
        metavar="USER@HOST[:DIR]",
        help="A login node, or a Host of ~/.ssh/config, and imgkit's folder there (default: imgkit in your "
        "home).",
    ),
    recipe: str = typer.Option("", metavar="RECIPE", help="Default recipe for this remote."),
    transfer: str = typer.Option(
        "", metavar="USER@HOST2", help="Send files through this host, which has the same folders."
    ),
    idle_timeout: str = typer.Option(
        "10m",
        metavar="TIME",
        help="Idle timeout of the shared ssh connection; 0 disables sharing.",
    ),
    replace: bool = typer.Option(False, "--replace", help="Replace a remote of that name."),
    as_json: bool = JSON,
) -> None:
    """Register a cluster; no connection is made.

    All connections go through your own ssh: its configuration, keys, agents, jumps
    and second factors work as you set them up. The list is
    ~/.config/imgkit/remotes.toml, which holds no secret.

    \b
    Examples:
      imgkit remote add mn5 me@glogin1.bsc.es:/gpfs/scratch/bsc98/me --recipe mn5
      imgkit remote add mn5 mn5-login --recipe mn5 --transfer me@transfer1.bsc.es
    """
    from imgkit_builder.job import quoting
    from imgkit_builder.job.ssh import fanout
    from imgkit_builder.remote import config
    from imgkit_entrypoints.errors import UsageError

    host, folder = config.parse(address)
    if transfer and not fanout.is_host(transfer):
        raise UsageError(f"{transfer!r} is not an address", where="--transfer", hint="USER@HOST")
    if recipe:
        recipe = str(_target(recipe).file) if Path(recipe).is_file() else _target(recipe).name
    keep_s = 0 if idle_timeout == "0" else quoting.seconds(idle_timeout, where="--idle-timeout")
    remote = config.Remote(
        name=config.check_name(name),
        address=host,
        folder=folder,
        recipe=recipe,
        transfer=transfer,
        keep_s=keep_s,
    )
    config.add(remote, replace=replace)
    show(_data(remote), f"{name}  {host}:{folder}", f"next: imgkit remote check {name}", as_json=as_json)


@_group.command("list")
def list_remotes(as_json: bool = JSON) -> None:
    """List the remotes."""
    from imgkit_builder.remote import config

    remotes = tuple(config.remotes().values())
    rows = [
        f"{remote.name:12}  {remote.address}:{remote.folder}  {remote.recipe}".rstrip() for remote in remotes
    ]
    rows = rows or ["no remotes; imgkit remote add NAME USER@HOST:DIR"]
    data = {"remotes": [dataclasses.asdict(remote) for remote in remotes]}
    show(data, *rows, as_json=as_json)


@_group.command("remove")
def remove(name: str = NAME, as_json: bool = JSON) -> None:
    """Remove a remote from the list; its files and jobs stay."""
    from imgkit_builder.remote import config, connection

    remote = config.remove(name)
    connection.connect(remote).close()
    show(_data(remote), f"its folder {remote.folder} on {remote.address} is kept", as_json=as_json)


@_group.command("check")
def check(name: str = NAME, as_json: bool = JSON) -> None:
    """Log in once and check for what jobs need; exit code 1 if something is missing.

    Checks the tools that imgkit uses there, the scheduler, the runtime, and the folder
    with its free space and quota.

    \b
    Examples:
      imgkit remote check mn5
    """
    from imgkit_builder.remote import check as examined
    from imgkit_builder.remote import config, connection

    remote = config.find(name)
    target = _target(remote.recipe) if remote.recipe else None
    results = examined.examine(connection.connect(remote, ask=may_ask()), target)
    show_checks(results, as_json=as_json, remote=name)


@_group.command("gc")
def gc(
    name: str = NAME,
    days: int = typer.Option(30, metavar="N", min=1, max=36500, help="Keep files used in the last N days."),
    delete: bool = typer.Option(False, "--delete", help="Remove the unused files instead of listing them."),
    as_json: bool = JSON,
) -> None:
    """List unused images and deltas on a remote; --delete removes them.

    A file is in use if it was sent or chosen in the last N days, if a run of that
    time used it, or if a pending or running job names it. Runs, and files that imgkit
    did not create, are never touched.

    \b
    Examples:
      imgkit remote gc mn5
      imgkit remote gc mn5 --days 7 --delete
    """
    from imgkit_builder.remote import gc as unused_files

    far = connected(name)
    unused = unused_files.find_unused(far, days)
    removed = set(unused_files.remove(far, unused)) if delete else set()
    if unused.unknown:
        terminal.err(f"imgkit: the files of all jobs there count as in use: {'; '.join(unused.unknown)}")
    rows = [
        {
            "path": file.path,
            "bytes": file.size_bytes,
            "last_used": int(file.used_s),
            "removed": file.path in removed,
        }
        for file in unused.files
    ]
    data = {
        "remote": name,
        "folder": far.remote.folder,
        "days": days,
        "in_use": unused.used,
        "unused": rows,
    }
    show(
        data,
        *_unused_lines(rows, unused.used, delete=delete, again=f"imgkit remote gc {name} --days {days}"),
        as_json=as_json,
    )


def _unused_lines(rows: list[dict[str, Any]], in_use: int, *, delete: bool, again: str) -> list[str]:
    """The files in lines, and what comes next."""
    lines = []
    for row in rows:
        day = time.strftime("%Y-%m-%d", time.localtime(row["last_used"]))
        verdict = "" if not delete else "removed  " if row["removed"] else "in use   "
        lines.append(f"{verdict}{row['bytes'] / 1e6:10.1f} MB  last used {day}  {row['path']}")
    chosen = [row for row in rows if row["removed"] or not delete]
    size = sum(row["bytes"] for row in chosen) / 1e6
    if not rows:
        return [f"nothing is unused; {in_use} files are in use"]
    if delete:
        stay = in_use + len(rows) - len(chosen)
        return [*lines, f"{len(chosen)} files removed, {size:.1f} MB; {stay} stay"]
    counted = f"{len(rows)} files are unused, {size:.1f} MB; {in_use} are in use"
    return [*lines, counted, f"next: {again} --delete"]


@_group.command("disconnect")
def disconnect(name: str = NAME, as_json: bool = JSON) -> None:
    """Close the shared connection; the next command logs in again."""
    from imgkit_builder.remote import config, connection

    was_open = connection.connect(config.find(name)).close()
    text = f"the connection to {name} has ended" if was_open else f"no connection to {name} was open"
    show({"remote": name, "ended": was_open}, text, as_json=as_json)


def may_ask() -> bool:
    """Whether there is a person whom ssh can ask for a password or a second factor."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def connected(name: str) -> Connection:
    """How to reach the remote `name`."""
    from imgkit_builder.remote import config, connection

    return connection.connect(config.find(name), ask=may_ask())


def keep_state(record: SubmittedJob) -> None:
    """Save the state for ``imgkit runs``; a folder that cannot be written loses only that."""
    from imgkit_builder.job import submit

    with contextlib.suppress(OSError):
        submit.keep(record)


def follow(far: Connection, record: SubmittedJob) -> int:
    """Show the job's output until it ends; the result is imgkit's exit code."""
    from functools import partial

    from imgkit_builder.project import history
    from imgkit_builder.remote import jobs
    from imgkit_builder.remote.connection import Cut

    def say(text: str) -> None:
        terminal.err(f"imgkit: {text}")

    say(f"job {record.handle}; Ctrl-C stops following; the job continues")
    back = f"imgkit logs {record.handle}; imgkit status|cancel|fetch {record.handle}"
    try:
        jobs.follow(far, record, terminal.passing(), say)
    except KeyboardInterrupt:
        say(f"the job continues; {back}")
        return INTERRUPTED
    except Cut as error:
        raise Cut(error.what, where=error.where, hint=f"the job continues; {back}\n{error.hint}") from error
    return _finish(history.report(record, partial(jobs.finished, far)))


def _finish(report: JobReport) -> int:
    """Save and show how a followed job has ended; return imgkit's exit code."""
    from imgkit_builder.project import history

    keep_state(report.record)
    terminal.err(f"imgkit: {history.ending_text(report)}")
    return 0 if report.record.state in ("succeeded", "ended") else 1


def can_follow_here(record: SubmittedJob) -> bool:
    """Return whether `follow_here` can; a job in pods has no output until a node has pulled the image."""
    from imgkit_builder.job import systems

    system = systems.named(record.system)
    return system.reports_state and system.log_source(record)[0] == "tail"


def follow_here(record: SubmittedJob) -> int:
    """Show the output of a job of this machine until it ends; the result is imgkit's exit code."""
    from imgkit_builder.base import process
    from imgkit_builder.job import systems
    from imgkit_builder.project import history

    run, argv = runner(record), systems.named(record.system).log_source(record)

    def has_ended() -> bool:
        return history.report(record, run).has_ended

    try:
        for pause_s in history.poll_pauses():
            if Path(argv[-1]).exists() or has_ended():
                break
            time.sleep(pause_s)
        process.attached(argv, until=has_ended)
        report = history.wait(record, run)
    except KeyboardInterrupt:
        terminal.err(f"imgkit: the job continues; imgkit logs {record.handle}")
        return INTERRUPTED
    return _finish(report)


def runner(record: SubmittedJob) -> Callable[[Sequence[str]], Finished]:
    """What runs a command where the job is."""
    from imgkit_builder.workflow import jobs

    return jobs.runner(record, may_ask=may_ask())


def refreshed(records: Sequence[SubmittedJob]) -> tuple[tuple[SubmittedJob, ...], bool]:
    """The records with the states that their systems know now, which are kept; and whether all answered.

    A remote that cannot be reached is reported once, and is not asked again.
    """
    from imgkit_builder.project import history
    from imgkit_builder.remote.connection import Cut

    current, silent, complete = [], set(), True
    for record in records:
        now = record
        try:
            if record.remote not in silent:
                now = history.refresh_state(record, runner(record))
        except ImgkitError as error:
            terminal.err(f"imgkit: {record.handle}: {error.what}")
            complete = False
            if isinstance(error, Cut):
                silent.add(record.remote)
        if now != record:
            keep_state(now)
        current.append(now)
    return tuple(current), complete


def _target(recipe: str) -> Any:
    from imgkit_builder.recipe import targets

    return targets.find(recipe)


def _data(remote: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(remote)}
