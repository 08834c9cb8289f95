"""``imgkit build --with apptainer``: a recipe becomes a tested .sif, without an engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.cli import build_lock
from imgkit_builder.cli.build_options import BuildOptions
from imgkit_builder.cli.common import show_text, tell_left_out, warning_lines, with_leave
from imgkit_builder.cli.conversion import MB, next_line, stage_lines, stage_seconds, terminable
from imgkit_builder.cli.progress import reporter
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.terminal import shown

if TYPE_CHECKING:
    from imgkit_builder.apptainer.build import BuildPlan, BuiltSif, SifRequest
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.image.context import BuildContext
    from imgkit_builder.oci.manifest import BaseImage
    from imgkit_builder.recipe import Recipe

SCHEMA = 1
Answer = tuple[str, dict[str, Any]]
"""The result for people, and for ``--json``."""


def run(typed: str, options: BuildOptions) -> None:
    """Build the recipe that the user calls `typed`, and print the result."""
    from imgkit_builder.recipe import portable

    recipe = portable.find(typed)

    def attempt(large: bool) -> Answer:
        with reporter(as_json=options.as_json, verbose=options.verbose) as report:
            for line in warning_lines(recipe.warnings):
                report.note(line)
            return build(recipe, dataclasses.replace(options, large=large), report)

    text, data = with_leave(attempt, large=options.large, may_ask=not options.as_json)
    show_text(data, text, as_json=options.as_json)


def build(recipe: Recipe, options: BuildOptions, report: Reporter) -> Answer:
    """Build or, with ``--dry-run``, say what would run.

    Raises
    ------
    ImgkitError : as `apptainer.build.build` does, and for what a definition cannot do.
    """
    from imgkit_builder.apptainer import build as builds
    from imgkit_builder.image.context import pack, revision
    from imgkit_builder.oci.platform import host_platform

    _refuse(recipe, options)
    recipe = build_lock.followed(recipe, host_platform(), options, report)
    if recipe.lock and not recipe.lock.base.digest and options.base_from in (None, "registry"):
        raise UsageError(
            f"the lock's base {recipe.lock.base.name} never was in a registry: only its id is known",
            where=recipe.where("image", "base"),
            hint="name its archive, OCI folder or .sif: --base-from PATH",
        )
    request = _request(recipe, options)

    def packed(base: BaseImage) -> BuildContext:
        build_lock.check_base(recipe, base)
        context = pack(
            recipe,
            base=base,
            platform=base.platform,
            revision=revision(recipe.file.parent),
            large=options.large,
            report=report,
        )
        tell_left_out(context.code, report)
        return context

    with terminable():
        if options.dry_run:
            return _plan(request, builds.plan(request, packed, report))
        return _result(builds.build(request, packed, report), request.target)


def _request(recipe: Recipe, options: BuildOptions) -> SifRequest:
    from imgkit_builder.apptainer.build import SifRequest
    from imgkit_builder.recipe.targets import module_line
    from imgkit_builder.sif.conversion import Options

    return SifRequest(
        recipe=recipe,
        target=options.output or Path(f"{recipe.name}.sif"),
        base=build_lock.base_of(recipe, options),
        base_from=options.base_from,
        options=Options(
            runtime=options.runtime,
            module_hint=module_line(recipe.system) or None,
            tmpdir=options.tmpdir,
            force=options.no_cache or options.pull,
            test=not options.no_test,
        ),
    )


def _refuse(recipe: Recipe, options: BuildOptions) -> None:
    """Raise UsageError for another platform than this machine's, and for secrets in a definition."""
    from imgkit_builder.oci.platform import host_platform

    host = host_platform()
    stated = options.platform or (host if host in recipe.image.platforms else recipe.image.platforms[0])
    if stated != host:
        raise UsageError(
            f"--with apptainer builds for this machine's platform, {host}, and not for {stated}",
            where="--platform" if options.platform else recipe.where("image", "platforms"),
            hint=f"run it on a machine of that kind, or build with Docker: imgkit build {recipe.name}",
        )
    if recipe.image.used_secrets:
        raise UsageError(
            "--with apptainer has no build secrets: a definition keeps what it says",
            where=recipe.where("image", "secrets"),
            hint=f"build with Docker: imgkit build {recipe.name}",
        )


def _plan(request: SifRequest, planned: BuildPlan) -> Answer:
    base = planned.base
    rows = {
        "recipe": f"{request.recipe.name} ({request.recipe.file})",
        "base": f"{base.name}, from {request.base_from or 'its registry'}",
        "platform": base.platform,
        "target": str(request.target),
        "context": f"{planned.context.size_bytes} bytes",
        "run": planned.command,
    }
    head = "".join(f"# {key:9} {shown(value)}\n" for key, value in rows.items())
    data = {
        "schema": SCHEMA,
        "dry_run": True,
        "recipe": request.recipe.name,
        "base": base.name,
        "platform": base.platform,
        "sif": str(request.target),
        "context_bytes": planned.context.size_bytes,
        "commands": [planned.command],
        "definition": planned.definition,
    }
    return head + planned.definition.rstrip("\n"), data


def _result(built: BuiltSif, target: Path) -> Answer:
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
    about = f"{built.size_bytes / MB:.1f} MB  {built.arch}  {record.compression}, {record.runtime}"
    lines = [
        *stage_lines(built.stages),
        f"{target}  {about}{'  up to date' if built.up_to_date else ''}",
        f"image  {record.image_id}",
        f"root   sha256:{record.root_sha256}",
        *([f"a STAND-IN: {base.name} has no NVIDIA software; for tests only"] if base.standin else []),
        f"next:  {following}",
    ]
    return "\n".join(map(shown, lines)), data
