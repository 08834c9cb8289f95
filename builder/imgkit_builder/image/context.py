"""The build context: one normalised tar of exactly the files that the recipe needs.

Names are sorted, the owner is 0:0, the time is fixed, and modes are 0644 or 0755 by the executable bit. So
umask, user and time of checkout neither change the sha256 nor invalidate a layer. Files are read from disk
twice, once for the sha256 and once while they are sent, and never kept in memory.
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
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.base import files, process
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.base.sizes import size_text
from imgkit_builder.image import install, members, render, skeleton, uv_export, wheel
from imgkit_builder.image.members import Code, Packed, TarMember
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe import requirements, sources, targets
from imgkit_builder.recipe.model import (
    UV_STEP,
    LockedBase,
    LockedDeb,
    LockedPlatform,
    LockedWheel,
    PipStep,
    Recipe,
)
from imgkit_builder.recipe.rules import inherited
from imgkit_entrypoints import __version__, system
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError
from imgkit_recipes import FOLDER

_DOCKERFILE, _MANIFEST = "Dockerfile", "imgkit/manifest.json"
"""Members of the tar that depend on the base."""
LARGE_BYTES = 10**9
"""Code that is larger is packed only where the user agrees: often it is data that was not meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The input of a build; the same recipe, base and sources give the same bytes."""

    dockerfile: str
    manifest: Manifest
    members: tuple[TarMember, ...]
    sha256: str
    """Digest of the whole tar."""
    size_bytes: int
    files_sha256: str = ""
    """Digest of the tar without the two members that depend on the base: Dockerfile and manifest."""
    code: Packed = field(default_factory=Packed)
    """The user's code among `members`."""
    is_locked: bool = False
    """Whether a lock decides what the build installs."""

    def open(self, report: Reporter | None = None) -> BinaryIO:
        """Open the tar as a stream; read it to its end, then close it.

        Raises
        ------
        UsageError : while reading, if a file differs from what `pack` saw.
        """
        return io.BufferedReader(_Stream(self._checked(report or Silent())), files.CHUNK_BYTES)

    def unpack(self, folder: Path) -> Mapping[str, str]:
        """Write the files below `folder`, and return the links, which are left out, by their names.

        Raises
        ------
        UsageError : a file differs from what `pack` saw.
        """
        with self.open() as stream:
            return members.unpack(stream, folder)

    def _checked(self, report: Reporter) -> Generator[bytes]:
        digest = hashlib.sha256()
        for chunk in _reported(members.tar(self.members), report, self.size_bytes):
            digest.update(chunk)
            # After a mismatch the last chunk is not sent: the engine builds nothing from an unfinished tar.
            if chunk is members.END and digest.hexdigest() != self.sha256:
                raise UsageError(
                    "files of image.copy changed while they were read",
                    hint="build again when no program writes to them, or list them under `ignore`",
                )
            yield chunk


class LargeContext(UsageError):
    """The code is larger than `LARGE_BYTES`, and nobody agreed to that."""


def pack(
    recipe: Recipe,
    *,
    base: BaseImage,
    platform: str,
    revision: str,
    large: bool = True,
    report: Reporter | None = None,
) -> BuildContext:
    """Collect the input of a build; reads every copied file once.

    Raises
    ------
    UsageError : a source is missing, unreadable, or more than files, folders and links inside itself; or uv
        refuses the project's uv.lock.
    LargeContext : the code is large, and `large` does not allow it; raised before a file is read.
    """
    lock = recipe.lock
    wheel_data = wheel.entrypoints_wheel()
    manifest = Manifest(
        imgkit=__version__,
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        base=_locked_base(base, lock.base) if lock else base,
        platform=platform,
        wheel_sha256=hashlib.sha256(wheel_data).hexdigest(),
        revision=revision,
        projects=targets.installed(recipe.image.pip),
        workdir=targets.stated_workdir(recipe),
        env={name: value for name, value in recipe.image.env.items() if inherited(name, value) is None},
    )
    dockerfile = render.dockerfile(recipe, base=base.name, platform=platform, base_user=base.user)
    packed = [
        members.file(f"imgkit/{wheel.file_name()}", wheel_data),
        members.file("imgkit/system.json", system.to_json(recipe.system).encode()),
        members.file(_MANIFEST, manifests.to_json(manifest).encode()),
        *package_files(recipe),
    ]
    code = _packed_code(recipe)
    if not large:
        _refuse_large(code)
    return sealed(packed, dockerfile, manifest, code=code, is_locked=lock is not None, report=report)


def sealed(
    packed: list[TarMember],
    dockerfile: str,
    manifest: Manifest,
    *,
    code: Packed,
    is_locked: bool = False,
    report: Reporter | None = None,
) -> BuildContext:
    """Return the context of `packed` and of `code`, the user's, whose files are read once."""
    contents = [members.file(_DOCKERFILE, dockerfile.encode()), members.folder("imgkit"), *packed]
    contents += [members.folder(name) for name in {posixpath.dirname(folder.member) for folder in code.parts}]
    contents += [member for part in code.parts.values() for member in part]
    # By bytes: the order of text depends on how a name outside UTF-8 was decoded.
    contents.sort(key=lambda member: os.fsencode(member.name))
    digest, files_digest, size_bytes = hashlib.sha256(), hashlib.sha256(), 0
    total_bytes = sum(member.size_bytes for member in contents)

    def chunks() -> Iterator[bytes]:
        for member in contents:
            for chunk in members.part(member):
                if member.name not in (_DOCKERFILE, _MANIFEST):
                    files_digest.update(chunk)
                yield chunk
        yield members.END

    for chunk in _reported(chunks(), report or Silent(), total_bytes):
        digest.update(chunk)
        size_bytes += len(chunk)
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


def input_sha256(recipe: Recipe, context: BuildContext, base: str) -> str:
    """Return the digest of what `pack` has read, and of the base by its name alone.

    Without an engine, nobody knows more of the base. Two builds with the same digest have the same input,
    unless the name leads to another base by now.
    """
    named = BaseImage(name=base, platform=context.manifest.platform)
    if recipe.lock:
        named = _locked_base(named, recipe.lock.base)
    manifest = dataclasses.replace(context.manifest, base=named)
    dockerfile = render.dockerfile(recipe, base=base, platform=manifest.platform)
    texts = (context.files_sha256, dockerfile, manifests.to_json(manifest))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _locked_base(base: BaseImage, lock: LockedBase) -> BaseImage:
    """Return `base` with the digest of the lock: some engines invent one for an image of no registry."""
    return dataclasses.replace(base, digest=lock.exact if lock.digest else "", id=lock.id or base.id)


def check_code(recipe: Recipe) -> None:
    """Look at everything that `pack` would take from projects, copies and uv.lock.

    Raises
    ------
    ToolMissing, UsageError : as `pack` does.
    """
    members.pack(_code(recipe), _secret_files(recipe))
    if recipe.image.uv and not recipe.lock:
        uv_export.export_uv_lock(recipe)


def _reported(chunks: Iterator[bytes], report: Reporter, total_bytes: int) -> Iterator[bytes]:
    """Yield `chunks`, and report their bytes once a mebibyte: a tar of small files has many chunks."""
    sent_bytes = reported_bytes = 0
    for chunk in chunks:
        sent_bytes += len(chunk)
        if sent_bytes - reported_bytes >= files.CHUNK_BYTES or chunk is members.END:
            reported_bytes = sent_bytes
            report.advance(sent_bytes, max(sent_bytes, total_bytes))
        yield chunk


def _secret_files(recipe: Recipe) -> list[Path]:
    """Return the files of build secrets, which stay out of the context wherever they lie."""
    return [secret.file.resolve() for secret in recipe.image.secrets if secret.file is not None]


def _packed_code(recipe: Recipe) -> Packed:
    """Return what goes into the context of the user's code.

    Raises
    ------
    UsageError : as `members.pack` does.
    """
    codes = tuple(_code(recipe))
    hidden = _secret_files(recipe)
    packed = members.pack((code for code in codes if not code.is_skeleton), hidden)
    # What stays out of a skeleton needs no message: the run brings it.
    projects = members.pack((code for code in codes if code.is_skeleton), hidden)
    skeletons = {code: skeleton.select(code, part) for code, part in projects.parts.items()}
    return dataclasses.replace(packed, parts={**packed.parts, **skeletons})


def _code(recipe: Recipe) -> Iterator[Code]:
    """Yield the projects and copies of `recipe`."""
    for number, step in enumerate(recipe.image.pip):
        if step.project is not None:
            yield Code(
                source=step.project,
                member=install.project_member(number),
                where=recipe.where("image", "pip", number, "project"),
                ignore=step.ignore,
                is_skeleton=_is_mounted(step) and not skeleton.unfit_reason(step.project),
            )
    for number, copy in enumerate(recipe.image.copy):
        where = recipe.where("image", "copy", number)
        yield Code(source=copy.source, member=render.copy_member(number), where=where, ignore=copy.ignore)


def _is_mounted(step: PipStep) -> bool:
    """Return whether the run's code is mounted over the project that `step` installs."""
    return step.editable is not None and skeleton.is_mounted(step.editable)


def whole_project_notes(recipe: Recipe) -> Iterator[str]:
    """Yield a message for each project that is packed whole although the run's code is mounted over it."""
    for number, step in enumerate(recipe.image.pip):
        if step.project is None or not _is_mounted(step):
            continue
        reason = skeleton.unfit_reason(step.project)
        if reason:
            where = recipe.where("image", "pip", number, "project")
            yield (
                f"{where}: all files of the project are in the image, so an edit builds again: {reason}; "
                "modules that it compiles are hidden by the code of a run"
            )


def early_code(recipe: Recipe) -> Packed:
    """Return what the steps before pip copy: those of a lock need it too."""
    copies = enumerate(recipe.image.copy)
    early = {render.copy_member(number) for number, copy in copies if copy.after != "pip"}
    return members.pack([code for code in _code(recipe) if code.member in early], _secret_files(recipe))


def _refuse_large(packed: Packed) -> None:
    """Name the largest folders and files of code that is larger than `LARGE_BYTES` as a whole."""
    if packed.size_bytes <= LARGE_BYTES:
        return
    sizes: collections.Counter[tuple[str, str]] = collections.Counter()
    for code, part in packed.parts.items():
        for member in part:
            name = member.name.removeprefix(f"{code.member}/").partition("/")[0]
            sizes[code.where, name] += member.size_bytes
    largest = [item for item in sizes.most_common(3) if item[1] > sizes.total() / 100]
    names = ", ".join(f"{name} {size_text(size_bytes)}" for (_, name), size_bytes in largest)
    raise LargeContext(
        f"the code for the image is {size_text(sizes.total())}: {names}",
        where=largest[0][0][0],
        hint="list what the image does not need under `ignore` or in .dockerignore; bind data when a job "
        "starts; to pack all of it: --large",
    )


def code_revision(recipe: Recipe) -> str:
    """Return the revision of the recipe's folder if the image holds files of it, and "" otherwise.

    An image without them does not change with an edit of that folder, and must not name its commit. The
    skeleton of a project does not count: the code of each run has a revision of its own.
    """
    folder = recipe.file.parent.absolute()
    for code in _code(recipe):
        if not code.is_skeleton and code.source.absolute().is_relative_to(folder):
            return revision(folder)
    return ""


def revision(folder: Path) -> str:
    """Return the git commit of `folder`, with ``-dirty`` after changes; empty where git does not track it."""
    git = (*process.GIT, "-C", folder)
    try:
        head = process.run([*git, "rev-parse", "--verify", "HEAD"], check=False)
        tracked = process.run([*git, "ls-files", "--", "."], check=False)
        changed = process.run([*git, "status", "--porcelain", "--", *sources.GIT_PATHS], check=False)
    except ToolMissing:
        return ""
    commit = re.search(r"^[0-9a-f]{40,64}$", head.output, re.MULTILINE)
    # A folder that is untracked inside a repository, for example in a virtual environment, has no commit.
    if head.returncode or commit is None or not tracked.output:
        return ""
    return commit.group() + ("-dirty" if changed.output else "")


def package_files(recipe: Recipe) -> Iterator[TarMember]:
    """Yield the files of the steps that install packages: certificates, requirements, locked packages."""
    for number, file in enumerate(recipe.image.ca):
        with members.readable(file, recipe.where("image", "ca", number), "name another file"):
            # A file without a last line end would spoil the bundle.
            yield members.file(render.certificate_member(number), files.read_bytes(file).rstrip() + b"\n")
    if recipe.image.used_secrets:
        yield _template(install.WITH_SECRETS, "with-secrets.sh")
    yield from _locked_files(recipe, recipe.lock) if recipe.lock else _requirements_files(recipe)


def _template(member: str, name: str) -> TarMember:
    return members.file(member, (FOLDER / "templates" / name).read_bytes())


def _locked_files(recipe: Recipe, lock: LockedPlatform) -> Iterator[TarMember]:
    """Yield what only a locked build needs: its lists, and the packages that lie on this machine."""
    yield members.file(install.LOCK_TOML, recipe.lock_text.encode())
    if lock.apt:
        apt_folder = f"imgkit/{install.LOCKED_APT}"
        yield members.folder(apt_folder)
        yield _template(f"{apt_folder}/{install.SCRIPT}", install.SCRIPT)
        yield members.file(f"{apt_folder}/{install.PACKAGES}", install.locked_packages(recipe).encode())
        yield from _kept_files(recipe, apt_folder, lock.apt)
    for number in install.pip_step_numbers(recipe):
        wheels = install.locked_wheels(recipe, number)
        if wheels:
            text = install.requirements_text(recipe, number)
            yield members.file(install.requirements_file(number).member, text.encode())
        if wheels and number == UV_STEP:
            yield members.file(install.UV_LINKS.member, install.uv_links(recipe).encode())
        if folder := install.kept_wheels(recipe, number):
            yield members.folder(folder.member)
            yield from _kept_files(recipe, folder.member, wheels)


def _kept_files(
    recipe: Recipe, folder: str, packages: Iterable[LockedDeb | LockedWheel]
) -> Iterator[TarMember]:
    for package in packages:
        file = recipe.kept.get(package.file)
        if file is None:
            continue
        hint = "remove it, or make it again: imgkit lock --keep-files"
        with members.readable(file, hint=hint), files.open_regular(file) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            sha256 = files.sha256(stream, 0, size_bytes)
        if sha256 != package.sha256:
            raise CheckFailed(
                f"its sha256 is {sha256}, and the lock has {package.sha256}",
                where=str(file),
                hint="remove it, and the build downloads it; or make it again: imgkit lock --keep-files",
            )
        yield TarMember(name=f"{folder}/{package.file}", size_bytes=size_bytes, source=file)


def _requirements_files(recipe: Recipe) -> Iterator[TarMember]:
    """Yield the requirements of each pip step: the recipe's, or what its project needs; and the uv export."""
    if recipe.image.uv:
        program = importlib.resources.files(__package__).joinpath("inside_uv.py").read_bytes()
        yield members.file(install.UV_JSON.member, uv_export.export_uv_lock(recipe))
        yield members.file(install.UV_PROGRAM.member, program)
    for number, step in enumerate(recipe.image.pip):
        member = install.requirements_file(number).member
        if step.project is not None:
            with members.readable(step.project, recipe.where("image", "pip", number, "project")):
                needed = requirements.of_project(step.project) if step.installs_dependencies else ()
            # Installed early: an edit of the project does not repeat that.
            yield members.file(member, "".join(f"{line}\n" for line in needed).encode())
        if step.requirements is not None:
            where = recipe.where("image", "pip", number, "requirements")
            yield members.file(member, _read_requirements(step.requirements, where))


def _read_requirements(file: Path, where: str) -> bytes:
    with members.readable(file, where, "name another file"):
        data = files.read_bytes(file)
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        # A recipe's check refuses this too; the file may have changed since.
        if requirements.names_other_file(line):
            raise UsageError(
                f"a requirements file names another file: {line.strip()}",
                where=f"{file}:{number}",
                hint="copy its lines here; install your own code with pip: [{project: FOLDER}]",
            )
    return data


class _Stream(io.RawIOBase):
    """A readable file over chunks."""

    def __init__(self, chunks: Generator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        # The generator may have a file open; closing the generator closes the file.
        self._chunks.close()
        super().close()
