"""Find the base image, check that it fits the recipe before a long build begins, and inspect it.

To inspect the base, its Python is run once, and reports the versions of Python, torch and NCCL. The result is
cached by image id.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base import files
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.engine import containers
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import ONE_PLATFORM_HINT
from imgkit_builder.engine.image_source import full_platform, pull_image
from imgkit_builder.engine.images import ImageInfo, can_choose_platform, check_name, find_image, repository
from imgkit_builder.image import inside
from imgkit_builder.oci.manifest import STANDIN_LABEL, BaseImage, Probe
from imgkit_builder.oci.platform import emulator_problem
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ImgkitError, ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.recipe.model import Recipe

STANDIN_HOST = "imgkit.local/"
"""The registry in the names of stand-ins. No such registry exists, so nothing can be pulled from it."""


def resolve_base(
    engine: Engine,
    recipe: Recipe,
    *,
    override: str | None = None,
    platform: str | None = None,
    pull: bool = False,
    report: Reporter = SILENT,
) -> BaseImage:
    """Find the base image, pull it if necessary, and check its architecture.

    A stand-in is a small image without NVIDIA's software, which replaces a base in imgkit's own tests. It is
    used only if the user names it with ``--base``.

    Parameters
    ----------
    override : the value of ``--base``, which replaces the base in the recipe.
    platform : the value of ``--platform``. The default is described at `choose_platform`.
    pull : whether to pull the base even if the engine already has it.

    Raises
    ------
    UsageError : the recipe does not allow the platform. Or the base does not exist, has another architecture,
        or is a stand-in that ``--base`` does not name.
    ToolMissing : the base has another architecture, and the engine has no emulator for it.
    ToolFailed : the registry cannot be reached.
    """
    name = override or recipe.image.base
    where = recipe.where("image", "base")
    check_name(name, where="--base" if override else where)
    target = choose_platform(recipe, requested=platform, host=engine.platform)
    image = None
    # A stand-in is in no registry, so --pull cannot update it.
    if name.startswith(STANDIN_HOST) or not pull:
        image = find_image(engine, name, platform=target)
    if image is None:
        image = _pull_base(engine, name, target, report, where=None if override else where)
    if image.platform != target:
        raise _make_other_platform_error(engine, image, name, target, recipe)
    if override is None:
        _refuse_standin(image, name, where)
    _refuse_without_emulator(engine, target)
    if image.manifest:
        # The engine keeps the base for several platforms. If the base is named by its tag, the classic
        # builder (docker 28.5) uses the platform that the engine prefers. So name it by its digest, and check
        # it again.
        exact = f"{repository(name)}@{image.manifest}"
        report.note(f"the engine keeps several platforms of {name}; the base for {target} is {exact}")
        return resolve_base(engine, recipe, override=exact, platform=target, report=report)
    return BaseImage(
        name=name,
        id=image.id,
        digest=image.digest,
        platform=image.platform,
        standin=STANDIN_LABEL in image.labels,
        env=dict(sorted(image.env.items())),
        user=image.user,
    )


def _pull_base(engine: Engine, name: str, target: str, report: Reporter, *, where: str | None) -> ImageInfo:
    """Pull the base `name` for the platform `target`.

    A base that cannot be pulled or cannot run is refused before. An error of the pull contains `where`, the
    line of the recipe with the base, and a hint for work without a network.
    """
    if name.startswith(STANDIN_HOST):
        raise UsageError(f"there is no local stand-in {name!r}", hint="create it: ci/lab/base-image")
    # Check this before the pull, which may download 20 GB that cannot run on this machine.
    _refuse_without_emulator(engine, target)
    try:
        return pull_image(engine, name, target, report)
    except ImgkitError as error:
        hint = "without a network, use a local base: --base NAME (list them: docker images)"
        if error.hint:
            hint = f"{error.hint}\n{hint}"
        # Keep the class of the error, because it determines the exit code of imgkit.
        raise type(error)(error.what, where=error.where or where, hint=hint) from error


def _refuse_standin(image: ImageInfo, name: str, where: str) -> None:
    """Raise UsageError if `image` is a stand-in. The recipe names it as the base `name`, at `where`."""
    if STANDIN_LABEL in image.labels:
        raise UsageError(
            f"the base {name!r} is a stand-in without NVIDIA's software",
            where=where,
            hint=f"to use it anyway: --base {name}; otherwise: docker rmi {name}, then build again to pull "
            "the real one",
        )


def choose_platform(recipe: Recipe, *, requested: str | None, host: str) -> str:
    """Return the platform to build for, such as ``linux/arm64``.

    Parameters
    ----------
    requested : the value of ``--platform``. If it is set, it is the result, in its long form.
    host : the platform of the engine. If nothing is requested, it is the result if the recipe allows it.
        Otherwise the first platform of the recipe is used.

    Raises
    ------
    UsageError : the recipe does not allow the requested platform.
    """
    platforms = recipe.image.platforms
    if requested is None:
        # The platform of the engine needs no emulator.
        if host in platforms:
            return host
        return platforms[0]
    platform = full_platform(requested)
    if platform not in platforms:
        raise UsageError(
            f"{recipe.name} is not for {requested!r}",
            where=recipe.where("image", "platform"),
            hint=f"it allows: {', '.join(platforms)}; omit --platform, or add the platform to the recipe",
        )
    return platform


def _make_other_platform_error(
    engine: Engine, image: ImageInfo, name: str, target: str, recipe: Recipe
) -> UsageError:
    """Return the error for a base `image` with the name `name` that is not for the platform `target`.

    imgkit must check the platform, because an engine does not. It would build an image for the wrong
    platform, or fail at the first step that runs a program.
    """
    hints = []
    is_standin = name.startswith(STANDIN_HOST)  # stand-ins cannot be pulled
    if not is_standin and can_choose_platform(engine):
        hints.append(f"docker pull --platform {target} {name}")
    elif not is_standin:
        hints.append(ONE_PLATFORM_HINT)
    hints.append(f"choose a {target} base: --base NAME")
    if image.platform in recipe.image.platforms:
        hints.append(f"build for its platform: --platform {image.platform}")
    return UsageError(
        f"the local image {name!r} is {image.platform}, the build is for {target}",
        where=recipe.where("image", "platform"),
        hint=", or ".join(hints),
    )


def _refuse_without_emulator(engine: Engine, target: str) -> None:
    """Raise ToolMissing if the engine's machine cannot run programs of the platform `target`.

    Without an emulator (qemu), the first step of the build would fail. If the engine is on another machine or
    in a virtual machine, its emulators are unknown, so nothing is refused.
    """
    # Docker Desktop runs containers on its own kernel, which has its own emulators.
    in_virtual_machine = "Docker Desktop" in str(engine.info.get("OperatingSystem", ""))
    if target == engine.platform or in_virtual_machine or not engine.facts().is_here:
        return
    _, _, arch = target.partition("/")
    problem = emulator_problem(arch)
    if problem:
        raise ToolMissing(
            f"{target} images cannot run on this {engine.platform} machine: {problem}",
            hint="sudo apt-get install qemu-user-static binfmt-support (they register binfmt handlers; in a "
            "container first: sudo mount -t binfmt_misc none /proc/sys/fs/binfmt_misc)",
        )


SCHEMA = 1


def probe(engine: Engine, base: BaseImage) -> Probe:
    """Run `base` once, and return its versions of Python, torch, CUDA and NCCL.

    If the base cannot run, `Probe.skipped` is the reason, and nothing is cached. Otherwise the result is
    cached, because importing torch takes seconds. The cache never becomes stale, because the content of an
    image id never changes.
    """
    digest = base.id.removeprefix("sha256:") or "unknown"
    path = files.cache_dir() / "probe" / f"{digest}.json"
    cached = _read_cached_probe(path)
    if cached is not None:
        return cached
    # An engine that names images by their manifests does not know the id, so there the name is used.
    ref = base.name
    if base.id and not engine.has_containerd_store:
        ref = base.id  # the tag may move to another image in the meantime
    finished = containers.run(engine, ref, inside.probe_argv(), platform=base.platform)
    versions = inside.parse_probe(finished.output)
    if versions is None:
        return Probe(skipped=_explain_probe_failure(engine, base, finished.returncode, finished.output))
    measured = Probe(
        python=versions.python,
        torch=versions.torch,
        cuda=versions.cuda,
        nccl=versions.nccl,
        pip_conflicts=versions.pip_conflicts or (),
    )
    cache_text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(measured)}, indent=2)
    files.write_cache(path, cache_text + "\n")
    return measured


def _read_cached_probe(path: Path) -> Probe | None:
    """Return the cached result of an earlier `probe`, or None if the file `path` does not contain one."""
    try:
        values = json_text.parse(files.read_own(path))
        if values.pop("schema") != SCHEMA:
            return None
        values["pip_conflicts"] = tuple(values["pip_conflicts"])
        return Probe(**values)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no earlier run, or a damaged file


def _explain_probe_failure(engine: Engine, base: BaseImage, returncode: int, output: str) -> str:
    """Return why the inspection program printed no versions in `base`, as text for people.

    `returncode` and `output` are those of the program.
    """
    if returncode == containers.NOT_FOUND:
        return "the base has no python3"
    if "exec format error" in output.lower():
        return f"the base is {base.platform}, but the engine runs {engine.platform} and has no emulator"
    lines = output.strip().splitlines()
    last_line = lines[-1] if lines else "no output"
    return f"python3 failed with exit code {returncode}: {last_line}"
