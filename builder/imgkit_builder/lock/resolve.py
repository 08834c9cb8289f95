"""Asks a base what a recipe needs: the build context with the questions, the build, and the lock that is
written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import json
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder import engine as engines
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine import image_source, images
from imgkit_builder.engine.builders import Choice
from imgkit_builder.engine.connection import Engine
from imgkit_builder.image import context, install, members, render, secret_values
from imgkit_builder.image.context import BuildContext
from imgkit_builder.image.instructions import INSIDE, NEXT
from imgkit_builder.image.secret_values import SecretValues
from imgkit_builder.lock import answers
from imgkit_builder.lock.answers import BaseFile, Unresolved
from imgkit_builder.oci.manifest import BaseImage, Manifest, now_s
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import Lock, LockedBase, LockedPlatform, LockRequest, Recipe
from imgkit_builder.recipe.requirements import canonical
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError
from imgkit_entrypoints.files import replacing
from imgkit_recipes import FOLDER

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+~%:_!-]*\.(deb|whl)")
_REPORT = re.compile(r"(apt|uv|failed|pip-\d+)\.json")


def resolve(
    engine: Engine,
    recipe: Recipe,
    request: LockRequest,
    base: BaseImage,
    *,
    old: LockedPlatform | None,
    wishes: Wishes,
    kept: Mapping[str, Path],
    builder: Choice,
    values: SecretValues,
    folder: Path,
    report: Reporter,
) -> LockedPlatform:
    """The lock of `recipe` on `base`; the files of a lock with files lie in `folder` afterwards.

    Parameters
    ----------
    old, wishes, kept : as in `order.pack`.

    Raises
    ------
    UsageError : pip or apt finds no solution, or a package has no wheel; names the recipe's line.
    ToolFailed : a wheel cannot be built, or the network, the engine or a program fails.
    """
    context = pack(recipe, request, base, old=old, wishes=wishes, kept=kept)
    secret_values.refuse_in(context, values)
    log = ""
    if request.apt or request.uv or request.pip:
        tag = f"imgkit-lock:{secrets.token_hex(6)}"
        try:
            # Nothing from a cache: an index may have changed since.
            built = engines.build(
                engine,
                context,
                tag=tag,
                report=report,
                builder=builder,
                no_cache=True,
                hide=values.masked,
            )
            log = str(built.log)
            report.stage("read the answers")
            _fetch(engine, built.image.ref, folder, platform=base.platform)
        finally:
            # The engine may be what failed.
            with contextlib.suppress(ImgkitError):
                images.remove(engine, tag)
    try:
        found = _read(folder, request, kept, hide=values.masked)
    except Unresolved as error:
        raise answers.explained(recipe, error.failure, log=log) from error
    except (ToolFailed, OSError) as error:
        what = (
            error.what if isinstance(error, ToolFailed) else f"an answer of the base cannot be read: {error}"
        )
        raise ToolFailed(what, hint=f"full log: {log}") from error
    return dataclasses.replace(
        found,
        platform=base.platform,
        source_date_epoch=now_s(),
        base=LockedBase(name=request.base, digest=base.digest.partition("@")[2], id=base.id),
    )


def _fetch(engine: Engine, name: str, folder: Path, *, platform: str) -> None:
    """Copy the reports and files that the scripts left in the image `name` into `folder`."""
    image_source.store_files(
        engine,
        name,
        OUT,
        folder,
        wanted=lambda file: bool(_FILE.fullmatch(file) or _REPORT.fullmatch(file)),
        platform=platform,
    )


def _read(
    folder: Path, request: LockRequest, kept: Mapping[str, Path], *, hide: Callable[[str], str]
) -> LockedPlatform:
    """The packages that the reports in `folder` name.

    Raises
    ------
    Unresolved : a script has failed, or what it found cannot be locked.
    """
    failed = folder / FAILED_JSON
    if failed.exists():
        with answers.readable():
            failure = answers.read(files.read_bytes(failed))
        raise Unresolved(dataclasses.replace(failure, output=hide(failure.output)))
    stored = {one.name: one for one in _files((*kept.values(), *sorted(folder.iterdir())))}
    debs = files.read_bytes(folder / APT_JSON) if request.apt else b""
    return LockedPlatform(
        platform="",
        source_date_epoch=0,
        request=request,
        base=LockedBase(name=request.base),
        apt=answers.debs(debs) if debs else (),
        pip=(
            *(answers.uv_wheels(files.read_bytes(folder / UV_JSON)) if request.uv else ()),
            *(
                wheel
                for number in range(len(request.pip))
                for wheel in answers.wheels(files.read_bytes(folder / report_member(number)), number, stored)
            ),
        ),
    )


def _files(paths: Iterable[Path]) -> Iterator[BaseFile]:
    for file in paths:
        if _FILE.fullmatch(file.name):
            with files.open_regular(file) as stream:
                digest = files.sha256(stream, 0, file.stat().st_size)
            yield BaseFile(name=file.name, sha256=digest)


PLACE = f"{INSIDE}/lock"
"""The folder of the questions and answers in the base."""
OUT = f"{PLACE}/out"
APT_JSON, UV_JSON, FAILED_JSON = "apt.json", "uv.json", "failed.json"
_MEMBER = "imgkit/lock"
_SCRIPTS = ("inside_apt.py", "inside_pip.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a lock should be like, besides what the recipe states."""

    keep: bool = False
    """Whether the files are stored too, and wheels are built where there are none."""
    upgrade: bool = False
    packages: tuple[str, ...] = ()
    """The only packages that `upgrade` is about; empty for all."""


def report_member(number: int) -> str:
    """Name of the report of pip step `number` (from 0) in `OUT`."""
    return f"pip-{number}.json"


def pack(
    recipe: Recipe,
    request: LockRequest,
    base: BaseImage,
    *,
    old: LockedPlatform | None,
    wishes: Wishes,
    kept: Mapping[str, Path],
) -> BuildContext:
    """The context whose build leaves the answers in `OUT`.

    Parameters
    ----------
    old : the lock that there is: its versions stay unless `wishes` upgrades them.
    kept : the files of wheels that were built for `old`.

    Raises
    ------
    UsageError : a value of the recipe does not fit on one line, or a file cannot be read.
    """
    made = render.layers(recipe, base=base.name, platform=base.platform, base_user=base.user)
    packages = "".join(f"{NEXT}    {shlex.quote(one)}" for one in recipe.image.apt)
    made = dataclasses.replace(
        made,
        uv=install.uv_question(recipe, f"{OUT}/{UV_JSON}", keep=f"{OUT}/files" if wishes.keep else ""),
        apt=made.apt and dataclasses.replace(made.apt, text=f"python3 {PLACE}/{_SCRIPTS[0]}{packages}"),
        pip=tuple(
            install.pip_command(recipe, number, step, pip=f"python3 {PLACE}/{_SCRIPTS[1]} {number}")
            for number, step in enumerate(recipe.image.pip)
        ),
    )
    packed = [
        *context.early_files(recipe),
        members.folder("imgkit"),
        members.folder(_MEMBER),
        members.file(f"{_MEMBER}/order.json", _order(recipe, request, old, wishes, bool(kept)).encode()),
        *(members.file(f"{_MEMBER}/{name}", _script(name)) for name in _SCRIPTS),
        *context.certificates(recipe),
        *context.requirements_files(recipe),
        *(members.file(name, data) for name, data in install.uv_files(recipe)),
    ]
    if kept:
        packed.append(members.folder(f"{_MEMBER}/kept"))
        packed += [
            members.file(f"{_MEMBER}/kept/{name}", files.read_bytes(file, most_bytes=file.stat().st_size))
            for name, file in kept.items()
        ]
    if recipe.image.used_secrets:
        script = (FOLDER / "templates/with-secrets.sh").read_bytes()
        packed.append(members.file(install.WITH_SECRETS, script))
    manifest = Manifest(
        imgkit=__version__,
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        base=base,
        platform=base.platform,
        wheel_sha256="",
    )
    return context.sealed(packed, render.resolver(made, folder=PLACE), manifest)


def _order(
    recipe: Recipe, request: LockRequest, old: LockedPlatform | None, wishes: Wishes, has_kept: bool
) -> str:
    """What the scripts read."""
    wanted = {canonical(name) for name in wishes.packages}

    def stays(name: str) -> bool:
        return not wishes.upgrade or (bool(wanted) and canonical(name) not in wanted)

    return json.dumps(
        {
            "keep": wishes.keep,
            "kept": has_kept,
            "has_pip": bool(request.pip),
            "debs": [(one.name, one.version) for one in old.apt if stays(one.name)] if old else [],
            # The same package in two steps may have two versions: the pins of each step are its own.
            "wheels": [
                {
                    canonical(one.name): one.version
                    for one in old.pip
                    if one.step == number and stays(one.name)
                }
                if old
                else {}
                for number in range(len(request.pip))
            ],
            "steps": [
                {"packages": one.requirements, "options": lock_file.options_of(step)}
                for one, step in zip(request.pip, recipe.image.pip, strict=True)
            ],
        }
    )


def _script(name: str) -> bytes:
    return importlib.resources.files(__package__).joinpath(name).read_bytes()


def kept_files(file: Path, part: LockedPlatform | None) -> dict[str, Path]:
    """The wheels of `part` that no index has, by name.

    Raises
    ------
    UsageError : one is missing.
    """
    found = {
        one.file: lock_file.kept_folder(file) / one.file for one in (part.pip if part else ()) if one.kept
    }
    for name, path in found.items():
        if not path.is_file():
            raise UsageError(
                f"the kept wheel {name} is missing",
                where=str(path),
                hint="restore the folder, or build it again: imgkit lock RECIPE --keep-files --upgrade",
            )
    return found


def write_lock(recipe: Recipe, file: Path, old: Lock | None, part: LockedPlatform, made: Path | None) -> None:
    """Write `part` into the lock `file`, and its files from the folder `made` next to it.

    The files come first: a lock never names a file that is not there. Those that only `old` names go last.

    Raises
    ------
    OSError, UsageError : something cannot be written, or would be refused when it is read; the old lock is
        as it was.
    """
    lock = old or Lock(recipe=recipe.name, imgkit=__version__, platforms=())
    new = Lock(recipe=recipe.name, imgkit=__version__, platforms=lock.replaced(part).platforms)
    content = lock_file.text(new)
    lock_file.parse(content, file)  # names, versions and URLs are what the base answered
    if made is not None:
        _store(lock_file.kept_folder(file), made, part.digests)
    hint = "choose a folder that this user may write to"
    with replacing(file, failed="the lock cannot be written", hint=hint) as stream:
        stream.write(content.encode())
    named = {name for one in new.platforms for name in one.digests}
    for name in {name for one in lock.platforms for name in one.digests} - named:
        (lock_file.kept_folder(file) / name).unlink(missing_ok=True)


def _store(folder: Path, made: Path, digests: Mapping[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name in sorted(digests):
        if (made / name).is_file():
            with files.writing(folder / name) as stream, files.open_regular(made / name) as source:
                shutil.copyfileobj(source, stream)
