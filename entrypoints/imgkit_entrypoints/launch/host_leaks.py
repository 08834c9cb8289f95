"""Keep settings of the host that would do harm away from the workers in the container.

Singularity, pyxis and the launchers of MPI pass every variable of the node on to the container. Some of them
do harm there:

* XALT's LD_PRELOAD names a file that the image lacks.
* PMIX_* make an MPI library of the image talk to the launcher of the node agent (pyxis issue 88, shapepipe
  issue 744).
* A virtual environment of the host hides the image's packages.
* A TMPDIR of PBS is too long for the name of a socket.

Core dumps are switched off as well: if a thousand ranks fail, their core dumps would fill a scratch folder.
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
"""Name that keeps core dumps on when given to ``--keep-env``. limits.conf(5) uses the same name."""
MAX_TMPDIR = 60
"""Longest TMPDIR in characters. The path of a socket must fit into 107 bytes (unix(7)).

To TMPDIR, multiprocessing adds ``/pymp-XXXXXXXX/listener-XXXXXXXX``, and torch adds
``/torch-shm-dir-XXXXXX/manager.sock``.
"""
_MPI = re.compile(r"(?:PMIX|PMI2?|OMPI)_")
# Variables that a launcher of MPI sets for each process. If none of them is set, no such launcher has started
# this process. Other variables with the prefixes above are then settings of the user.
_LAUNCHER_VARIABLES = (
    "PMIX_RANK",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_FD",
    "PMI_PORT",
    "OMPI_COMM_WORLD_RANK",
)
# Variables whose value is the folder of a Python or of its virtual environment.
_PYTHON_FOLDER_VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME")
# A folder in PYTHONPATH contains installed packages, and not the user's own modules, if one of these names is
# in its path.
_PACKAGES = {"site-packages", "dist-packages"}
# Every container of Singularity or Apptainer sets one of these variables.
_CONTAINER = ("SINGULARITY_CONTAINER", "APPTAINER_CONTAINER")


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanEnvironment:
    """The changes to the environment of the workers, and to the limits of this process."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that get a new value."""
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
        """Create the link for a short TMPDIR, and switch off core dumps for this process and its children.

        The environment itself is not changed here. The caller passes `env` and `unset` to the workers.

        Raises
        ------
        UsageError : the link for TMPDIR cannot be created, or its folder belongs to another user.
        """
        if self.limits_core:
            _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
            resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))  # a program may raise it again
        if not self.tmpdir:
            return
        # `env` contains the new, short TMPDIR, and `tmpdir` the long folder to which it leads.
        link = PurePath(self.env["TMPDIR"])
        try:
            files.make_links(Path(link.parent), {link.name: self.tmpdir})
        except OSError as error:
            raise UsageError(
                f"no short name for TMPDIR can be made: {error.strerror}",
                where=str(link.parent),
                hint="export TMPDIR=/tmp, or --keep-env TMPDIR",
            ) from error


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

    A container inherits most variables of the host. These settings do harm: variables of the host's MPI and
    Python, libraries in LD_PRELOAD that the image lacks, a TMPDIR that is too long for sockets, and core
    dumps.

    Parameters
    ----------
    image_env : the image's own variables, which stay. None if they are unknown.
    keep : names of variables that stay, or patterns such as ``PMIX_*``. `CORE` keeps core dumps.
    prefix : ``sys.prefix`` of the Python that runs the workers.
    is_mpi_rank : True if this process is a rank of an MPI launcher. It then needs the launcher's variables.
    exists : returns whether a path exists in the container.
    """
    image = image_env or {}
    host_env = _select_host_variables(env, image, keep)
    mpi_names: list[str] = []
    if not is_mpi_rank and any(name in env for name in _LAUNCHER_VARIABLES):
        mpi_names = [name for name in host_env if _MPI.match(name)]
    new_values = {}
    if "LD_PRELOAD" in host_env:
        new_values["LD_PRELOAD"] = " ".join(_select_loadable_libraries(env["LD_PRELOAD"], exists))
    # Only in a container does a virtual environment come from the host. Elsewhere, the user works in it.
    if image_env is not None or any(name in env for name in _CONTAINER):
        new_values |= _remove_host_python(env, host_env, image, prefix)
    changes = {name: value for name, value in new_values.items() if value != env[name]}
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_CORE)
    limits_core = CORE not in keep and soft_limit != 0
    removed = [*_count_by_prefix(mpi_names), *changes]
    if limits_core:
        removed.append("core dumps")
    long_tmpdir = short_tmpdir = ""
    if len(host_env.get("TMPDIR", "")) > MAX_TMPDIR:
        long_tmpdir = host_env["TMPDIR"]
        short_tmpdir = changes["TMPDIR"] = _make_short_tmpdir(long_tmpdir)
    # An empty new value means that the variable is removed.
    empty_names = [name for name, value in changes.items() if not value]
    return CleanEnvironment(
        env={name: value for name, value in changes.items() if value},
        unset=(*mpi_names, *empty_names),
        text=_describe_changes(removed, long_tmpdir, short_tmpdir),
        limits_core=limits_core,
        tmpdir=long_tmpdir,
    )


def _describe_changes(removed: Sequence[str], long_tmpdir: str, short_tmpdir: str) -> str:
    """Return one line about the changes, or "" if there are none.

    `removed` names what the workers no longer get, such as ``PMIX_* (12)`` and ``core dumps``. Both paths are
    "" if TMPDIR stays as it is.
    """
    changes = []
    if removed:
        changes.append(f"without {', '.join(removed)} of the host")
    if short_tmpdir:
        changes.append(f"with TMPDIR={short_tmpdir} for a path of {len(long_tmpdir)} characters")
    if not changes:
        return ""
    return f"workers start {' and '.join(changes)} (to keep one: --keep-env NAME)"


def _select_host_variables(
    env: Mapping[str, str], image: Mapping[str, str], keep: Sequence[str]
) -> dict[str, str]:
    """Return the variables that come from the host, without those that the user wants to keep.

    A variable whose value is the same as in the image does not come from the host. `image` contains the
    variables of the image, and is empty if they are unknown. `keep` contains names or patterns, such as
    ``PMIX_*``.
    """
    host_env = {}
    for name, value in env.items():
        is_kept = any(fnmatchcase(name, pattern) for pattern in keep)
        if not is_kept and image.get(name) != value:
            host_env[name] = value
    return host_env


def _make_short_tmpdir(tmpdir: str) -> str:
    """Return a short path in /tmp that replaces a TMPDIR that is too long for sockets."""
    # Because of the digest, each long TMPDIR has its own link, even if a user has several jobs on the node.
    digest = hashlib.sha256(tmpdir.encode()).hexdigest()[:8]
    return f"/tmp/imgkit-tmp-{os.geteuid()}-{digest}/t"  # noqa: S108 - the user's own folder in it


def may_remove(name: str) -> bool:
    """Return whether `clean_environment` may remove or change the variable `name` of a user."""
    other_names = ("LD_PRELOAD", "TMPDIR", "PYTHONPATH", *_PYTHON_FOLDER_VARIABLES)
    return _MPI.match(name) is not None or name in other_names


def _count_by_prefix(names: Sequence[str]) -> list[str]:
    """Return one text for each prefix of variables, with their number, such as ``PMIX_* (12)``."""
    prefixes = [name.partition("_")[0] for name in names]
    return [f"{prefix}_* ({prefixes.count(prefix)})" for prefix in dict.fromkeys(prefixes)]


def _select_loadable_libraries(preload: str, exists: Callable[[str], bool]) -> list[str]:
    """Return the libraries in LD_PRELOAD that should still be loaded in this container.

    Libraries that do not exist in the container are left out, because the loader would print an error about
    them whenever a program starts. XALT, with which a site counts the programs of its jobs, is left out as
    well. A name without a slash stays, because the loader searches for it on the library path. `exists`
    returns whether a path exists in the container.
    """
    libraries = []
    for path in re.split(r"[\s:]+", preload.strip()):  # LD_PRELOAD may use spaces or colons
        can_load = "/" not in path or exists(path)
        if can_load and "xalt" not in path.lower():
            libraries.append(path)
    return libraries


def _remove_host_python(
    env: Mapping[str, str], host_env: Mapping[str, str], image: Mapping[str, str], prefix: str
) -> dict[str, str]:
    """Return new values for variables of Python, without the parts that belong to a Python of the host.

    The image's Python cannot load packages that were installed for another Python. So folders of installed
    packages are removed from PYTHONPATH, and variables such as VIRTUAL_ENV are removed. The program folder of
    such an environment is also removed from PATH. Other variables are not in the result. An empty new value
    means that the variable should be removed.

    Parameters
    ----------
    env : the whole environment, of which only PATH is used. PATH is changed even if `host_env` lacks it.
    host_env : the part of `env` that comes from the host and that the user does not want to keep.
    image : the image's own variables.
    prefix : ``sys.prefix`` of the Python that runs the workers. Its own virtual environment stays.
    """
    new_values = {}
    # The image may add folders of packages to PYTHONPATH itself, which its own Python can load.
    if "PYTHONPATH" in host_env:
        image_folders = image.get("PYTHONPATH", "").split(":")
        new_values["PYTHONPATH"] = _drop_package_folders(host_env["PYTHONPATH"], image_folders)
    program_folders = []
    for name in _PYTHON_FOLDER_VARIABLES:
        folder = host_env.get(name, "")
        if folder not in ("", prefix):  # the workers' own Python may be in a virtual environment, which stays
            new_values[name] = ""
            program_folders.append(f"{folder}/bin")
    if program_folders and "PATH" in env:
        remaining_folders = [folder for folder in env["PATH"].split(":") if folder not in program_folders]
        new_values["PATH"] = ":".join(remaining_folders)
    return new_values


def _drop_package_folders(python_path: str, image_folders: Sequence[str]) -> str:
    """Return a PYTHONPATH without folders of installed packages, except those of the image."""
    kept_folders = []
    for folder in python_path.split(":"):
        has_packages = not _PACKAGES.isdisjoint(PurePath(folder).parts)
        if folder in image_folders or not has_packages:
            kept_folders.append(folder)
    return ":".join(kept_folders)
