"""``imgkit remote``: manage the clusters that ``imgkit run`` reaches over ssh."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from pathlib import Path

import typer

from imgkit_builder.base.sizes import size_text
from imgkit_builder.cli.common import HERE, JSON, flag_option, format_columns, print_message, print_result
from imgkit_builder.cli.jobs import connect_to
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.remote import config, connection
from imgkit_builder.jobs.remote import gc as collector
from imgkit_builder.recipe import targets
from imgkit_entrypoints.errors import UsageError

_group = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Manage clusters that are reached over ssh.",
)
GROUPS = {"remote": _group}
"""The verbs in this module that are groups of verbs."""

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
    bwlimit: float = typer.Option(0.0, metavar="MB/s", help="Upload bandwidth limit in MB/s; 0: none."),
    pvc: str = typer.Option(
        "",
        metavar="CLAIM:/PATH",
        help="The remote only stores: the volume on which pods have DIR, and its path there. The client on "
        "this machine submits.",
    ),
    volume: str = typer.Option(
        "",
        metavar="/PATH",
        help="With --pvc: the volume's root on the remote (default: the mount point above DIR).",
    ),
    replace: bool = flag_option("--replace", "Replace a remote of that name."),
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
      imgkit remote add mlo me@haas001.rcp.epfl.ch:/mnt/mlo/scratch/homes/me/imgkit \\
        --recipe mlo --pvc mlo-scratch:/mloscratch
    """
    if name == HERE:
        hint = "choose another name, for example that of the cluster"
        raise UsageError(
            f"--on {HERE} means this machine, so no remote has that name", where="NAME", hint=hint
        )
    host, folder = config.parse_address(address)
    if transfer:
        config.check_host(transfer, where="--transfer")
    if recipe:
        target = targets.load_target(recipe)
        # A file is stored as a path, and a shipped recipe as its name.
        recipe = str(target.file) if Path(recipe).is_file() else target.name
    if volume and not pvc:
        raise UsageError("--volume without --pvc", where="--volume", hint="--pvc CLAIM:/PATH")
    keep_s = 0 if idle_timeout == "0" else quoting.parse_time_limit(idle_timeout, where="--idle-timeout")
    remote = config.Remote(
        name=config.check_name(name),
        address=host,
        folder=folder,
        recipe=recipe,
        transfer=transfer,
        keep_s=keep_s,
        bwlimit=config.check_bwlimit(bwlimit, where="--bwlimit"),
        pvc=config.check_pvc(pvc, where="--pvc") if pvc else "",
        volume=config.check_volume(volume, where="--volume") if volume else "",
    )
    config.add_remote(remote, replace=replace)
    print_result(
        dataclasses.asdict(remote),
        f"{name}  {host}:{folder}",
        f"next: imgkit doctor --on {name}",
        as_json=as_json,
    )


@_group.command("list")
def list_remotes(as_json: bool = JSON) -> None:
    """List the remotes."""
    json_rows = []
    table_rows = []
    for remote in config.read_remotes().values():
        json_rows.append(dataclasses.asdict(remote))
        table_rows.append((remote.name, f"{remote.address}:{remote.folder}", remote.recipe))
    lines = (
        format_columns(table_rows) if table_rows else ("no remotes; imgkit remote add NAME USER@HOST:DIR",)
    )
    print_result({"remotes": json_rows}, *lines, as_json=as_json)


@_group.command("remove")
def remove(name: str = NAME, as_json: bool = JSON) -> None:
    """Remove a remote from the list; its files and jobs stay."""
    remote = config.remove_remote(name)
    # Without this, the shared ssh connection would stay open until its idle timeout.
    connection.connect(remote).close()
    print_result(
        dataclasses.asdict(remote), f"its folder {remote.folder} on {remote.address} is kept", as_json=as_json
    )


@_group.command("gc")
def gc(
    name: str = NAME,
    days: int = typer.Option(
        30, metavar="N", min=1, max=36500, help="Keep what was used in the last N days."
    ),
    delete: bool = flag_option("--delete", "Remove what is unused instead of listing it."),
    as_json: bool = JSON,
) -> None:
    """List unused images, code and data on a remote; --delete removes them.

    An image, or a folder of code or data, is in use if it was sent or chosen in the
    last N days, if a run of that time used it, or if a pending or running job names
    it. Runs, and files that imgkit did not create, are never touched.

    \b
    Examples:
      imgkit remote gc mn5
      imgkit remote gc mn5 --days 7 --delete
    """
    remote_connection = connect_to(name)
    unused = collector.find_unused(remote_connection, days)
    removed_paths: Collection[str] = ()
    if delete:
        removed_paths = collector.remove_unused(remote_connection, unused)
    if unused.unknown:
        print_message(f"what any job there names counts as in use: {'; '.join(unused.unknown)}")
    if not unused.folders:
        lines = [f"nothing is unused; {unused.used} in use"]
    elif delete:
        lines = _removal_lines(unused, removed_paths)
    else:
        lines = _unused_lines(unused)
        lines.append(f"next: imgkit remote gc {name} --days {days} --delete")
    rows = []
    for folder in unused.folders:
        row = {"path": folder.path, "bytes": folder.size_bytes, "last_used": int(folder.used_s)}
        rows.append({**row, "removed": folder.path in removed_paths})
    data = {
        "remote": name,
        "folder": remote_connection.remote.folder,
        "days": days,
        "in_use": unused.used,
        "unused": rows,
    }
    print_result(data, *lines, as_json=as_json)


def _unused_lines(unused: collector.Unused) -> list[str]:
    """Return a line for each folder that is unused, and a last line with their total size."""
    folder_lines = [_format_folder(folder) for folder in unused.folders]
    size = size_text(sum(folder.size_bytes for folder in unused.folders))
    return [*folder_lines, f"{len(unused.folders)} unused, {size}; {unused.used} in use"]


def _removal_lines(unused: collector.Unused, removed_paths: Collection[str]) -> list[str]:
    """Return a line for each folder that was unused, and a last line with the total size that was removed.

    If a job has begun to use a folder in the meantime, the folder is kept and its line says ``in use``.
    """
    folder_lines = []
    removed_bytes = 0
    # The number of folders that jobs used when the list of unused folders was made.
    remaining_count = unused.used
    for folder in unused.folders:
        if folder.path in removed_paths:
            verdict = "removed  "
            removed_bytes += folder.size_bytes
        else:
            verdict = "in use   "
            remaining_count += 1
        folder_lines.append(verdict + _format_folder(folder))
    return [
        *folder_lines,
        f"{len(removed_paths)} removed, {size_text(removed_bytes)}; {remaining_count} stay",
    ]


def _format_folder(folder: collector.StoredFolder) -> str:
    """Return a line with the size of a folder, the day of its last use, and its path."""
    day = time.strftime("%Y-%m-%d", time.localtime(folder.used_s))
    return f"{size_text(folder.size_bytes):>10}  last used {day}  {folder.path}"


@_group.command("disconnect")
def disconnect(name: str = NAME, as_json: bool = JSON) -> None:
    """Close the shared connection; the next command logs in again."""
    was_open = connection.connect(config.get_remote(name)).close()
    text = f"the connection to {name} has ended" if was_open else f"no connection to {name} was open"
    print_result({"remote": name, "ended": was_open}, text, as_json=as_json)
