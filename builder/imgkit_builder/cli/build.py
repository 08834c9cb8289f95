"""``imgkit build``: a recipe becomes a tested image or .sif; ``--dry-run`` prints the plan."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli import build_sif
from imgkit_builder.cli.common import JSON, LARGE, VERBOSE, complete_names, show, tell_left_out, with_leave
from imgkit_builder.cli.conversion import RUNTIME, TMPDIR
from imgkit_builder.cli.progress import reporter
from imgkit_entrypoints import json_text

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.engine import Builder, Built, Engine, ImageInfo
    from imgkit_builder.engine.unchanged import Asked
    from imgkit_builder.image.context import BuildContext
    from imgkit_builder.image.manifest import BaseImage
    from imgkit_builder.recipe import Recipe

SCHEMA = 1


class With(str, enum.Enum):
    """The values of ``--with``."""

    DOCKER = "docker"
    APPTAINER = "apptainer"


class BuilderName(str, enum.Enum):
    """The values of ``--builder``."""

    AUTO = "auto"
    CLASSIC = "classic"
    BUILDX = "buildx"
    PODMAN = "podman"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The options of ``imgkit build``; None takes the recipe's value."""

    tag: str | None
    base: str | None
    platform: str | None
    pull: bool
    no_cache: bool
    no_test: bool
    large: bool = False
    builder: Builder = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result: `text` for people, `data` for ``--json``."""

    text: str
    data: dict[str, Any]


def verb_build(
    recipe: str = typer.Argument(
        metavar="RECIPE|FILE",
        autocompletion=complete_names,
        help="A shipped recipe (imgkit list) or a .yaml file.",
    ),
    tag: str | None = typer.Option(None, help="Name of the image (default: RECIPE:latest)."),
    base: str | None = typer.Option(None, metavar="REF", help="Base image instead of the recipe's."),
    program: With = typer.Option(
        With.DOCKER,
        "--with",
        help="docker: an engine makes an image. apptainer: Apptainer or Singularity makes a .sif; needs no "
        "Docker and no root.",
    ),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="X.sif",
        help="With apptainer: file to write (default: RECIPE.sif here).",
    ),
    base_from: str | None = typer.Option(
        None,
        metavar="PATH|registry",
        help="With apptainer: an archive, an OCI folder or a .sif of the base (default: its registry).",
    ),
    tmpdir: Path | None = TMPDIR,
    runtime: str | None = RUNTIME,
    platform: str | None = typer.Option(None, help="linux/amd64 or linux/arm64, if the recipe allows both."),
    no_cache: bool = typer.Option(False, "--no-cache", help="Run every step again."),
    pull: bool = typer.Option(False, "--pull", help="Pull the base even if it is local."),
    no_test: bool = typer.Option(False, "--no-test", help="Skip the smoke test."),
    large: bool = LARGE,
    builder: BuilderName = typer.Option(
        BuilderName.AUTO,
        help="classic: the engine's API. buildx: docker buildx. podman: podman build. "
        "auto: podman for Podman, else classic.",
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the plan and the Dockerfile; needs no Docker."
    ),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Build the image of a recipe, then test it.

    A local base needs no network. The image gets its name last, so a failed build
    leaves the old image in place. The full log and the Dockerfile stay in
    $XDG_STATE_HOME/imgkit/builds.

    \b
    Examples:
      imgkit build mn5
      imgkit build ./mine.yaml --tag group/mine:1
      imgkit build mn5 --base imgkit.local/standin:24.03   (for tests)
      imgkit build olivia --dry-run                        (needs no Docker)
      imgkit build olivia --with apptainer                 (on a cluster: olivia.sif)
      imgkit build mn5 --with apptainer --base-from pytorch.tar
    """
    if program is With.APPTAINER:
        build_sif.refuse_given("--with apptainer", {"--tag": tag, "--builder": builder.value != "auto"})
        build_sif.run(
            recipe,
            build_sif.SifBuildOptions(
                base=base,
                base_from=base_from,
                output=output,
                platform=platform,
                no_cache=no_cache,
                pull=pull,
                no_test=no_test,
                runtime=runtime,
                tmpdir=tmpdir,
                dry_run=dry_run,
            ),
            large=large,
            as_json=as_json,
            verbose=verbose,
        )
        return
    build_sif.refuse_bundled(recipe)
    given = {"--output": output, "--base-from": base_from, "--tmpdir": tmpdir, "--runtime": runtime}
    build_sif.refuse_given("--with docker", given)
    options = BuildOptions(
        tag=tag,
        base=base,
        platform=platform,
        pull=pull,
        no_cache=no_cache,
        no_test=no_test,
        builder=builder.value,
    )
    fresh = dry_run or pull or no_cache
    if not fresh and (done := up_to_date(recipe, options, as_json=as_json, verbose=verbose)):
        show(done.data, done.text, as_json=as_json)
        return
    from imgkit_builder.recipe.load import load

    loaded = load(recipe)

    def run(large: bool) -> Outcome:
        asked = dataclasses.replace(options, large=large)
        with reporter(as_json=as_json, verbose=verbose) as report:
            for note in _warnings(loaded):
                report.note(note)
            return plan(loaded, asked, report) if dry_run else make(loaded, recipe, asked, report)

    outcome = with_leave(run, large=large, may_ask=not as_json)
    show(outcome.data, outcome.text, as_json=as_json)


def up_to_date(typed: str, options: BuildOptions, *, as_json: bool, verbose: bool) -> Outcome | None:
    """The outcome of the last build, if another one would change nothing; loads next to nothing."""
    from imgkit_builder.engine import unchanged

    found = unchanged.find(_asked(typed, options))
    if found is None:
        return None
    with reporter(as_json=as_json, verbose=verbose, waits=False) as report:
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
        no_test=options.no_test,
    )


def plan(recipe: Recipe, options: BuildOptions, report: Reporter) -> Outcome:
    """Work out what would be built, without an engine."""
    from imgkit_builder.base.platform import host_platform
    from imgkit_builder.engine import check_name, choose_platform, default_tag
    from imgkit_builder.image.context import pack, revision
    from imgkit_builder.image.manifest import BaseImage

    target = choose_platform(recipe, wanted=options.platform, host=host_platform())
    base = options.base or recipe.image.base
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
        name = options.base or recipe.image.base
        watched = unchanged.watch(_asked(typed, options), engine.endpoint, base=name)
        report.stage(f"base {name}")
        base = engines.resolve_base(
            engine, recipe, override=options.base, platform=options.platform, pull=options.pull, report=report
        )
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
    outcome = _outcome(built, base, tested, again=options.tag or typed)
    answer = unchanged.Answer(notes=_warnings(recipe), text=outcome.text, data=json.dumps(outcome.data))
    unchanged.remember(watched, recipe, context, built, code_sha256=code_sha256, answer=answer)
    return outcome


def _warnings(recipe: Recipe) -> tuple[str, ...]:
    return tuple(f"warning: {problem}" for problem in recipe.warnings)


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
            hint=f"{checks.table(results)}\n  -> look inside: docker run --rm -it {image.ref} bash; "
            "to name it anyway: --no-test",
        )
    smoke.remember(image.id)
    return results


def _outcome(built: Built, base: BaseImage, tested: Sequence[Check], *, again: str) -> Outcome:
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
        "log": str(built.log),
        "labels": dict(image.labels),
        "checks": checks.to_dict(tested)["checks"],
    }
    return Outcome(text="\n".join(lines), data=data)
