"""The program buildah with a storage of its own, and what it needs of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.apptainer import rights
from imgkit_builder.apptainer.rights import Rights
from imgkit_builder.base import process
from imgkit_builder.base.process import Finished
from imgkit_builder.engine import build_program, builders
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

NAME = "buildah"
INSTALL = "apt-get install buildah, or dnf install buildah"
ISOLATION = "--isolation=chroot"
"""The way to run steps that needs no network namespace, no cgroup and no further program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buildah:
    """Buildah on one storage."""

    folder: Path
    """The folder in which it runs and keeps everything."""
    driver: str
    """``overlay``; ``vfs`` where the file system has none: each layer is then a copy of all below it."""

    @property
    def words(self) -> list[str]:
        """The words before the subcommand."""
        return [*_start(), "--root=storage", "--runroot=run", f"--storage-driver={self.driver}"]

    def run(
        self,
        *arguments: str,
        chunks: Iterator[bytes] | None = None,
        take: Callable[[str], None] | None = None,
    ) -> Finished:
        """Run a subcommand, which ends with this process, however that ends."""
        kept: list[str] = []
        argv = [*self.words, *arguments]
        code = build_program.guarded(
            argv, chunks or iter(()), take or kept.append, env=_environment(self.folder), folder=self.folder
        )
        return Finished(argv=tuple(argv), returncode=code, output="".join(kept))

    def need(self, *arguments: str) -> str:
        """The output of a subcommand.

        Raises
        ------
        ToolFailed : it fails; quotes its last lines.
        """
        done = self.run(*arguments)
        if done.returncode:
            raise ToolFailed(
                f"{NAME} {arguments[0]} failed with exit code {done.returncode}",
                hint=f"its last lines:\n{done.tail()}",
            )
        return done.output

    def remove(self) -> None:
        """Remove the storage with the files of all users in it."""
        words = [NAME, "unshare"] if os.getuid() else []
        argv = [*words, "rm", "-rf", "--", "storage", "run"]
        build_program.guarded(
            argv, iter(()), lambda _: None, env=_environment(self.folder), folder=self.folder
        )


def look(*, root: Path = Path("/"), uid: int | None = None) -> Rights:
    """Find out, from files alone, how buildah would run the steps of a Dockerfile for this user."""
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        return Rights(way="as root")
    found = rights.look(root=root, uid=uid)
    if not found.way or found.has_range:
        return found
    return Rights(
        way="",
        fault="buildah needs several users, and this one has no range in /etc/subuid and /etc/subgid",
        hint="ask an administrator for a range in both files, and for newuidmap; or build --with apptainer",
    )


def needed() -> Rights:
    """How steps run here.

    Raises
    ------
    ToolMissing : there is no buildah.
    CheckFailed : this user cannot build with it.
    """
    process.need(NAME, f"{INSTALL}; or build --with apptainer")
    found = look()
    if not found.way:
        raise CheckFailed(f"buildah cannot build for this user: {found.fault}", hint=found.hint)
    return found


def opened(folder: Path) -> Buildah:
    """Buildah with a new storage in `folder`, on overlay where the file system has it."""
    for driver in ("overlay", "vfs"):
        made = Buildah(folder=folder, driver=driver)
        if made.run("images", "--quiet").returncode == 0 or driver == "vfs":
            return made
        made.remove()
    raise AssertionError  # pragma: no cover - the loop has returned


def _start() -> Sequence[str]:
    # Mounts of a storage belong to the machine where root builds. In a namespace they end with the build.
    unshare = ("unshare", "--mount", "--propagation=private", "--")
    return (*(unshare if os.getuid() == 0 and shutil.which("unshare") else ()), NAME)


def _environment(folder: Path) -> dict[str, str]:
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    # Buildah writes a list of blobs below XDG_DATA_HOME.
    return {**builders.own_storage(), "TMPDIR": str(temporary), "XDG_DATA_HOME": str(temporary)}
