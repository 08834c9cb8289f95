"""Remove the settings of the host that would harm the workers in the container.

Singularity and pyxis pass every variable of the node on to the container, and so do MPI's launchers. In the
container, some of them do harm:

* XALT's LD_PRELOAD names a file that the image lacks.
* PMIX_* make an MPI library of the image talk to the launcher of the node agent (pyxis issue 88, shapepipe
  issue 744).
* A virtual environment of the host hides the image's packages.
* A TMPDIR of PBS is too long for the name of a socket.

Core dumps are switched off as well: a thousand ranks that fail would fill a scratch folder with them.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError

CORE = "core"
"""Name by which ``--keep-env`` keeps core dumps, as limits.conf(5) calls them."""
MOST_TMPDIR = 60
"""Longest TMPDIR in characters with which the names of sockets in it still fit into 107 bytes (unix(7)).

multiprocessing adds ``/pymp-XXXXXXXX/listener-XXXXXXXX``, and torch ``/torch-shm-dir-XXXXXX/manager.sock``.
"""
_MPI = re.compile(r"(?:PMIX|PMI2?|OMPI)_")
# Variables that a launcher sets for each process. Without any, no launcher of MPI has started this process,
# and other variables with these prefixes are settings of the user.
_OF_LAUNCHER = ("PMIX_RANK", "PMIX_NAMESPACE", "PMI_RANK", "PMI_FD", "PMI_PORT", "OMPI_COMM_WORLD_RANK")
_OF_PYTHON = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME")
# A folder of PYTHONPATH with such a part in its path holds installed packages, not the user's own modules.
_PACKAGES = {"site-packages", "dist-packages"}
# One of these is set in every container of Singularity or Apptainer.
_CONTAINER = ("SINGULARITY_CONTAINER", "APPTAINER_CONTAINER")


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanEnvironment:
    """The changes to the environment of the workers, and to the limits of this process."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that get another value."""
    unset: tuple[str, ...] = ()
    """Variables that are removed."""
    text: str = ""
    """One line about the changes. Empty if nothing is changed."""
    limits_core: bool = False
    """True if core dumps are switched off."""
    tmpdir: str = ""
    """The long folder to which the new, short TMPDIR is a link. Empty if TMPDIR stays as it is."""

    @property
    def changes_variables(self) -> bool:
        """Return whether a variable is changed or removed."""
        return bool(self.env or self.unset)

    def apply(self) -> None:
        """Make the link for a short TMPDIR, and switch core dumps off for this process and its children.

        The variables are not changed here: the caller passes them to the workers.

        Raises
        ------
        UsageError : the link for TMPDIR cannot be made, or another user may have made it.
        """
        if self.limits_core:
            # Only the soft limit: a program may raise it again.
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if self.tmpdir:
            link = PurePath(self.env["TMPDIR"])
            try:
                files.make_links(Path(link.parent), {link.name: self.tmpdir})
            except OSError as error:
                hint = "export TMPDIR=/tmp, or --keep-env TMPDIR"
                problem = f"no short name for TMPDIR can be made: {error.strerror}"
                raise UsageError(problem, where=str(link.parent), hint=hint) from error


def clean_environment(
    env: Mapping[str, str],
    image_env: Mapping[str, str] | None,
    *,
    keep: Sequence[str],
    prefix: str,
    is_mpi_rank: bool = False,
    exists: Callable[[str], bool] = os.path.exists,
) -> CleanEnvironment:
    """Return the changes that keep harmful settings of the host away from the workers.

    Parameters
    ----------
    image_env : the image's own variables, which stay. None if they are unknown.
    keep : names of variables that stay, or patterns such as ``PMIX_*``. `CORE` keeps core dumps.
    prefix : ``sys.prefix`` of the Python that runs the workers.
    is_mpi_rank : True if this process is a rank of an MPI launcher, whose variables it needs.
    exists : returns whether a path exists in the container.
    """
    image = image_env or {}
    names = []
    for name, value in env.items():
        is_kept = any(fnmatchcase(name, pattern) for pattern in keep)
        # A variable with the image's own value does not come from the host.
        if not is_kept and image.get(name) != value:
            names.append(name)
    unset = []
    if not is_mpi_rank and any(name in env for name in _OF_LAUNCHER):
        unset = [name for name in names if _MPI.match(name)]
    parts = _count_by_prefix(unset)
    changes: dict[str, str] = {}
    if "LD_PRELOAD" in names:
        changes["LD_PRELOAD"] = " ".join(_loadable_libraries(env["LD_PRELOAD"], exists))
    # Outside of a container, a virtual environment is the user's own.
    if image_env is not None or any(name in env for name in _CONTAINER):
        changes |= _remove_host_python(env, names, image, prefix)
    changes = {name: value for name, value in changes.items() if value != env[name]}
    parts += changes
    unset += [name for name, value in changes.items() if not value]
    limits_core = CORE not in keep and resource.getrlimit(resource.RLIMIT_CORE)[0] != 0
    if limits_core:
        parts.append("core dumps")
    texts = []
    if parts:
        texts.append(f"without {', '.join(parts)} of the host")
    tmpdir = ""
    if "TMPDIR" in names and len(env["TMPDIR"]) > MOST_TMPDIR:
        tmpdir = env["TMPDIR"]
        digest = hashlib.sha256(tmpdir.encode()).hexdigest()[:8]
        changes["TMPDIR"] = f"/tmp/imgkit-tmp-{os.geteuid()}-{digest}/t"  # noqa: S108 - the user's own folder in it
        texts.append(f"with TMPDIR={changes['TMPDIR']} for a path of {len(tmpdir)} characters")
    text = f"workers start {' and '.join(texts)} (to keep one: --keep-env NAME)" if texts else ""
    return CleanEnvironment(
        env={name: value for name, value in changes.items() if value},
        unset=tuple(unset),
        text=text,
        limits_core=limits_core,
        tmpdir=tmpdir,
    )


def may_remove(name: str) -> bool:
    """Return whether `clean_environment` may remove or change this variable of a user."""
    return _MPI.match(name) is not None or name in ("LD_PRELOAD", "TMPDIR", "PYTHONPATH", *_OF_PYTHON)


def _count_by_prefix(names: Sequence[str]) -> list[str]:
    """Return one text for all variables of each prefix, such as ``PMIX_* (12)``."""
    prefixes = [name.partition("_")[0] for name in names]
    return [f"{prefix}_* ({prefixes.count(prefix)})" for prefix in dict.fromkeys(prefixes)]


def _loadable_libraries(preload: str, exists: Callable[[str], bool]) -> list[str]:
    """Return the libraries of an LD_PRELOAD that exist here, without XALT, which counts jobs of the host.

    A name without a slash stays: the loader searches for it on the library path.
    """
    libraries = []
    for path in re.split(r"[\s:]+", preload.strip()):
        can_load = "/" not in path or exists(path)
        if can_load and "xalt" not in path.lower():
            libraries.append(path)
    return libraries


def _remove_host_python(
    env: Mapping[str, str], names: Sequence[str], image: Mapping[str, str], prefix: str
) -> dict[str, str]:
    """Return new values for variables of Python, without what belongs to a Python of the host.

    Folders of installed packages leave PYTHONPATH, and programs of a virtual environment leave PATH. A
    variable with an empty value is to be removed.
    """
    changes = {}
    if "PYTHONPATH" in names:
        of_image = image.get("PYTHONPATH", "").split(":")
        folders = [
            folder
            for folder in env["PYTHONPATH"].split(":")
            if folder in of_image or not _PACKAGES & set(PurePath(folder).parts)
        ]
        changes["PYTHONPATH"] = ":".join(folders)
    for name in _OF_PYTHON:
        if name in names and env[name] != prefix:
            changes[name] = ""
            if "PATH" in env:
                folders = changes.get("PATH", env["PATH"]).split(":")
                programs = f"{env[name]}/bin"
                changes["PATH"] = ":".join(folder for folder in folders if folder != programs)
    return changes
