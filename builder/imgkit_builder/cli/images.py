"""Images: build, test, shell, push, pull."""

from __future__ import annotations

import json
import os
import platform as host
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder import checks, smoke
from imgkit_builder.cli.reporter import reporter
from imgkit_entrypoints.errors import EXIT_NO, CheckFailed, ImgkitError, ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.checks import Check
    from imgkit_builder.context import BuildContext
    from imgkit_builder.engine import Built, Engine, ImageInfo
    from imgkit_builder.manifest import Base
    from imgkit_builder.recipe import Recipe
    from imgkit_builder.report import Reporter

SCHEMA = 1
_RECIPE = typer.Argument(metavar="RECIPE|FILE", help="A shipped recipe (imgkit list) or a .yaml file.")
_JSON = typer.Option(
    False, "--json", help="Print one JSON object on stdout, progress as JSON lines on stderr."
)
_VERBOSE = typer.Option(False, "--verbose", "-v", help="Show everything the engine says.")


def verb_build(
    recipe: str = _RECIPE,
    tag: str | None = typer.Option(None, help="Name of the image; without it RECIPE:latest."),
    base: str | None = typer.Option(
        None, metavar="REF", help="Build on this image, not on the recipe's base."
    ),
    platform: str | None = typer.Option(None, help="linux/amd64 or linux/arm64, where the recipe has both."),
    no_cache: bool = typer.Option(False, "--no-cache", help="Run every step again."),
    pull: bool = typer.Option(False, "--pull", help="Fetch the base even if it is here."),
    no_test: bool = typer.Option(False, "--no-test", help="Skip the smoke test."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be built; needs no engine."),
    as_json: bool = _JSON,
    verbose: bool = _VERBOSE,
) -> None:
    """Build the image of a recipe with the Docker engine, then test it.

    A base that is already here is used without any network. The image gets its name last: a build that fails
    leaves the old image as it was. The full log and the Dockerfile stay under $XDG_STATE_HOME/imgkit/builds.

    \b
    Examples:
      imgkit build mn5
      imgkit build ./mine.yaml --tag group/mine:1
      imgkit build mn5 --base imgkit.local/standin:24.03   # without NVIDIA's software, for tests
      imgkit build olivia --dry-run                        # only show the Dockerfile
    """
    from imgkit_builder.recipe.load import load

    loaded = load(recipe)
    with reporter(as_json=as_json, verbose=verbose) as report:
        for problem in loaded.warnings:
            report.note(f"warning: {problem}")
        if dry_run:
            text, data = _planned(loaded, tag=tag, base=base, platform=platform)
        else:
            text, data = _built(
                loaded,
                recipe,
                report,
                tag=tag,
                base=base,
                platform=platform,
                pull=pull,
                no_cache=no_cache,
                no_test=no_test,
            )
    print(json.dumps(data, indent=2) if as_json else text)


def _planned(
    recipe: Recipe, *, tag: str | None, base: str | None, platform: str | None
) -> tuple[str, dict[str, Any]]:
    from imgkit_builder.context import pack, revision
    from imgkit_builder.engine import choose_platform, default_tag
    from imgkit_builder.manifest import Base

    target = choose_platform(recipe, wanted=platform, host=_host_platform())
    name = base or recipe.image.base
    context = pack(
        recipe,
        base=Base(name=name, platform=target),
        platform=target,
        revision=revision(recipe.file.parent),
    )
    tag = tag or default_tag(recipe)
    rows = {
        "recipe": f"{recipe.name} ({recipe.file})",
        "base": name,
        "platform": target,
        "tag": tag,
        "context": f"{context.size_bytes} bytes",
    }
    head = "".join(f"# {key:9} {value}\n" for key, value in rows.items())
    data = {
        "schema": SCHEMA,
        "dry_run": True,
        "recipe": recipe.name,
        "base": name,
        "platform": target,
        "tag": tag,
        "context_bytes": context.size_bytes,
        "dockerfile": context.dockerfile,
    }
    return head + context.dockerfile.rstrip("\n"), data


def _host_platform() -> str:
    machine = host.machine().lower()
    arch = next((arch for arch, names in smoke.MACHINES.items() if machine in names), machine)
    return f"linux/{arch}"


def _built(
    recipe: Recipe,
    typed: str,
    report: Reporter,
    *,
    tag: str | None,
    base: str | None,
    platform: str | None,
    pull: bool,
    no_cache: bool,
    no_test: bool,
) -> tuple[str, dict[str, Any]]:
    import dataclasses

    from imgkit_builder import context as contexts
    from imgkit_builder import engine as engines

    name = tag or engines.default_tag(recipe)
    engines.check_name(name, where="--tag" if tag else None)
    with engines.connect() as engine:
        report.stage(f"base {base or recipe.image.base}")
        found = engines.resolve_base(
            engine, recipe, override=base, platform=platform, pull=pull, report=report
        )
        probe = engines.probe(engine, found)
        if probe.skipped:
            report.note(f"the base was not probed: {probe.skipped}")
        found = dataclasses.replace(found, probe=probe)
        report.stage("context")
        context = contexts.pack(
            recipe,
            base=found,
            platform=found.platform,
            revision=contexts.revision(recipe.file.parent),
        )
        tested: list[Check] = []

        def accept(image: ImageInfo) -> None:
            if not no_test:
                tested.extend(_smoke(engine, image, context, report))

        built = engines.build(engine, context, tag=name, report=report, no_cache=no_cache, accept=accept)
    # What was typed is what the next command takes too, unless the image has a name of its own.
    return _result(built, found, tested, again=typed if tag is None else tag)


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


def _result(built: Built, base: Base, tested: Sequence[Check], *, again: str) -> tuple[str, dict[str, Any]]:
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
    return "\n".join(lines), data


def verb_test(
    image: str = typer.Argument(metavar="IMAGE|SIF|RECIPE", help="A local image, a .sif file or a recipe."),
    as_json: bool = _JSON,
    runtime: str | None = typer.Option(None, metavar="COMMAND", help="singularity or apptainer, for a .sif."),
) -> None:
    """Run the smoke test in an image or .sif; exit code 1 if a check fails.

    Architecture, Python, torch and NCCL as in the base, no new pip conflict, imgkit's own files, dist-env.

    \b
    Examples:
      imgkit test mn5
      imgkit test mn5.sif --json
    """
    with reporter(as_json=as_json) as report:
        report.stage(f"smoke test of {image}")
        results = _test_sif(Path(image), runtime) if _is_file(image) else _test_image(_image_name(image))
    print(json.dumps(checks.to_dict(results, image=image), indent=2) if as_json else checks.table(results))
    if not checks.passed(results):
        raise typer.Exit(EXIT_NO)


def _test_image(name: str) -> tuple[Check, ...]:
    from imgkit_builder import engine as engines

    with engines.connect() as engine:
        info = engines.inspect(engine, name)
        return smoke.check(
            lambda argv: engines.run(engine, info.id, argv),
            arch=info.platform.partition("/")[2],
            manifest=None,
        )


def _test_sif(path: Path, runtime: str | None) -> tuple[Check, ...]:
    from imgkit_builder import process
    from imgkit_builder.sif import image as sif_image
    from imgkit_builder.sif.runtime import exec_argv, find_runtime

    if not sif_image.is_sif(path):
        raise UsageError(f"{path} is no .sif", hint=f"an archive is checked by: imgkit verify {path}")
    arch = sif_image.read(path).arch
    tool = find_runtime(runtime)
    return smoke.check(
        lambda argv: process.run(exec_argv(tool, path, argv), check=False), arch=arch, manifest=None
    )


def verb_shell(
    image: str = typer.Argument(metavar="IMAGE|SIF|RECIPE", help="A local image, a .sif file or a recipe."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only print the command."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show the image's facts first."),
) -> None:
    """Open a shell in an image or .sif, with the options that distributed PyTorch needs.

    \b
    Examples:
      imgkit shell mn5
      imgkit shell mn5.sif
      imgkit shell mn5 --dry-run
    """
    argv = _sif_shell(Path(image)) if _is_file(image) else _docker_shell(image, verbose=verbose)
    if dry_run:
        print(shlex.join(argv))
        return
    print(f"imgkit: {shlex.join(argv)}", file=sys.stderr, flush=True)
    if shutil.which(argv[0]) is None:
        raise ToolMissing(
            f"the program {argv[0]!r} is not on PATH", hint="sudo apt-get install docker-cli (or docker.io)"
        )
    os.execvp(argv[0], argv)  # noqa: S606 - an argv list, no shell; the terminal now belongs to that program


def _docker_shell(target: str, *, verbose: bool) -> list[str]:
    from imgkit_builder import engine as engines

    name = _image_name(target)
    with engines.connect() as engine:
        info = engines.inspect(engine, name)
        recipe = _recipe_of(target, info.labels)
        gpus = recipe is not None and recipe.system.node.gpus > 0 and engine.has_nvidia
    if verbose:
        print(engines.image_facts(name).to_text(), file=sys.stderr)
    return engines.shell_argv(name, gpus=gpus)


def _sif_shell(path: Path) -> list[str]:
    from imgkit_builder.sif.runtime import find_runtime

    # The recipe of a .sif is found by the file's name: mn5.sif is mn5's.
    recipe = _recipe_of(path.stem, {})
    runtime = recipe.system.runtime if recipe else None
    words = [str(find_runtime().path), "shell", "--nv"]
    for option in runtime.options if runtime else ():
        if option not in words:
            words.append(option)
    for bind in runtime.binds if runtime else ():
        words += ["--bind", bind]
    return [*words, str(path.absolute())]


def _recipe_of(target: str, labels: Mapping[str, str]) -> Recipe | None:
    """The recipe that `target` names or that the image says it was made from; None if it is not at hand."""
    from imgkit_builder.recipe.load import load

    for ref in (target, labels.get("imgkit.recipe", "")):
        if ref:
            try:
                return load(ref)
            except ImgkitError:
                continue
    return None


def verb_push(
    image: str = typer.Argument(metavar="IMAGE|RECIPE", help="What to send."),
    ref: str | None = typer.Argument(
        None, metavar="[REF]", help="Under which name: registry/group/name:tag."
    ),
    as_json: bool = _JSON,
    verbose: bool = _VERBOSE,
) -> None:
    """Send an image to a registry; prints its digest.

    \b
    Examples:
      imgkit push mn5 ghcr.io/group/mn5:1
      imgkit push registry.example.org/group/mn5:1
    """
    from imgkit_builder import engine as engines

    name = _image_name(image)
    with reporter(as_json=as_json, verbose=verbose) as report, engines.connect() as engine:
        if ref is not None:
            engines.add_tag(engine, name, ref)
        target = ref or name
        digest = engines.push(engine, target, report)
    data = {"schema": SCHEMA, "ref": target, "digest": digest}
    print(json.dumps(data, indent=2) if as_json else f"{target}  {digest}")


def verb_pull(
    ref: str = typer.Argument(metavar="REF", help="registry/group/name:tag or ...@sha256:..."),
    platform: str | None = typer.Option(
        None, help="linux/amd64 or linux/arm64; without it the engine's own."
    ),
    as_json: bool = _JSON,
    verbose: bool = _VERBOSE,
) -> None:
    """Fetch an image from a registry; prints its id and digest.

    \b
    Examples:
      imgkit pull nvcr.io/nvidia/pytorch:24.03-py3
      imgkit pull nvcr.io/nvidia/pytorch:25.05-py3 --platform linux/arm64
    """
    from imgkit_builder import engine as engines

    with reporter(as_json=as_json, verbose=verbose) as report, engines.connect() as engine:
        info = engines.pull(engine, ref, platform, report)
    data = {
        "schema": SCHEMA,
        "ref": ref,
        "id": info.id,
        "digest": info.digest,
        "platform": info.platform,
        "size_bytes": info.size_bytes,
    }
    text = f"{ref}  {info.id}  {info.size_bytes / 1e6:.1f} MB  {info.platform}  {info.digest}".rstrip()
    print(json.dumps(data, indent=2) if as_json else text)


def _is_file(target: str) -> bool:
    """Whether `target` is a .sif file rather than an image or recipe."""
    if target.endswith((".yaml", ".yml")):
        return False
    if Path(target).is_file():
        return True
    if target.endswith(".sif"):
        raise UsageError(f"there is no file {target}", hint=f"make it: imgkit sif {Path(target).stem}")
    return False


def _image_name(target: str) -> str:
    """The image that `target` means: a recipe's file has a default name, a shipped recipe the same name."""
    if not target.endswith((".yaml", ".yml")):
        return target
    from imgkit_builder.engine import default_tag
    from imgkit_builder.recipe.load import load

    return default_tag(load(target))
