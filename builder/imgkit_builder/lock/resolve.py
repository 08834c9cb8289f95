"""Asks a base what a recipe needs: the one effect of this room."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from imgkit_builder import engine as engines
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine import image_source, images
from imgkit_builder.engine.builders import Choice
from imgkit_builder.engine.connection import Engine
from imgkit_builder.image import secret_values
from imgkit_builder.image.secret_values import SecretValues
from imgkit_builder.lock import answers, failures, order
from imgkit_builder.lock.answers import BaseFile
from imgkit_builder.lock.failures import Unresolved
from imgkit_builder.lock.order import Wishes
from imgkit_builder.oci.manifest import BaseImage, now_s
from imgkit_builder.recipe.model import LockedBase, LockedPlatform, LockedTools, LockRequest, Recipe
from imgkit_builder.sif import conversion, mksquashfs
from imgkit_entrypoints.errors import ImgkitError, ToolFailed

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
    context = order.pack(recipe, request, base, old=old, wishes=wishes, kept=kept)
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
        raise failures.explained(recipe, error.failure, log=log) from error
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
        tools=tools(),
    )


def tools() -> LockedTools:
    """What this machine makes a .sif with."""
    program = mksquashfs.find()
    chosen = conversion.GZIP if mksquashfs.lacks_zstd(program) else conversion.ZSTD
    return LockedTools(
        mksquashfs=mksquashfs.version(program) if program else "", compressor=" ".join(chosen.options)
    )


def _fetch(engine: Engine, name: str, folder: Path, *, platform: str) -> None:
    """Copy the reports and files that the scripts left in the image `name` into `folder`."""
    image_source.store_files(
        engine,
        name,
        order.OUT,
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
    failed = folder / order.FAILED_JSON
    if failed.exists():
        with answers.readable():
            failure = failures.read(files.read_bytes(failed))
        raise Unresolved(dataclasses.replace(failure, output=hide(failure.output)))
    stored = {one.name: one for one in _files((*kept.values(), *sorted(folder.iterdir())))}
    debs = files.read_bytes(folder / order.APT_JSON) if request.apt else b""
    return LockedPlatform(
        platform="",
        source_date_epoch=0,
        request=request,
        base=LockedBase(name=request.base),
        apt=answers.debs(debs) if debs else (),
        pip=(
            *(answers.uv_wheels(files.read_bytes(folder / order.UV_JSON)) if request.uv else ()),
            *(
                wheel
                for number in range(len(request.pip))
                for wheel in answers.wheels(
                    files.read_bytes(folder / order.report_member(number)), number, stored
                )
            ),
        ),
    )


def _files(paths: Iterable[Path]) -> Iterator[BaseFile]:
    for file in paths:
        if _FILE.fullmatch(file.name):
            with files.open_regular(file) as stream:
                digest = files.sha256(stream, 0, file.stat().st_size)
            yield BaseFile(name=file.name, sha256=digest)
