"""The build context: a normalised tar of exactly the files that a recipe needs.

In the tar, names are sorted, the owner is 0:0, the time is fixed, and the mode is 0644 or 0755, depending on
the executable bit. So the umask, the user and the time of the checkout neither change the sha256 nor
invalidate a layer. Each file is read from disk twice, first for the sha256 and then to send it. Its content
is never kept in memory.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import importlib.resources
import io
import os
import posixpath
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from imgkit_builder.base import files, process
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.image import install, members, render, skeleton, uv_export, wheel
from imgkit_builder.image.members import Code, PackedCode, TarMember
from imgkit_builder.image.skeleton import CODE_FOLDER
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe import requirements, sources, targets
from imgkit_builder.recipe.model import (
    UV_STEP,
    LockedDeb,
    LockedPlatform,
    LockedWheel,
    PipStep,
    Recipe,
)
from imgkit_builder.recipe.rules import split_inherited
from imgkit_entrypoints import __version__, system
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError
from imgkit_recipes import FOLDER

_DOCKERFILE, _MANIFEST = "Dockerfile", "imgkit/manifest.json"
"""The members of the tar that depend on the base."""
LARGE_BYTES = 10**9
"""Code that is larger is packed only if the user agrees with ``--large``, because often it is data that was
not meant to be packed."""
_LARGEST_SHOWN = 3
_WORTH_SHOWING = 1 / 100
"""The message about large code names only folders and files with at least this share of all bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The input of a build. Equal recipes, bases and sources give equal bytes."""

    dockerfile: str
    manifest: Manifest
    members: tuple[TarMember, ...]
    sha256: str
    """The digest of the whole tar."""
    size_bytes: int
    files_sha256: str = ""
    """The digest of the tar without the two members that depend on the base: Dockerfile and manifest."""
    code: PackedCode = field(default_factory=PackedCode)
    """The user's code among `members`."""
    is_locked: bool = False
    """Whether a lock determines what the build installs."""

    def open(self, report: Reporter = SILENT) -> BinaryIO:
        """Open the tar as a stream. The caller reads it to its end, and then closes it.

        Raises
        ------
        UsageError : (while reading) a file has changed since `pack_context` read it.
        """
        return io.BufferedReader(_ChunkReader(self._verified_chunks(report)), files.CHUNK_BYTES)

    def unpack(self, folder: Path) -> Mapping[str, str]:
        """Write the files to `folder`. Links are not created. Instead, return their targets by name.

        Raises
        ------
        UsageError : a file has changed since `pack_context` read it.
        """
        with self.open() as stream:
            return members.unpack_members(stream, folder)

    def _verified_chunks(self, report: Reporter) -> Generator[bytes]:
        """Yield the chunks of the tar, and check that the digest is the one that `pack_context` computed.

        If a file has changed in the meantime, raise UsageError before the last chunk.
        """
        digest = hashlib.sha256()
        progress = _TarProgress(report, self.size_bytes)
        for chunk in members.tar_chunks(self.members):
            progress.add(chunk)
            digest.update(chunk)
            # Check before the last chunk is sent, because an engine does not build from an unfinished tar.
            # `members.END`, a single object, is the last chunk of every tar.
            if chunk is members.END and digest.hexdigest() != self.sha256:
                raise UsageError(
                    "files of image.copy changed while they were read",
                    hint="build again when no program writes to them, or list them under `ignore`",
                )
            yield chunk


class LargeContext(UsageError):
    """The code is larger than `LARGE_BYTES`, and the user has not allowed that with ``--large``."""


def pack_context(
    recipe: Recipe,
    *,
    base: BaseImage,
    platform: str,
    revision: str,
    large: bool = True,
    report: Reporter = SILENT,
) -> BuildContext:
    """Collect the input of a build. Every file that goes into the image is read once, for the digest.

    Parameters
    ----------
    base : the base image, as the engine describes it.
    platform : the platform of the image, such as ``linux/amd64``.
    revision : the git commit for the labels of the image. Empty if there is none.
    large : whether the code may be larger than `LARGE_BYTES`.

    Raises
    ------
    UsageError : a source is missing or cannot be read, or contains something other than files, folders and
        links within the source. Also raised if uv refuses the project's uv.lock.
    LargeContext : the code is too large. Raised before any file is read.
    """
    wheel_data = wheel.make_wheel()
    env = recipe.image.env.items()
    manifest = Manifest(
        imgkit=__version__,
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        base=_describe_base(recipe, base),
        platform=platform,
        wheel_sha256=hashlib.sha256(wheel_data).hexdigest(),
        revision=revision,
        projects=targets.list_projects(recipe.image.pip),
        workdir=targets.stated_workdir(recipe),
        # A value that extends the base's value is left out, since the final value is not known here.
        env={name: value for name, value in env if split_inherited(name, value) is None},
    )
    dockerfile = render.render_dockerfile(recipe, base=base.name, platform=platform, base_user=base.user)
    # imgkit's own files. All other files in the context are the user's code.
    own_files = [
        members.memory_file(f"imgkit/{wheel.wheel_name()}", wheel_data),
        members.memory_file("imgkit/system.json", system.to_json(recipe.system).encode()),
        members.memory_file(_MANIFEST, manifests.to_json(manifest).encode()),
        *list_package_files(recipe),
    ]
    code = _collect_recipe_code(recipe)
    if not large:
        # Check this now: the sizes are known, and no file has been read yet.
        _refuse_large(code)
    is_locked = recipe.lock is not None
    return seal_context(own_files, dockerfile, manifest, code=code, is_locked=is_locked, report=report)


def seal_context(
    own_files: list[TarMember],
    dockerfile: str,
    manifest: Manifest,
    *,
    code: PackedCode,
    is_locked: bool = False,
    report: Reporter = SILENT,
) -> BuildContext:
    """Return the build context with imgkit's `own_files` and the user's `code`.

    Every file is read once, for the digest of the whole tar.
    """
    contents = _sort_contents([members.memory_file(_DOCKERFILE, dockerfile.encode()), *own_files], code)
    # Compute both digests in a single pass, because the code may have gigabytes.
    digest = hashlib.sha256()
    files_digest = hashlib.sha256()
    size_bytes = members.tar_size(contents)
    progress = _TarProgress(report, size_bytes)
    for member in contents:
        depends_on_base = member.name in (_DOCKERFILE, _MANIFEST)
        for chunk in members.member_chunks(member):
            digest.update(chunk)
            if not depends_on_base:
                files_digest.update(chunk)
            progress.add(chunk)
    digest.update(members.END)
    progress.add(members.END)
    return BuildContext(
        dockerfile=dockerfile,
        manifest=manifest,
        members=tuple(contents),
        sha256=digest.hexdigest(),
        size_bytes=size_bytes,
        files_sha256=files_digest.hexdigest(),
        code=code,
        is_locked=is_locked,
    )


def _sort_contents(own_files: list[TarMember], code: PackedCode) -> list[TarMember]:
    """Return the members of the tar in their order, with the folders above `own_files` and `code`."""
    # The folders "copy" and "project" contain the folder of each step.
    folders = {"imgkit", *(posixpath.dirname(source.context_folder) for source in code.members)}
    contents = [*own_files, *map(members.empty_folder, folders)]
    for code_members in code.members.values():
        contents += code_members
    # Sort by bytes. The order of texts would depend on how a name outside UTF-8 was decoded.
    return sorted(contents, key=lambda member: os.fsencode(member.name))


def input_sha256(recipe: Recipe, context: BuildContext, base: str) -> str:
    """Return a digest of the input of a build. It can be computed without an engine.

    The digest covers everything that `pack_context` has read, and the name of the base. It does not cover the
    digest of the base, which only an engine knows. So if two builds have the same digest, they give the same
    result, unless the name of the base now refers to another image.
    """
    platform = context.manifest.platform
    # The Dockerfile and the manifest are rendered again, with only the name of the base. `files_sha256` does
    # not cover the ones in `context`, which contain what an engine knows about the base.
    base_by_name = BaseImage(name=base, platform=platform)
    manifest_without_digest = dataclasses.replace(context.manifest, base=_describe_base(recipe, base_by_name))
    dockerfile = render.render_dockerfile(recipe, base=base, platform=platform)
    texts = (context.files_sha256, dockerfile, manifests.to_json(manifest_without_digest))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _describe_base(recipe: Recipe, base: BaseImage) -> BaseImage:
    """Return the description of the base for the manifest of the image.

    If the recipe has a lock, the digest of the base is taken from the lock, and is empty if the lock has
    none. The engine's own value is not used, because some engines invent a digest for an image that was never
    in a registry.
    """
    if recipe.lock is None:
        return base
    locked_base = recipe.lock.base
    name_with_digest = ""
    if locked_base.digest:
        name_with_digest = locked_base.exact  # "nvcr.io/nvidia/pytorch@sha256:..."
    return dataclasses.replace(base, digest=name_with_digest, id=locked_base.id or base.id)


def refuse_unpackable_code(recipe: Recipe) -> None:
    """Refuse a recipe of which `pack_context` cannot pack the projects, copies or uv.lock, without a build.

    Raises
    ------
    ToolMissing, UsageError : the error that `pack_context` would raise.
    """
    # Both functions are called only for the errors that they raise. Their results are not needed here.
    members.collect_code(_list_code(recipe), _list_secret_files(recipe))
    # A recipe with a lock does not use uv.lock, because the lock already has the wheels.
    if recipe.image.uv and not recipe.lock:
        uv_export.export_uv_lock(recipe)


class _TarProgress:
    """Reports how much of a tar has been read.

    It reports only once per MiB, because a tar of small files consists of very many chunks.
    """

    def __init__(self, report: Reporter, total_bytes: int) -> None:
        self._report = report
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._reported_bytes = 0

    def add(self, chunk: bytes) -> None:
        """Count a chunk of the tar."""
        self._read_bytes += len(chunk)
        unreported_bytes = self._read_bytes - self._reported_bytes
        if unreported_bytes >= files.CHUNK_BYTES or self._read_bytes == self._total_bytes:
            self._reported_bytes = self._read_bytes
            self._report.advance(self._read_bytes, self._total_bytes)


def _list_secret_files(recipe: Recipe) -> list[Path]:
    """Return the files with build secrets. They stay out of the context, wherever they are."""
    return [secret.file.resolve() for secret in recipe.image.secrets if secret.file is not None]


def _collect_recipe_code(recipe: Recipe) -> PackedCode:
    """Return the user's projects and copied folders as members of the context.

    For an editable project, only a skeleton is packed: the files that pip needs to install it. Each run
    mounts the code over it.

    Raises
    ------
    UsageError : a source is missing or cannot be read, or contains something other than files, folders and
        links within the source.
    """
    codes = tuple(_list_code(recipe))
    hidden = _list_secret_files(recipe)
    packed = members.collect_code((code for code in codes if not code.is_skeleton), hidden)
    # Only the members are used here. The names that stay out are not reported, because a run brings these
    # files.
    projects = members.collect_code((code for code in codes if code.is_skeleton), hidden)
    code_members = dict(packed.members)
    for code, project_members in projects.members.items():
        code_members[code] = skeleton.select_skeleton(code, project_members)
    return dataclasses.replace(packed, members=code_members)


def _list_code(recipe: Recipe) -> Iterator[Code]:
    """Yield the user's code that goes into the image: projects of pip steps, and copied folders.

    `Code.is_skeleton` is set for a project of which only the files that pip needs are packed.
    """
    # The index in the folder's name keeps the files of two steps apart.
    for index, step in enumerate(recipe.image.pip):
        if step.project is None:
            continue
        # Each run mounts the code over the project, and the installation needs nothing but the skeleton.
        is_skeleton_enough = _is_mounted_by_runs(step) and not skeleton.unfit_reason(step.project)
        yield Code(
            source=step.project,
            context_folder=install.project_folder(index),
            where=recipe.where("image", "pip", index, "project"),
            ignore=step.ignore,
            is_skeleton=is_skeleton_enough,
        )
    for index, copy in enumerate(recipe.image.copy):
        yield Code(
            source=copy.source,
            context_folder=render.copy_folder(index),
            where=recipe.where("image", "copy", index),
            ignore=copy.ignore,
        )


def _is_mounted_by_runs(step: PipStep) -> bool:
    """Return whether each run mounts its code over the project that `step` installs.

    This is the case for an editable project in ``/workspace`` or below it.
    """
    return step.editable is not None and PurePosixPath(step.editable).is_relative_to(CODE_FOLDER)


def whole_project_notes(recipe: Recipe) -> Iterator[str]:
    """Yield a message for each project that is packed as a whole although each run mounts its code.

    Usually a skeleton is enough for such a project: the files that pip needs to install it, without the code.
    Here the installation also needs the code, for example to compile it.
    """
    for index, step in enumerate(recipe.image.pip):
        if step.project is None or not _is_mounted_by_runs(step):
            continue
        reason = skeleton.unfit_reason(step.project)  # empty if a skeleton is enough
        if reason:
            where = recipe.where("image", "pip", index, "project")
            yield (
                f"{where}: all files of the project are in the image, so an edit builds again: {reason}; "
                "modules that it compiles are hidden by the code of a run"
            )


def pack_early_code(recipe: Recipe) -> PackedCode:
    """Return the code that is copied into the image before the pip steps.

    The build that makes a lock needs only this code, because run steps before pip may use it.
    """
    early_folders = set()
    for index, copy in enumerate(recipe.image.copy):
        if copy.after != "pip":
            early_folders.add(render.copy_folder(index))
    codes = [code for code in _list_code(recipe) if code.context_folder in early_folders]
    return members.collect_code(codes, _list_secret_files(recipe))


class _TopEntry(NamedTuple):
    """A folder or file at the top level of the code, and the line of the recipe that packs it."""

    name: str
    where: str


def _refuse_large(packed: PackedCode) -> None:
    """Raise LargeContext if all code together is larger than `LARGE_BYTES`.

    The error names the largest folders and files, because they are often data that was not meant to be
    packed.
    """
    if packed.size_bytes <= LARGE_BYTES:
        return
    sizes = _measure_top_entries(packed)
    total_bytes = sizes.total()
    largest = sizes.most_common(_LARGEST_SHOWN)
    descriptions = []
    for entry, size_bytes in largest:
        if size_bytes > total_bytes * _WORTH_SHOWING:
            descriptions.append(f"{entry.name} {size_text(size_bytes)}")
    largest_entry, _ = largest[0]
    raise LargeContext(
        f"the code for the image is {size_text(total_bytes)}: {', '.join(descriptions)}",
        where=largest_entry.where,
        hint="list what the image does not need under `ignore` or in .dockerignore; bind data when a job "
        "starts; to pack all of it: --large",
    )


def _measure_top_entries(packed: PackedCode) -> collections.Counter[_TopEntry]:
    """Return the size in bytes of each folder or file at the top level of the code, such as ``data``."""
    sizes: collections.Counter[_TopEntry] = collections.Counter()
    for code, code_members in packed.members.items():
        for member in code_members:
            name, _, _ = member.name.removeprefix(f"{code.context_folder}/").partition("/")
            sizes[_TopEntry(name=name, where=code.where)] += member.size_bytes
    return sizes


def code_revision(recipe: Recipe) -> str:
    """Return the git commit of the recipe's folder, or "" if the image contains no files from that folder.

    An image without such files is the same for every commit, so its labels must not name one. The skeleton of
    a project does not count, because each run mounts code with its own revision.
    """
    folder = recipe.file.parent.absolute()
    for code in _list_code(recipe):
        if not code.is_skeleton and code.source.absolute().is_relative_to(folder):
            return git_revision(folder)
    return ""


def git_revision(folder: Path) -> str:
    """Return the git commit of `folder`. If files have changed since that commit, ``-dirty`` is appended.

    The result is empty if the folder is not under git, or if git is not installed.
    """
    git = (*process.GIT, "-C", folder)
    try:
        rev_parse = process.run([*git, "rev-parse", "--verify", "HEAD"], check=False)
        tracked = process.run([*git, "ls-files", "--", "."], check=False)
        changed = process.run([*git, "status", "--porcelain", "--", *sources.GIT_PATHS], check=False)
    except ToolMissing:
        return ""
    # Warnings of git may surround the commit in the output.
    commit = re.search(r"^[0-9a-f]{40,64}$", rev_parse.output, re.MULTILINE)
    # A folder inside a repository may have no tracked files, for example a virtual environment. The commit
    # then says nothing about it.
    if rev_parse.returncode or commit is None or not tracked.output:
        return ""
    if changed.output:
        return f"{commit[0]}-dirty"
    return commit[0]


def list_package_files(recipe: Recipe) -> Iterator[TarMember]:
    """Yield the files for the steps that install packages: certificates, requirements and locked packages."""
    for index, file in enumerate(recipe.image.ca):
        with members.explain_read_errors(file, recipe.where("image", "ca", index), "name another file"):
            certificate = files.read_bytes(file)
        # The certificates are later joined to one file, so each must end with a line break.
        yield members.memory_file(render.certificate_file(index), certificate.rstrip() + b"\n")
    if recipe.image.used_secrets:
        yield _read_template(install.WITH_SECRETS, "with-secrets.sh")
    if recipe.lock:
        yield from _list_locked_files(recipe, recipe.lock)
    else:
        yield from _list_requirements_files(recipe)


def _read_template(member: str, name: str) -> TarMember:
    """Return the member `member` of the context, with the content of imgkit's template `name`."""
    return members.memory_file(member, (FOLDER / "templates" / name).read_bytes())


def _list_locked_files(recipe: Recipe, lock: LockedPlatform) -> Iterator[TarMember]:
    """Yield the files that only a build with a lock needs.

    These are the lists of packages to install, and packages that are stored on this machine.
    """
    yield members.memory_file(install.LOCK_TOML.context_path, recipe.lock_text.encode())
    if lock.apt:
        yield from _list_locked_apt_files(recipe, lock.apt)
    for step_number in install.pip_step_numbers(recipe):
        yield from _list_locked_pip_files(recipe, step_number)


def _list_locked_apt_files(recipe: Recipe, debs: Iterable[LockedDeb]) -> Iterator[TarMember]:
    """Yield the files for the apt step of a build with a lock, which installs `debs`.

    These are the script of the step, the list of packages, and packages that are stored on this machine.
    """
    folder = install.LOCKED_APT.context_path
    yield members.empty_folder(folder)
    yield _read_template(f"{folder}/{install.SCRIPT}", install.SCRIPT)
    yield members.memory_file(f"{folder}/{install.PACKAGES}", install.render_apt_list(recipe).encode())
    yield from _list_stored_files(recipe, folder, debs)


def _list_locked_pip_files(recipe: Recipe, step_number: int) -> Iterator[TarMember]:
    """Yield the files for a pip step of a build with a lock.

    These are the requirements file, and wheels that are stored on this machine. `step_number` is the index of
    the step in the recipe, or `UV_STEP` for the uv project.
    """
    # A step without a wheel in the lock is left out of the build, so it needs no files.
    wheels = install.locked_wheels(recipe, step_number)
    if not wheels:
        return
    file = install.requirements_file(step_number)
    yield members.memory_file(file.context_path, install.render_requirements(recipe, step_number).encode())
    if step_number == UV_STEP:
        # A page with links to the wheels, from which pip downloads them.
        yield members.memory_file(install.UV_LINKS.context_path, install.render_uv_links(recipe).encode())
    folder = install.stored_wheels_folder(recipe, step_number)
    if folder is not None:
        yield members.empty_folder(folder.context_path)
        yield from _list_stored_files(recipe, folder.context_path, wheels)


def _list_stored_files(
    recipe: Recipe, folder: str, packages: Iterable[LockedDeb | LockedWheel]
) -> Iterator[TarMember]:
    """Yield a member in `folder` for each of `packages` that ``imgkit lock --keep-files`` has stored here.

    The build downloads the other packages itself.

    Raises
    ------
    CheckFailed : a stored file has another digest than the lock.
    """
    for package in packages:
        stored_path = recipe.kept.get(package.file)  # by the file name
        if stored_path is None:
            continue
        hint = "remove it, or make it again: imgkit lock --keep-files"
        with members.explain_read_errors(stored_path, hint=hint), files.open_regular(stored_path) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            sha256 = files.sha256(stream, 0, size_bytes)
        # Without this check, the build would fail only after a long time, when it installs the package.
        if sha256 != package.sha256:
            raise CheckFailed(
                f"its sha256 is {sha256}, and the lock has {package.sha256}",
                where=str(stored_path),
                hint="remove it, and the build downloads it; or make it again: imgkit lock --keep-files",
            )
        yield TarMember(name=f"{folder}/{package.file}", size_bytes=size_bytes, source=stored_path)


def _list_requirements_files(recipe: Recipe) -> Iterator[TarMember]:
    """Yield the requirements of the pip steps and of the uv project, for a build without a lock."""
    if recipe.image.uv:
        program = importlib.resources.files(__package__).joinpath("inside_uv.py").read_bytes()
        yield members.memory_file(install.UV_JSON.context_path, uv_export.export_uv_lock(recipe))
        yield members.memory_file(install.UV_PROGRAM.context_path, program)
    for index, step in enumerate(recipe.image.pip):
        member_name = install.requirements_file(index).context_path
        # A step has either a project or a requirements file, or only names packages.
        if step.project is not None:
            where = recipe.where("image", "pip", index, "project")
            yield members.memory_file(member_name, _render_dependencies(step, step.project, where))
        elif step.requirements is not None:
            where = recipe.where("image", "pip", index, "requirements")
            yield members.memory_file(member_name, _read_requirements(step.requirements, where))


def _render_dependencies(step: PipStep, project: Path, where: str) -> bytes:
    """Return a requirements file with the dependencies of `project`, which `step` installs.

    They are installed in a step before the project, so that an edit of the project does not install them
    again. If the recipe excludes dependencies, the file is empty. `where` is the line of the recipe.
    """
    if not step.installs_dependencies:
        return b""
    with members.explain_read_errors(project, where):
        dependencies = requirements.read_dependencies(project)
    return "".join(f"{line}\n" for line in dependencies).encode()


def _read_requirements(file: Path, where: str) -> bytes:
    """Return the content of a requirements file.

    Raises
    ------
    UsageError : the file cannot be read, or a line refers to another file, which would be missing in the
        image.
    """
    with members.explain_read_errors(file, where, "name another file"):
        content = files.read_bytes(file)
    for line_number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        # The check of the recipe has already refused such lines, but the file may have changed since then.
        if requirements.names_other_file(line):
            raise UsageError(
                f"a requirements file names another file: {line.strip()}",
                where=f"{file}:{line_number}",
                hint="copy its lines here; install your own code with pip: [{project: FOLDER}]",
            )
    return content


class _ChunkReader(io.RawIOBase):
    """Makes an iterator of chunks readable like a file."""

    def __init__(self, chunks: Generator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")  # the unread part of the current chunk

    def readable(self) -> bool:
        return True

    # `io.BufferedReader` calls this method to fill its buffer.
    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0  # the end of the stream
            self._rest = memoryview(chunk)
        # Copy at most what is left of one chunk. The caller asks again if it needs more.
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        # The generator may have a file open. Closing the generator closes that file.
        self._chunks.close()
        super().close()
