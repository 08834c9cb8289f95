"""Verbs for built images: test, shell, push, pull."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from imgkit_builder.cli.common import (
    JSON,
    RECIPE_SUFFIXES,
    VERBOSE,
    complete_names,
    image_name,
    module_line,
    show,
)
from imgkit_builder.cli.progress import reporter
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, ImgkitError, ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.checks import Check
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.recipe import Recipe
    from imgkit_builder.recipe.targets import Target

SCHEMA = 1
_NOTHING_SHARED = "no folder of this machine, no network"
_SHARED = "a shell runs in the image, with this machine's network, and for a .sif its home folder"


def verb_test(
    image: str = typer.Argument(
        metavar="IMAGE|SIF|RECIPE",
        autocompletion=complete_names,
        help="A local image, a .sif file or a recipe.",
    ),
    as_json: bool = JSON,
    runtime: str | None = typer.Option(
        None, metavar="COMMAND", help="Runtime for a .sif: singularity or apptainer."
    ),
) -> None:
    """Run the smoke test in an image or .sif.

    Checks the architecture, Python, torch and NCCL (as in the base), new pip
    conflicts, imgkit's own files and dist-env. Exit code 1 if a check fails.

    \b
    Examples:
      imgkit test mn5
      imgkit test mn5.sif --json
    """
    from imgkit_builder.base import checks

    with reporter(as_json=as_json) as report:
        report.stage(f"smoke test of {image}")
        if _is_file(image):
            results = _test_sif(Path(image), runtime, report)
        else:
            report.note(f"python3 runs in the image: {_NOTHING_SHARED}")
            results = _test_image(image_name(image))
    show(checks.to_dict(results, image=image), *checks.table(results), as_json=as_json)
    if not checks.passed(results):
        raise typer.Exit(EXIT_NO)


def _test_image(name: str) -> tuple[Check, ...]:
    from imgkit_builder import engine as engines
    from imgkit_builder.image import smoke

    with engines.connect() as engine:
        info = engines.inspect(engine, name)
        return smoke.check(
            lambda argv: engines.run(engine, info.ref, argv, platform=info.platform),
            arch=info.platform.partition("/")[2],
            manifest=None,
        )


def _test_sif(path: Path, runtime: str | None, report: Reporter) -> tuple[Check, ...]:
    from imgkit_builder.base import process
    from imgkit_builder.image import smoke
    from imgkit_builder.sif import image as sif_image
    from imgkit_builder.sif.runtime import exec_arguments, find_runtime, isolation

    if not sif_image.is_sif(path):
        raise UsageError(f"{path} is not a .sif", hint=f"to check an archive: imgkit verify {path}")
    arch = sif_image.read(path).arch
    target = _target_of(path)
    tool = find_runtime(runtime, module_hint=module_line(target.system if target else None))
    isolated = isolation(tool)
    report.note(isolated.said("python3"))
    return smoke.check(
        lambda argv: process.run([str(tool.path), *exec_arguments(path, argv, isolated)], check=False),
        arch=arch,
        manifest=None,
    )


def verb_shell(
    image: str = typer.Argument(
        metavar="IMAGE|SIF|RECIPE",
        autocompletion=complete_names,
        help="A local image, a .sif file or a recipe.",
    ),
    host: bool = typer.Option(
        False,
        "--host",
        help="Share this machine's home folder, network and the recipe's binds, as a job does.",
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the command and stop."),
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="First print what imgkit knows about the image."
    ),
) -> None:
    """Open a shell in an image or .sif, without this machine's home folder and network.

    \b
    Examples:
      imgkit shell mn5
      imgkit shell mn5.sif --host
      imgkit shell mn5 --dry-run
    """
    opened = _sif_shell if _is_file(image) else functools.partial(_image_shell, verbose=verbose)
    argv, reach = opened(image, host=host)
    if dry_run:
        terminal.out(shlex.join(argv))
        return
    terminal.err(f"imgkit: {reach}", f"imgkit: {shlex.join(argv)}")
    if shutil.which(argv[0]) is None:
        raise ToolMissing(
            f"the program {argv[0]!r} is not on PATH", hint="sudo apt-get install docker-cli (or docker.io)"
        )
    os.execvp(argv[0], argv)  # noqa: S606 - an argv list, no shell; the terminal now belongs to that program


def _image_shell(target: str, *, host: bool, verbose: bool) -> tuple[list[str], str]:
    try:
        return _docker_shell(target, host=host, verbose=verbose)
    except ToolMissing:
        # A cluster has no engine: there the name means the .sif made from the image.
        beside = Path(f"{target}.sif")
        if not beside.is_file():
            raise
        return _sif_shell(str(beside), host=host)


def _docker_shell(target: str, *, host: bool, verbose: bool) -> tuple[list[str], str]:
    from imgkit_builder import engine as engines

    name = image_name(target)
    with engines.connect() as engine:
        info = engines.inspect(engine, name)
        recipe = _recipe_of(target, info.labels)
        gpus = recipe is not None and recipe.system.node.gpus > 0 and engine.has_nvidia
    if verbose:
        terminal.err(*engines.image_facts(name).lines())
    argv = engines.shell_argv(name, gpus=gpus, host=host, place=engine.endpoint)
    return argv, _SHARED if host else f"a shell runs in the image: {_NOTHING_SHARED}"


def _sif_shell(path: str, *, host: bool) -> tuple[list[str], str]:
    from imgkit_builder.sif.runtime import find_runtime, isolation

    target = _target_of(Path(path))
    runtime = target.system.runtime if target else None
    tool = find_runtime(module_hint=module_line(target.system if target else None))
    isolated = None if host else isolation(tool)
    words = [str(tool.path), "shell", "--nv"]
    for option in (*(isolated.options if isolated else ()), *(runtime.options if runtime else ())):
        if option not in words:
            words.append(option)
    for bind in runtime.binds if runtime and host else ():
        words += ["--bind", bind]
    reach = isolated.said("a shell") if isolated else _SHARED
    return [*words, str(Path(path).absolute())], reach


def _target_of(path: Path) -> Target | None:
    """The system that a .sif is for, by its file name (mn5.sif); None for an unknown name."""
    from imgkit_builder.recipe import targets

    try:
        return targets.find(path.stem)
    except UsageError:
        return None


def _recipe_of(target: str, labels: Mapping[str, str]) -> Recipe | None:
    """The recipe called `target` or the one in the image's labels; None if neither is available."""
    from imgkit_builder.recipe.load import load

    for ref in (target, labels.get("imgkit.recipe", "")):
        if ref:
            try:
                return load(ref)
            except ImgkitError:
                continue
    return None


def verb_push(
    image: str = typer.Argument(
        metavar="IMAGE|RECIPE", autocompletion=complete_names, help="The image to send."
    ),
    ref: str | None = typer.Argument(
        None, metavar="[REF]", help="Its name in the registry: registry/group/name:tag."
    ),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Send an image to a registry and print its digest.

    \b
    Examples:
      imgkit push mn5 ghcr.io/group/mn5:1
      imgkit push registry.example.org/group/mn5:1
    """
    from imgkit_builder import engine as engines

    name = image_name(image)
    with reporter(as_json=as_json, verbose=verbose) as report, engines.connect() as engine:
        if ref is not None:
            engines.add_tag(engine, name, ref)
        target = ref or name
        digest = engines.push(engine, target, report)
    data = {"schema": SCHEMA, "ref": target, "digest": digest}
    show(data, f"{target}  {digest}", as_json=as_json)


def verb_pull(
    ref: str = typer.Argument(metavar="REF", help="registry/group/name:tag or ...@sha256:..."),
    platform: str | None = typer.Option(None, help="linux/amd64 or linux/arm64 (default: the engine's own)."),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Fetch an image from a registry and print its digest.

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
    show(data, text, as_json=as_json)


def _is_file(target: str) -> bool:
    """Whether `target` is a .sif file rather than an image or recipe."""
    if target.endswith(RECIPE_SUFFIXES):
        return False
    if Path(target).is_file():
        return True
    if target.endswith(".sif"):
        raise UsageError(f"there is no file {target}", hint=f"create it: imgkit sif {Path(target).stem}")
    return False
