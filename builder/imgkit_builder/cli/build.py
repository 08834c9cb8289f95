"""``imgkit build``: a recipe becomes a tested image or .sif; ``--dry-run`` prints the plan."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer

from imgkit_builder.cli.common import (
    BASE_HELP,
    MB,
    complete_names,
    next_line,
    show_text,
    stage_lines,
    stage_seconds,
    terminable,
    with_leave,
)
from imgkit_builder.cli.job_flags import OptionsCommand
from imgkit_builder.cli.progress import reporter
from imgkit_builder.job.request import flag, flags_in
from imgkit_builder.workflow import build
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.terminal import shown

if TYPE_CHECKING:
    from imgkit_builder.apptainer.build import BuildPlan, BuiltSif, SifRequest
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.workflow.build import BuildRequest, BuiltImage, ImagePlan, SifBuildRequest

SCHEMA = 1
Answer = tuple[str, dict[str, Any]]
"""The result for people, and for ``--json``."""
_BuildKind = TypeVar("_BuildKind", "BuildRequest", "SifBuildRequest")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of ``imgkit build``; None takes the recipe's value."""

    tag: str | None = flag(None, help="Tag of the image (default: RECIPE:latest).")
    base: str | None = flag(None, metavar="REF", help=BASE_HELP)
    program: Literal["docker", "apptainer"] = flag(
        "docker",
        "--with",
        help="docker: an engine makes an image. apptainer: Apptainer or Singularity makes a .sif; needs no "
        "Docker and no root.",
    )
    output: Path | None = flag(
        None,
        "--output",
        "-o",
        metavar="X.sif",
        help="Without Docker: file to write (default: RECIPE.sif here).",
    )
    base_from: str | None = flag(
        None,
        metavar="PATH|registry",
        help="Without Docker: an archive, an OCI folder or a .sif of the base (default: its registry).",
    )
    tmpdir: Path | None = flag(
        None,
        metavar="DIR",
        help="Without Docker: folder for temporary files, best on a large local disk (default: "
        "$IMGKIT_TMPDIR, $APPTAINER_TMPDIR, $SINGULARITY_TMPDIR, $TMPDIR, else next to the .sif).",
    )
    runtime: str | None = flag(
        None,
        "--runtime-command",
        metavar="COMMAND",
        help="Without Docker: name or path of the runtime (default: singularity, else apptainer).",
    )
    platform: str | None = flag(
        None, metavar="PLATFORM", help="linux/amd64 or linux/arm64, if the recipe allows both."
    )
    build_args: tuple[str, ...] = flag(
        (), "--build-arg", metavar="NAME=VALUE", help="Value for the recipe's image.args; repeatable."
    )
    locked: bool = flag(
        False, "--locked", help="Build from the recipe's lock; fail if there is none, or if it is stale."
    )
    no_lock: bool = flag(False, "--no-lock", help="Build without the recipe's lock.")
    no_cache: bool = flag(False, "--no-cache", help="Run every step again.")
    pull: bool = flag(False, "--pull", help="Pull the base even if it is local.")
    no_test: bool = flag(False, "--no-test", help="Skip the smoke test.")
    large: bool = flag(False, "--large", help="Do not ask for confirmation above 1 GB of code.")
    builder: Literal["auto", "classic", "buildx", "podman"] = flag(
        "auto",
        help="classic: the engine's API. buildx: docker buildx. podman: podman build. "
        "auto: podman for Podman, else classic.",
    )
    dry_run: bool = flag(False, "--dry-run", help="Print the plan and the Dockerfile; needs no Docker.")
    as_json: bool = flag(
        False, "--json", help="Print one JSON object on stdout, progress as JSON lines on stderr."
    )
    verbose: bool = flag(False, "--verbose", "-v", help="Show all output.")


class BuildCommand(OptionsCommand):
    """The verb ``build``, with `BuildOptions` in ``Context.obj``."""

    def owners(self, *, quiet: bool) -> list[type[Any]]:
        """One dataclass."""
        return [BuildOptions]

    def build(self, values: dict[type[Any], dict[str, Any]]) -> BuildOptions:
        """The options."""
        return BuildOptions(**values[BuildOptions])


COMMAND_CLASSES = {"build": BuildCommand}
"""The verb whose options are a value."""

NOT_WITH = {
    "docker": ("--output", "--base-from", "--tmpdir", "--runtime-command"),
    "apptainer": ("--tag", "--builder"),
}
"""Options that only the other program has."""


def verb_build(
    flags: typer.Context,
    recipe: str = typer.Argument(
        metavar="RECIPE|FILE",
        autocompletion=complete_names,
        help="A shipped recipe (imgkit list) or a .yaml file.",
    ),
) -> None:
    """Build the image of a recipe, then test it.

    A local base needs no network. The image is tagged last, so a failed build
    leaves the old image in place. The full log and the Dockerfile stay in
    $XDG_STATE_HOME/imgkit/builds.

    \b
    Examples:
      imgkit build mn5
      imgkit build ./mine.yaml --tag group/mine:1
      imgkit build ./mine.yaml --build-arg MAX_JOBS=4      (for image.args of the recipe)
      imgkit build ./mine.yaml --locked                    (see: imgkit lock)
      imgkit build mn5 --base imgkit.local/standin:24.03   (for tests)
      imgkit build olivia --dry-run                        (needs no Docker)
      imgkit build olivia --with apptainer                 (on a cluster: olivia.sif)
      imgkit build mn5 --with apptainer --base-from pytorch.tar
    """
    options: BuildOptions = flags.obj
    _refuse_others(options)
    run = _image if options.program == "docker" else _sif

    def attempt(large: bool) -> Answer:
        with terminable(), reporter(as_json=options.as_json, verbose=options.verbose) as report:
            return run(recipe, dataclasses.replace(options, large=large), report)

    text, data = with_leave(attempt, large=options.large, may_ask=not options.as_json)
    show_text(data, text, as_json=options.as_json)


def _refuse_others(options: BuildOptions) -> None:
    """Raise UsageError for an option that only the other program has."""
    for name in flags_in(options):
        if name in NOT_WITH[options.program]:
            raise UsageError(f"{name} cannot be used --with {options.program}", where=name, hint="omit it")


def _request(kind: type[_BuildKind], options: BuildOptions) -> _BuildKind:
    return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)})


def _image(recipe: str, options: BuildOptions, report: Reporter) -> Answer:
    request = _request(build.BuildRequest, options)
    if options.dry_run:
        return _image_plan(build.plan(recipe, request, report=report))
    built = build.build(recipe, request, report=report)
    # The next command takes the same argument, unless --tag gave the image another name.
    return _built_image(built, recipe, tag=options.tag)


def _image_plan(plan: ImagePlan) -> Answer:
    rows = {
        "recipe": f"{plan.recipe} ({plan.file})",
        "base": plan.base,
        "platform": plan.platform,
        "tag": plan.tag,
        "context": f"{plan.context_bytes} bytes",
    }
    data = {"schema": SCHEMA, "dry_run": True, **dataclasses.asdict(plan), "file": str(plan.file)}
    return _commented(rows) + plan.dockerfile.rstrip("\n"), data


def _commented(rows: dict[str, str]) -> str:
    return "".join(f"# {key:9} {shown(value)}\n" for key, value in rows.items())


def _next(recipe: str, tag: str | None, runtime: str) -> str:
    """The next command for an image that was built, as it is typed."""
    from imgkit_builder.workflow.names import stem

    again = shlex.quote(tag or recipe)
    if runtime == "kubernetes":
        return f"imgkit push {again} REGISTRY/{stem(tag or recipe)}:1"
    if runtime == "docker":
        named = f" --image {again}" if tag else ""
        return f"imgkit run {shlex.quote(recipe)}{named} -- dist-hello"
    return f"imgkit sif {again}     # for a cluster: imgkit save {again}"


def _built_image(built: BuiltImage, recipe: str, *, tag: str | None) -> Answer:
    from imgkit_builder.base import checks

    lines = [
        f"{built.tag}  {built.id}  {built.size_bytes / 1e6:.1f} MB  {built.platform}",
        f"next: {_next(recipe, tag, built.runtime)}",
    ]
    if built.standin:
        lines.insert(1, f"a STAND-IN: {built.base.name} has no NVIDIA software; for tests only")
    data = {
        "schema": SCHEMA,
        **dataclasses.asdict(built),
        "log": str(built.log),
        "checks": checks.to_dict(built.checks)["checks"],
    }
    return "\n".join(map(shown, lines)), data


def _sif(recipe: str, options: BuildOptions, report: Reporter) -> Answer:
    request = _request(build.SifBuildRequest, options)
    if options.dry_run:
        return _sif_plan(*build.plan_sif(recipe, request, report=report))
    built = build.build_sif(recipe, request, report=report)
    return _built_sif(built, options.output or Path(built.path.name))


def _sif_plan(request: SifRequest, planned: BuildPlan) -> Answer:
    base = planned.context.manifest.base
    rows = {
        "recipe": f"{request.recipe.name} ({request.recipe.file})",
        "base": f"{base.name}, from {request.base_from or 'its registry'}",
        "platform": base.platform,
        "target": str(request.target),
        "context": f"{planned.context.size_bytes} bytes",
        "run": planned.command,
    }
    data = {
        "schema": SCHEMA,
        "dry_run": True,
        "recipe": request.recipe.name,
        "base": base.name,
        "platform": base.platform,
        "sif": str(request.target),
        "context_bytes": planned.context.size_bytes,
        "commands": [planned.command],
        "definition": planned.definition.text,
    }
    return _commented(rows) + planned.definition.text.rstrip("\n"), data


def _built_sif(built: BuiltSif, target: Path) -> Answer:
    from imgkit_builder.base import checks

    record, base = built.record, built.base
    following = next_line(target, "dist-train")
    data = {
        "schema": SCHEMA,
        "sif": str(built.path),
        "id": record.image_id,
        "platform": base.platform,
        "size_bytes": built.size_bytes,
        "standin": base.standin,
        "base": {"name": base.name, "id": base.id, "digest": base.digest},
        "up_to_date": built.up_to_date,
        "record": dataclasses.asdict(record),
        "labels": dict(built.labels),
        "checks": checks.to_dict(built.checks)["checks"],
        "seconds": stage_seconds(built.stages),
        "log": str(built.log) if built.log else None,
        "next": following,
    }
    summary = f"{built.size_bytes / MB:.1f} MB  {built.arch}  {record.compression}, {record.runtime}"
    lines = [
        *stage_lines(built.stages),
        f"{target}  {summary}{'  up to date' if built.up_to_date else ''}",
        f"image  {record.image_id}",
        f"root   sha256:{record.root_sha256}",
        *([f"a STAND-IN: {base.name} has no NVIDIA software; for tests only"] if base.standin else []),
        f"next:  {following}",
    ]
    return "\n".join(map(shown, lines)), data
