"""Download models and data sets of the Hugging Face hub for jobs without internet.

huggingface_hub downloads files into the user's own cache. For jobs, this module makes a folder with hard
links to the files in the cache. The folder has the layout of the cache, with these differences:

* ``refs/main`` names the revision that the project uses. Without this file, the plain name of a model is not
  found offline, and a download of a given revision does not write it (huggingface_hub 2.4).
* A data set also has its files at their own paths. ``load_dataset("me/name")`` does not read the cache
  offline (datasets 5.2), but ``load_dataset(FOLDER)`` reads such a folder.
* The folder has one revision only. Its files are links to ``blobs/DIGEST``, so that the next revision can
  share the blobs that have not changed.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.data import folder
from imgkit_builder.data.folder import DataFolder
from imgkit_builder.data.spec import COMMIT, HUB_CACHE, DataSpec, HubRepo
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed, ToolMissing, UsageError

LOCK = "hf.lock"
"""The name of the file beside imgkit.toml that records the commit of each hub item."""
_LOCK_HEAD = (
    "# Made by imgkit run: the commits of hf:// in imgkit.toml. Remove a line to take the newest one.\n"
)
# The largest size of hf.lock that is read. A line has about 100 bytes, so this is enough for some 600 items.
_MAX_LOCK_BYTES = 1 << 16


def find(spec: DataSpec, project: Path) -> DataFolder:
    """Return the local folder of the Hugging Face hub repository that `spec` names.

    If the repository has not been downloaded yet, the result has 0 files. Its name is then provisional and
    has the form ``models--openai-community--gpt2@main``. `project` is the folder with ``hf.lock``, the file
    that records which commit of each repository the runs use.

    Raises
    ------
    UsageError : ``hf.lock`` or the folder cannot be read.
    """
    repo = spec.hub
    assert repo is not None  # noqa: S101 - the caller has checked it
    # The commit in hf.lock takes precedence over the branch or tag in imgkit.toml, which may have moved
    # since.
    revision = read_lock(project / LOCK).get(spec.source, repo.revision)
    revision_folder = _job_folder(repo, revision or "main")
    # Folders are named after commits. For a branch or tag, only the hub knows the commit, so it must be asked
    # (`download`) even if there is a folder.
    if COMMIT.fullmatch(revision) and revision_folder.is_dir():
        return folder.list_folder(spec, revision_folder)
    return DataFolder(
        spec=spec,
        path=revision_folder,
        name=f"{repo.cache_name}@{revision_folder.name}",
        files=0,
        size_bytes=0,
    )


def download(spec: DataSpec, project: Path, report: Reporter) -> DataFolder:
    """Download a Hugging Face hub repository, make its folder for jobs, and record its commit.

    The commit is written to ``hf.lock``, so that later runs use the same files. If two downloads run at the
    same time, each waits for files that the other one is downloading. Without internet, this function
    succeeds if the user's cache already has all files of the revision.

    Raises
    ------
    ToolMissing : huggingface_hub is not installed.
    UsageError : the hub has no such repository or revision, or this user may not read it.
    CheckFailed : the disk is full, or the cache cannot be written.
    ToolFailed : the hub cannot be reached, or the download failed.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise ToolMissing(
            f"huggingface_hub is not installed, which downloads {spec.source}",
            where="data",
            hint='pip install "imgkit-hpc[hf]"',
        ) from error
    repo = spec.hub
    assert repo is not None  # noqa: S101 - the caller has checked it
    commit_of_item = read_lock(project / LOCK)
    report.stage(f"download {spec.source}")
    try:
        snapshot = huggingface_hub.snapshot_download(
            repo.name,
            repo_type="dataset" if repo.is_data_set else "model",
            revision=commit_of_item.get(spec.source, repo.revision) or None,
            cache_dir=_find_hub_cache(),
            tqdm_class=_progress_bar(report),
        )
        path = _job_folder(repo, Path(snapshot).name)  # the cache names a snapshot after its commit
        # If the folder exists, an earlier download has made it. A folder never appears incomplete.
        if not path.is_dir():
            _publish_snapshot(repo, Path(snapshot), path)
        # The lock is written last, so it never names a commit whose folder is missing.
        commit_of_item[spec.source] = path.name
        _write_lock(project / LOCK, commit_of_item)
    except Exception as error:  # huggingface_hub raises errors of its HTTP library, which differs by version
        raise _download_error(error, spec) from error
    return folder.list_folder(spec, path)


def _find_hub_cache() -> Path:
    """Return the folder of the user's hub cache, by default ``~/.cache/huggingface/hub``.

    huggingface_hub itself cannot be asked, because it may not be installed. The variables and their order are
    the same as in huggingface_hub.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hf_home = os.environ.get("HF_HOME") or f"{user_cache}/huggingface"
    hub_cache = os.environ.get("HF_HUB_CACHE") or f"{hf_home}/hub"
    return Path(hub_cache).expanduser().absolute()


def _job_folder(repo: HubRepo, revision: str) -> Path:
    """Return the folder for jobs of one revision: ``.../imgkit/models--openai-community--gpt2/COMMIT``.

    It is beside the hub's cache, because hard links need the same file system.
    """
    return _find_hub_cache().parent / "imgkit" / repo.cache_name / revision


def read_lock(file: Path) -> dict[str, str]:
    """Return the commit of each item in ``hf.lock``: ``{"hf://openai-community/gpt2": "607a30d7..."}``.

    The commit identifies the version of a model or data set that all runs use. If the file does not exist,
    the result is empty.

    Raises
    ------
    UsageError : the file cannot be read, or has a line that is not ``ITEM COMMIT``.
    """
    try:
        lines = files.read_text(file, most_bytes=_MAX_LOCK_BYTES).splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(file), hint="remove it") from error
    commit_of_item = {}
    for line_number, line in enumerate(lines, 1):
        item, _, commit = line.partition(" ")
        if COMMIT.fullmatch(commit):
            commit_of_item[item] = commit
        # Empty lines and comments are skipped.
        elif line and not line.startswith("#"):
            raise UsageError("this is no commit", where=f"{file}:{line_number}", hint="remove the line")
    return commit_of_item


def _write_lock(file: Path, commit_of_item: Mapping[str, str]) -> None:
    """Write ``hf.lock`` with one line for each item, in the form that `read_lock` reads."""
    lock_text = _LOCK_HEAD
    for item, commit in sorted(commit_of_item.items()):
        lock_text += f"{item} {commit}\n"
    files.write_file(file, lock_text)


def _progress_bar(report: Reporter) -> type:
    """Return a progress bar class for huggingface_hub that passes the bytes on to `report`.

    The bar itself prints nothing.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            # tqdm writes to this buffer, because the terminal belongs to `report`.
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def display(self, *args: Any, **options: Any) -> None:
            # huggingface_hub also has bars that count files. Bars with the unit "B" count bytes.
            if self.unit == "B":
                report.advance(int(self.n), self.total or None)

    return Bar


def _publish_snapshot(repo: HubRepo, snapshot: Path, job_folder: Path) -> None:
    """Make `job_folder`, the folder for jobs, with the files of `snapshot`, a revision in the user's cache.

    The folder is filled under a temporary name, so that no other process sees an incomplete folder.
    """
    job_folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job_folder.parent, prefix=files.TEMPORARY) as temporary:
        complete = Path(temporary, job_folder.name)
        _link_files(repo, snapshot, complete)
        # The rename fails if another run has made the folder in the meantime. That folder has the same files.
        with contextlib.suppress(OSError):
            files.publish_file(complete, job_folder)


def _link_files(repo: HubRepo, snapshot: Path, job_folder: Path) -> None:
    """Fill `job_folder` with hard links to the files of `snapshot`, a revision in the user's hub cache.

    The folder of a model gets the layout of the hub cache::

        refs/main                       the text COMMIT
        blobs/DIGEST                    a hard link to the content of a file in the hub cache
        snapshots/COMMIT/config.json    a symbolic link to ../../blobs/DIGEST

    For a data set, these folders are in the subfolder `HUB_CACHE`. Beside it, the same symbolic links are at
    the files' own paths.
    """
    cache_root = job_folder / HUB_CACHE if repo.is_data_set else job_folder
    (cache_root / "blobs").mkdir(parents=True)
    # Offline, huggingface_hub looks up the commit of a plain name, such as "gpt2", in the file of "main".
    (cache_root / "refs").mkdir()
    files.write_file(cache_root / "refs" / "main", snapshot.name)
    for source in sorted(snapshot.rglob("*")):
        if source.is_dir():
            continue
        # In the hub cache, `source` is a link to the content, whose file name is its digest.
        content = source.resolve()
        blob = cache_root / "blobs" / content.name
        if not blob.exists():  # two files with the same content share a blob
            blob.hardlink_to(content)
        name_in_snapshot = source.relative_to(snapshot)
        _link_to_blob(cache_root / "snapshots" / snapshot.name / name_in_snapshot, blob)
        if repo.is_data_set:
            _link_to_blob(job_folder / name_in_snapshot, blob)


def _link_to_blob(link: Path, blob: Path) -> None:
    """Create `link`, a relative symbolic link to `blob`."""
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(blob, link.parent))
    # `list_folder` includes the times of links in the folder's name. With a fixed time, a folder that is made
    # again gets the same name.
    os.utime(link, (0, 0), follow_symlinks=False)


def _download_error(error: Exception, spec: DataSpec) -> ImgkitError:
    """Return the error to show for a download that failed with `error`, which any library may have raised.

    There are three kinds: the hub refused the request, this machine has a problem such as a full disk, or the
    hub could not be reached.
    """
    from huggingface_hub import constants

    refusal = _explain_refusal(error, spec)  # None if the hub did not refuse the request
    if refusal is not None:
        return refusal
    # huggingface_hub wraps errors of its HTTP library. The cause names the real problem.
    reason = str(error.__cause__ or error).partition("\n")[0]
    # Network errors can be an OSError, too, but only errors of the operating system have an errno.
    is_local_problem = isinstance(error, OSError) and bool(error.errno)
    if is_local_problem or "No space left" in reason:
        message = f"{spec.source} cannot be written: {reason}"
        hint = "another folder: export HF_HOME=/FOLDER"
        return CheckFailed(message, where=str(_find_hub_cache()), hint=hint)
    return ToolFailed(
        f"{spec.source} is not in the cache, and {constants.ENDPOINT} does not send it: {reason}",
        where=str(_find_hub_cache()),
        hint="export https_proxy=http://PROXY:PORT; or a mirror: export HF_ENDPOINT=https://MIRROR",
    )


def _explain_refusal(error: Exception, spec: DataSpec) -> UsageError | None:
    """Return the error to show if the hub refused to send what `spec` names, otherwise None.

    The hub refuses a repository or revision that does not exist, or that this user may not read.
    """
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{spec.source.removeprefix('hf://').partition('@')[0]}"
    refusals = {
        errors.GatedRepoError: (
            "is gated, and the hub does not know that you may read it",
            f"accept its terms at {page}, then: hf auth login",
        ),
        errors.RepositoryNotFoundError: (
            "does not exist, or is private",
            "correct the name; for a private one: hf auth login",
        ),
        errors.RevisionNotFoundError: (
            "has no such revision",
            f"{page}/commits/main lists them; if {LOCK} has a line for it, remove that",
        ),
    }
    # The order matters, because GatedRepoError is a subclass of RepositoryNotFoundError.
    for kind, (message, hint) in refusals.items():
        if isinstance(error, kind):
            return UsageError(f"{spec.source} {message}", where="data", hint=hint)
    return None
