"""``imgkit build --with docker``: an engine makes the image of a recipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imgkit_builder.cli import build_lock
from imgkit_builder.cli.build_options import BuildOptions
from imgkit_builder.cli.common import show_text, tell_left_out, warning_lines, with_leave
from imgkit_builder.cli.progress import reporter
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.terminal import shown

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.engine import Built, Engine, ImageInfo
    from imgkit_builder.engine.unchanged import Asked
    from imgkit_builder.image.context import BuildContext
    from imgkit_builder.oci.manifest import BaseImage
    from imgkit_builder.recipe import Recipe

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result: `text` for people, `data` for ``--json``."""

    text: str
    data: dict[str, Any]


def run(typed: str, options: BuildOptions) -> None:
    """Build the recipe that the user calls `typed`, and print the result."""
    refuse_bundled(typed)
    fresh = options.dry_run or options.pull or options.no_cache
    if not fresh:
        with reporter(as_json=options.as_json, verbose=options.verbose, waits=False) as report:
            done = up_to_date(typed, options, report)
        if done is not None:
            show_text(done.data, done.text, as_json=options.as_json)
            return
    from imgkit_builder.recipe.load import load

    recipe = load(typed)

    def attempt(large: bool) -> Outcome:
        asked = dataclasses.replace(options, large=large)
        with reporter(as_json=asked.as_json, verbose=asked.verbose) as report:
            for note in warning_lines(recipe.warnings):
                report.note(note)
            return plan(recipe, asked, report) if asked.dry_run else make(recipe, typed, asked, report)

    outcome = with_leave(attempt, large=options.large, may_ask=not options.as_json)
    show_text(outcome.data, outcome.text, as_json=options.as_json)


def refuse_bundled(typed: str) -> None:
    """Raise UsageError in the one-file tool, which has no docker SDK."""
    from imgkit_builder.recipe import targets

    if targets.is_bundled():
        raise UsageError(
            "the one-file imgkit does not build with Docker",
            where="--with docker",
            hint=f"build --with apptainer, or where imgkit is installed: imgkit build {typed}",
        )


def up_to_date(typed: str, options: BuildOptions, report: Reporter) -> Outcome | None:
    """The outcome of the last build, if another one would change nothing; loads next to nothing."""
    from imgkit_builder.engine import unchanged

    found = unchanged.find(_asked(typed, options))
    if found is None:
        return None
    for note in found.answer.notes:
        report.note(note)
    tell_left_out(found.code, report)
    report.note(
        f"{found.tag} is up to date: recipe, files, base and imgkit are those of its build (to build "
        "it anyway: --no-cache)"
    )
    data: dict[str, Any] = {**json_text.parse(found.answer.data), "up_to_date": True, "checks": []}
    return Outcome(text=found.answer.text, data=data)


def _asked(typed: str, options: BuildOptions) -> Asked:
    from imgkit_builder.engine.unchanged import Asked

    return Asked(
        recipe=typed,
        tag=options.tag,
        base=options.base,
        platform=options.platform,
        builder=options.builder,
        lock="--locked" if options.locked else "--no-lock" if options.no_lock else "",
        no_test=options.no_test,
    )


def plan(recipe: Recipe, options: BuildOptions, report: Reporter) -> Outcome:
    """Work out what would be built, without an engine."""
    from imgkit_builder.engine import check_name, choose_platform, default_tag
    from imgkit_builder.image.context import pack, revision
    from imgkit_builder.oci.manifest import BaseImage
    from imgkit_builder.oci.platform import host_platform

    target = choose_platform(recipe, wanted=options.platform, host=host_platform())
    recipe = build_lock.followed(recipe, target, options, report)
    base = build_lock.base_of(recipe, options) or recipe.image.base
    tag = options.tag or default_tag(recipe)
    check_name(base, where="--base")
    check_name(tag, where="--tag")
    context = pack(
        recipe,
        base=BaseImage(name=base, platform=target),
        platform=target,
        revision=revision(recipe.file.parent),
        large=options.large,
        report=report,
    )
    tell_left_out(context.code, report)
    rows = {
        "recipe": f"{recipe.name} ({recipe.file})",
        "base": base,
        "platform": target,
        "tag": tag,
        "context": f"{context.size_bytes} bytes",
    }
    head = "".join(f"# {key:9} {shown(value)}\n" for key, value in rows.items())
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


def make(recipe: Recipe, typed: str, options: BuildOptions, report: Reporter) -> Outcome:
    """Build and test the image of `recipe`; `typed` is the user's word for it."""
    from imgkit_builder import engine as engines
    from imgkit_builder.engine import unchanged
    from imgkit_builder.image import context as contexts
    from imgkit_builder.image import secret_values

    values = secret_values.read(recipe)
    secrets_at = recipe.where("image", "secrets") if values.options else ""
    tag = options.tag or engines.default_tag(recipe)
    engines.check_name(tag, where="--tag")
    with engines.connect() as engine:
        builder = engines.choose(engine.facts(), options.builder, secrets_at=secrets_at)
        target = engines.choose_platform(recipe, wanted=options.platform, host=engine.platform)
        recipe = build_lock.followed(recipe, target, options, report)
        base_name = build_lock.base_of(recipe, options)
        name = base_name or recipe.image.base
        watched = unchanged.watch(_asked(typed, options), engine.endpoint, base=name)
        report.stage(f"base {name}")
        base = engines.resolve_base(
            engine, recipe, override=base_name, platform=options.platform, pull=options.pull, report=report
        )
        build_lock.check_base(recipe, base)
        probe = engines.probe(engine, base)
        if probe.skipped:
            report.note(f"the base could not be probed: {probe.skipped}")
        base = dataclasses.replace(base, probe=probe)
        report.stage("context")
        context = contexts.pack(
            recipe,
            base=base,
            platform=base.platform,
            revision=contexts.revision(recipe.file.parent),
            large=options.large,
            report=report,
        )
        tell_left_out(context.code, report)
        secret_values.refuse_in(context, values)
        code_sha256 = unchanged.code_sha256(context)
        tested: list[Check] = []

        def accept(image: ImageInfo) -> None:
            if not options.no_test:
                tested.extend(_smoke(engine, image, context, report))

        built = engines.build(
            engine,
            context,
            tag=tag,
            report=report,
            builder=dataclasses.replace(builder, options=values.options),
            hide=values.masked,
            no_cache=options.no_cache,
            accept=accept,
        )
    # The next command takes the same word, unless --tag gave the image another name.
    outcome = _outcome(recipe, built, base, tested, again=options.tag or typed)
    answer = unchanged.Answer(
        notes=(*warning_lines(recipe.warnings), *build_lock.notes(recipe)),
        text=outcome.text,
        data=json.dumps(outcome.data),
    )
    unchanged.remember(watched, recipe, context, built, code_sha256=code_sha256, answer=answer)
    return outcome


def _smoke(engine: Engine, image: ImageInfo, context: BuildContext, report: Reporter) -> Sequence[Check]:
    from imgkit_builder import engine as engines
    from imgkit_builder.base import checks
    from imgkit_builder.image import smoke
    from imgkit_entrypoints.errors import CheckFailed

    if smoke.passed_before(image.id):
        report.note("smoke test: skipped, this image has passed it before")
        return ()
    report.stage("smoke test")
    results = smoke.check(
        lambda argv: engines.run(engine, image.ref, argv, platform=image.platform),
        arch=image.platform.partition("/")[2],
        manifest=context.manifest,
    )
    if not checks.passed(results):
        raise CheckFailed(
            "the image was built, but its smoke test failed; an older image keeps the name",
            hint="\n".join(checks.table(results)) + f"\nlook inside: docker run --rm -it "
            f"{image.ref} bash; to name it anyway: --no-test",
        )
    smoke.remember(image.id)
    return results


def _outcome(
    recipe: Recipe, built: Built, base: BaseImage, tested: Sequence[Check], *, again: str
) -> Outcome:
    from imgkit_builder.base import checks

    image = built.image
    lines = [
        f"{built.tag}  {image.id}  {image.size_bytes / 1e6:.1f} MB  {image.platform}",
        f"next: imgkit sif {again}     (for a cluster: imgkit save {again})",
    ]
    if base.standin:
        lines.insert(1, f"a STAND-IN: {base.name} has no NVIDIA software; for tests only")
    data = {
        "schema": SCHEMA,
        "id": image.id,
        "tag": built.tag,
        "up_to_date": False,
        "platform": image.platform,
        "size_bytes": image.size_bytes,
        "standin": base.standin,
        "base": {"name": base.name, "id": base.id, "digest": base.digest},
        "locked": recipe.lock is not None,
        "log": str(built.log),
        "labels": dict(image.labels),
        "checks": checks.to_dict(tested)["checks"],
    }
    return Outcome(text="\n".join(map(shown, lines)), data=data)
