"""Build a .sif again from the lock inside it, and compare the two files."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.workflow.build import BuildRequest, build_loaded
from imgkit_builder.workflow.convert import engine_image, helper
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.examine.rebuilt import DifferentEntry, RebuiltSif
    from imgkit_builder.recipe import Recipe
    from imgkit_builder.sif.image import ImgkitRecord

_LOCK, _RECIPE = "opt/imgkit/lock.toml", "opt/imgkit/recipe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildResult:
    """A .sif that was built again, compared with the older one, and removed."""

    same: bool
    """Whether the files have one sha256, or, with other tools, the same content."""
    tools: str
    """What squashes here and in the lock, where these differ; else empty."""
    found: RebuiltSif


def rebuild(
    sif: Path, recipe: Path | None = None, *, tmpdir: Path | None = None, report: Reporter = SILENT
) -> RebuildResult:
    """Build `sif` again from the lock in it, and compare; `recipe` is for the code and files next to it.

    Raises
    ------
    UsageError : it was not built from a lock, or needs `recipe`.
    CheckFailed : it is damaged.
    ToolMissing, ToolFailed : as of the engine and of mksquashfs.
    """
    from imgkit_builder.sif.workspace import scratch

    loaded, record = _locked_recipe(sif, recipe, report)
    with scratch(sif.absolute(), tmpdir) as folder:
        found = _rebuilt(sif, loaded, record, folder / "new.sif", report)
    tools = _other_tools(loaded)
    return RebuildResult(same=found.equal or (bool(tools) and not found.different), tools=tools, found=found)


def _locked_recipe(sif: Path, file: Path | None, report: Reporter) -> tuple[Recipe, ImgkitRecord]:
    """The recipe with the lock that lies in the .sif, and the record of the .sif."""
    from imgkit_builder.delta import descriptor, source, tree
    from imgkit_builder.recipe import load, lock_file, portable
    from imgkit_entrypoints import __version__

    stack = descriptor.stack(sif)
    record = stack.sif.record
    mounted = source.mounted(stack.sif)
    texts = [tree.content(mounted, inside, 16 << 20) for inside in (_LOCK, _RECIPE)]
    if texts[0] is None or texts[1] is None or record is None:
        raise UsageError(
            "it was not built from a lock: there is none inside",
            where=str(sif),
            hint="imgkit lock RECIPE, then build and convert it again",
        )
    if record.deltas:
        raise UsageError(
            f"it has {len(record.deltas)} deltas over what was built",
            where=str(sif),
            hint="pass the .sif without its deltas",
        )
    if record.imgkit != __version__:
        report.note(f"imgkit {record.imgkit} made it, and this is {__version__}: the bytes may differ")
    inside = Path(f"{sif}:/{_LOCK}")
    lock = lock_file.parse(texts[0], inside)
    if len(lock.platforms) != 1:
        raise UsageError(
            f"the lock is for {len(lock.platforms)} platforms, and an image has one", where=str(inside)
        )
    part = lock.platforms[0]
    if file is not None:
        found = load.load(str(file))
    else:
        found = portable.from_json(texts[1].decode(errors="replace"), Path(f"{lock.recipe}.json"))
        if found.image.copy or found.image.ca or any(one.project for one in found.image.pip):
            raise UsageError(
                f"the recipe {found.name} copies code or files that the .sif does not contain",
                where=str(sif),
                hint=f"imgkit rebuild {sif} --recipe {found.file.name}",
            )
        if part.request.base != found.image.base:
            report.note(f"it was built on {part.request.base}, and its recipe states {found.image.base}")
    # The lock may name another base than the recipe beside it, but not than a recipe of this machine.
    base = part.request.base if file is None else None
    attached = lock_file.attached(found, lock, lock_file.beside(found), platform=part.platform, base=base)
    return attached, record


def _rebuilt(sif: Path, recipe: Recipe, record: ImgkitRecord, made: Path, report: Reporter) -> RebuiltSif:
    from imgkit_builder.examine import rebuilt
    from imgkit_builder.sif import convert
    from imgkit_builder.sif.conversion import Options

    assert recipe.lock is not None  # noqa: S101 - for the type checker: `attached` has set it
    with _removed_tag() as tag:
        request = BuildRequest(
            tag=tag,
            base=recipe.lock.request.base,
            platform=recipe.lock.platform,
            no_cache=True,
            no_test=True,
            large=True,
        )
        build_loaded(recipe, str(sif), request, report=report)
        with engine_image(tag) as image:
            kind = record.compression.split(" ")[0]
            wanted = Options(
                compression="gzip" if kind == "gzip" else "zstd", test=False, helper=helper(image)
            )
            convert.convert(image, made, wanted, report)
            report.stage("compare")
            found = rebuilt.compare(sif, made, report)
            if found.different:
                found = dataclasses.replace(found, different=_placed(found.different, recipe, image, report))
    return found


def _placed(
    found: tuple[DifferentEntry, ...], recipe: Recipe, image: Any, report: Reporter
) -> tuple[DifferentEntry, ...]:
    """The entries with the layers and steps that made them."""
    from imgkit_builder import engine as engines
    from imgkit_builder.delta.source import opened
    from imgkit_builder.examine import rebuilt
    from imgkit_builder.image import render

    assert recipe.lock is not None  # noqa: S101 - for the type checker: `attached` has set it
    base = recipe.lock.base.exact
    with engines.connect() as engine:
        info = engines.inspect(engine, base)
    with opened(image, report) as new:
        layers = [layer for _, layer in new.layers]
        made_by = rebuilt.origins(render.dockerfile(recipe, base=base), len(layers) - len(info.diff_ids))
        return tuple(rebuilt.placed(one, layers, made_by) for one in found)


@contextlib.contextmanager
def _removed_tag() -> Iterator[str]:
    """Yield a name for an image, which is removed at the end."""
    from imgkit_builder import engine as engines
    from imgkit_builder.engine import images

    tag = f"imgkit-rebuild-{secrets.token_hex(4)}:latest"
    try:
        yield tag
    finally:
        with engines.connect() as engine:
            images.remove(engine, tag)


def _other_tools(recipe: Recipe) -> str:
    """What squashes here and in the lock, where that is not the same; else empty."""
    from imgkit_builder.sif import mksquashfs

    stated = recipe.lock.tools.mksquashfs if recipe.lock else ""
    program = mksquashfs.find()
    here = mksquashfs.version(program) if program else ""
    return (
        f"mksquashfs {here or 'in the engine'} here, {stated} in the lock" if stated not in ("", here) else ""
    )
