"""The steps of ``imgkit build``: the whole line from a recipe to a tested image, or only what it would be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imgkit_builder.base import checks
from imgkit_builder.base.platform import host_platform
from imgkit_builder.image import smoke
from imgkit_entrypoints.errors import CheckFailed

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.engine import Built, Engine, ImageInfo
    from imgkit_builder.image.context import BuildContext
    from imgkit_builder.image.manifest import Base
    from imgkit_builder.recipe import Recipe

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options of ``imgkit build``; None is "as the recipe says"."""

    tag: str | None
    base: str | None
    platform: str | None
    pull: bool
    no_cache: bool
    no_test: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is printed: `text` for people, `data` for ``--json``."""

    text: str
    data: dict[str, Any]


def plan(recipe: Recipe, wanted: Wanted) -> Outcome:
    """What would be built, found out without an engine."""
    from imgkit_builder.engine import check_name, choose_platform, default_tag
    from imgkit_builder.image.context import pack, revision
    from imgkit_builder.image.manifest import Base

    target = choose_platform(recipe, wanted=wanted.platform, host=host_platform())
    base = wanted.base or recipe.image.base
    tag = wanted.tag or default_tag(recipe)
    check_name(base, where="--base")
    check_name(tag, where="--tag")
    context = pack(
        recipe,
        base=Base(name=base, platform=target),
        platform=target,
        revision=revision(recipe.file.parent),
    )
    rows = {
        "recipe": f"{recipe.name} ({recipe.file})",
        "base": base,
        "platform": target,
        "tag": tag,
        "context": f"{context.size_bytes} bytes",
    }
    head = "".join(f"# {key:9} {value}\n" for key, value in rows.items())
    data = {
        "schema": SCHEMA,
        "dry_run": True,
        "recipe": recipe.name,
        "base": base,
        "platform": target,
        "tag": tag,
        "context_bytes": context.size_bytes,
        "dockerfile": context.dockerfile,
    }
    return Outcome(text=head + context.dockerfile.rstrip("\n"), data=data)


def make(recipe: Recipe, typed: str, wanted: Wanted, report: Reporter) -> Outcome:
    """Build and test the image of `recipe`, which the user called `typed`."""
    from imgkit_builder import engine as engines
    from imgkit_builder.image import context as contexts

    tag = wanted.tag or engines.default_tag(recipe)
    engines.check_name(tag, where="--tag")
    with engines.connect() as engine:
        report.stage(f"base {wanted.base or recipe.image.base}")
        base = engines.resolve_base(
            engine, recipe, override=wanted.base, platform=wanted.platform, pull=wanted.pull, report=report
        )
        probe = engines.probe(engine, base)
        if probe.skipped:
            report.note(f"the base was not probed: {probe.skipped}")
        base = dataclasses.replace(base, probe=probe)
        report.stage("context")
        context = contexts.pack(
            recipe, base=base, platform=base.platform, revision=contexts.revision(recipe.file.parent)
        )
        tested: list[Check] = []

        def accept(image: ImageInfo) -> None:
            if not wanted.no_test:
                tested.extend(_smoke(engine, image, context, report))

        built = engines.build(
            engine, context, tag=tag, report=report, no_cache=wanted.no_cache, accept=accept
        )
    # What was typed is what the next command takes too, unless the image has a name of its own.
    return _outcome(built, base, tested, again=wanted.tag or typed)


def _smoke(engine: Engine, image: ImageInfo, context: BuildContext, report: Reporter) -> Sequence[Check]:
    from imgkit_builder import engine as engines

    if smoke.passed_before(image.id):
        report.note("smoke test: this very image passed before")
        return ()
    report.stage("smoke test")
    results = smoke.check(
        lambda argv: engines.run(engine, image.id, argv),
        arch=image.platform.partition("/")[2],
        manifest=context.manifest,
    )
    if not checks.passed(results):
        raise CheckFailed(
            "the image was built, but its smoke test failed; it got no name, an old image keeps it",
            hint=f"{checks.table(results)}\n  -> look into it: docker run --rm -it {image.id} bash; "
            "to name it all the same: --no-test",
        )
    smoke.remember(image.id)
    return results


def _outcome(built: Built, base: Base, tested: Sequence[Check], *, again: str) -> Outcome:
    image = built.image
    lines = [
        f"{built.tag}  {image.id}  {image.size_bytes / 1e6:.1f} MB  {image.platform}",
        f"next: imgkit sif {again}     (for a cluster: imgkit save {again})",
    ]
    if base.standin:
        lines.insert(1, f"a STAND-IN: {base.name} has none of NVIDIA's software; for tests only")
    data = {
        "schema": SCHEMA,
        "id": image.id,
        "tag": built.tag,
        "platform": image.platform,
        "size_bytes": image.size_bytes,
        "standin": base.standin,
        "base": {"name": base.name, "id": base.id, "digest": base.digest},
        "log": str(built.log),
        "labels": dict(image.labels),
        "checks": checks.to_dict(tested)["checks"],
    }
    return Outcome(text="\n".join(lines), data=data)
