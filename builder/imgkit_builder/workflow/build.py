"""Build a recipe and test the result: an image with an engine, or a .sif with Singularity or Apptainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder import engine as engines
from imgkit_builder.apptainer import build as builds
from imgkit_builder.apptainer.build import SifRequest
from imgkit_builder.base import checks
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.image import secret_values, smoke
from imgkit_builder.image.context import code_revision, input_sha256, pack_context, whole_project_notes
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.oci.platform import host_platform
from imgkit_builder.recipe import bases, lock_file, sources
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import shorten_path, warning_lines
from imgkit_builder.recipe.targets import module_line
from imgkit_builder.sif.conversion import Options
from imgkit_builder.workflow.build_record import record_build
from imgkit_builder.workflow.build_request import AnyBuildRequest, BuildRequest, SifBuildRequest
from imgkit_builder.workflow.names import default_tag
from imgkit_entrypoints.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from imgkit_builder.apptainer.build import BuiltSif, Pack
    from imgkit_builder.engine import ChosenBuilder, Engine, ImageInfo
    from imgkit_builder.image.context import BuildContext
    from imgkit_builder.image.members import PackedCode
    from imgkit_builder.image.secret_values import SecretValues
    from imgkit_builder.recipe.model import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltBase:
    """The base image of a build."""

    name: str
    id: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """An image that was built in the engine. It has passed its smoke test, unless the test was skipped."""

    id: str
    tag: str
    up_to_date: bool
    """Whether the tag named this image before. Every step of the build then came from the engine's cache."""
    platform: str
    size_bytes: int
    standin: bool
    """Whether the base is a stand-in, a small image for tests without NVIDIA software."""
    base: BuiltBase
    locked: bool
    """Whether the image was built from the recipe's lock."""
    runtime: str
    """The kind of runtime of the recipe's system: ``singularity``, ``docker`` or ``kubernetes``."""
    log: Path
    input_sha256: str
    """The digest of the input of the build; see `ImagePlan`."""
    labels: Mapping[str, str]
    checks: tuple[Check, ...] = ()
    """The checks of the smoke test. Empty if the test was skipped, or if the image had passed it before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """The plan of a build with an engine, as a dry run prints it."""

    recipe: str
    file: Path
    base: str
    platform: str
    tag: str
    context_bytes: int
    input_sha256: str
    """The digest of the build context and of the base's name.

    Builds of the same input have the same digest.
    """
    dockerfile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SifPlan:
    """The plan of a build with Singularity or Apptainer, as a dry run prints it."""

    recipe: str
    file: Path
    base: str
    base_from: str
    platform: str
    sif: Path
    context_bytes: int
    command: str
    definition: str


def build(
    recipe: str | Path, request: BuildRequest = BuildRequest(), *, report: Reporter = SILENT
) -> BuiltImage:
    """Build the image of `recipe` with Docker or Podman, and test it.

    `recipe` is a shipped name or a file. The engine (Docker or Podman) reuses every step that is in its
    cache. The image gets its tag last. So after a failed build or test, the tag still names the old image.

    Raises
    ------
    UsageError : the recipe or the request is wrong.
    LargeContext : the code has more than 1 GB, and the request does not allow that.
    ToolMissing : there is no engine.
    ToolFailed : a step failed.
    CheckFailed : the smoke test failed.
    """
    loaded_recipe = _load_recipe(recipe, request, report)
    secrets = secret_values.read_secrets(loaded_recipe)
    tag = request.tag or default_tag(loaded_recipe.name)
    engines.check_name(tag, where="--tag")
    with engines.connect() as engine:
        builder = _choose_builder(engine, loaded_recipe, request, secrets)
        # The platform and the lock must be known before the base is resolved. A lock has a section for each
        # platform, and names the base by its digest.
        target = engines.choose_platform(loaded_recipe, requested=request.platform, host=engine.platform)
        loaded_recipe = _attach_lock(loaded_recipe, target, request, report)
        base = _resolve_base(engine, loaded_recipe, request, report)
        report.stage("context")
        context = _pack_context(loaded_recipe, base, request, report)
        # A secret in a file of the context would become part of the image.
        secret_values.refuse_secrets_in(context, secrets)
        test_checks: list[Check] = []

        # The engine calls this before it moves the tag, so that a failed test leaves the tag where it is.
        def accept(image: ImageInfo) -> None:
            if not request.no_test:
                test_checks.extend(_run_smoke_test(engine, image, context, report))

        built = engines.build(
            engine,
            context,
            tag=tag,
            report=report,
            builder=builder,
            mask=secrets.mask,
            no_cache=request.no_cache,
            accept=accept,
        )
    # The digest lets a later job find this image without a question to the engine.
    base_name = _choose_base_name(loaded_recipe, request) or loaded_recipe.image.base
    build_input_sha256 = input_sha256(loaded_recipe, context, base_name)
    record_build(build_input_sha256, built.image.id)
    if built.up_to_date:
        report.note(f"{built.tag} is up to date: the engine's cache has every step (to run them: --no-cache)")
    return BuiltImage(
        id=built.image.id,
        tag=built.tag,
        up_to_date=built.up_to_date,
        platform=built.image.platform,
        size_bytes=built.image.size_bytes,
        standin=base.standin,
        base=BuiltBase(name=base.name, id=base.id, digest=base.digest),
        locked=loaded_recipe.lock is not None,
        runtime=loaded_recipe.system.runtime.kind,
        log=built.log,
        input_sha256=build_input_sha256,
        labels=dict(built.image.labels),
        checks=tuple(test_checks),
    )


def _choose_builder(
    engine: Engine, recipe: Recipe, request: BuildRequest, secrets: SecretValues
) -> ChosenBuilder:
    """Return the builder to use, with the options that pass `secrets` to the steps of the build."""
    # The line of the recipe to name if the builder cannot pass on secrets.
    secrets_at = recipe.where("image", "secrets") if secrets.options else ""
    builder = engines.choose(engine.facts(), request.builder, secrets_at=secrets_at)
    return dataclasses.replace(builder, options=secrets.options)


def _resolve_base(engine: Engine, recipe: Recipe, request: BuildRequest, report: Reporter) -> BaseImage:
    """Return the base image of a build, with the versions of the software in it. Pull it if necessary.

    Raises
    ------
    CheckFailed : the image differs from the one in the recipe's lock.
    ToolFailed : the image cannot be pulled.
    """
    # The base in the recipe's lock, or that of --base. None if there is neither.
    override = _choose_base_name(recipe, request)
    base_name = override or recipe.image.base
    report.stage(f"base {base_name}")
    base = engines.resolve_base(
        engine, recipe, override=override, platform=request.platform, pull=request.pull, report=report
    )
    _check_base(recipe, base)  # before any program runs in the base
    # A sentence that says why the image seems to be for AMD GPUs. Empty if it does not.
    evidence = bases.amd_image_evidence(base_name, base.env)
    if evidence:
        report.note(f"warning: {bases.amd_warning(evidence)[0]}")
    probe = engines.probe(engine, base)
    if probe.skipped:
        report.note(f"the base could not be probed: {probe.skipped}")
    # The versions become part of the manifest in the image.
    return dataclasses.replace(base, probe=probe)


def plan(
    recipe: str | Path, request: BuildRequest = BuildRequest(), *, report: Reporter = SILENT
) -> ImagePlan:
    """Return what `build` would do, for a dry run. This does not need Docker or Podman.

    Raises
    ------
    UsageError : the recipe or the request is wrong.
    LargeContext : the code has more than 1 GB, and the request does not allow that.
    """
    loaded_recipe = _load_recipe(recipe, request, report)
    # The engine is not asked, so this machine's platform is the default. The lock differs by platform, so the
    # platform must be known first.
    target = engines.choose_platform(loaded_recipe, requested=request.platform, host=host_platform())
    loaded_recipe = _attach_lock(loaded_recipe, target, request, report)
    base = _choose_base_name(loaded_recipe, request) or loaded_recipe.image.base
    tag = request.tag or default_tag(loaded_recipe.name)
    engines.check_name(base, where="--base")
    engines.check_name(tag, where="--tag")
    context = _pack_context(loaded_recipe, BaseImage(name=base, platform=target), request, report)
    return ImagePlan(
        recipe=loaded_recipe.name,
        file=loaded_recipe.file,
        base=base,
        platform=target,
        tag=tag,
        context_bytes=context.size_bytes,
        input_sha256=input_sha256(loaded_recipe, context, base),
        dockerfile=context.dockerfile,
    )


def _run_smoke_test(
    engine: Engine, image: ImageInfo, context: BuildContext, report: Reporter
) -> Sequence[Check]:
    """Run the smoke test in `image` (short programs that check Python and torch), and return its checks.

    If the image has passed the test before, the test is skipped and the result is empty.

    Raises
    ------
    CheckFailed : a check failed.
    """
    # An image id always stands for the same content, so a test that was passed stays passed.
    if smoke.has_passed(image.id):
        report.note("smoke test: skipped, this image has passed it before")
        return ()
    report.stage("smoke test")
    test_results = smoke.check_image(
        lambda argv: engines.run(engine, image.ref, argv, platform=image.platform),
        arch=image.platform.partition("/")[2],
        manifest=context.manifest,
    )
    if not checks.passed(test_results):
        failed_checks = "\n".join(checks.table(test_results))
        raise CheckFailed(
            "the image was built, but its smoke test failed; an older image keeps the name",
            hint=f"{failed_checks}\nlook inside: docker run --rm -it {image.ref} bash; to name it anyway: "
            "--no-test",
        )
    # Later builds that result in the same image then skip the test.
    smoke.record_pass(image.id)
    return test_results


def build_sif(
    recipe: str | Path, request: SifBuildRequest = SifBuildRequest(), *, report: Reporter = SILENT
) -> BuiltSif:
    """Build the .sif of `recipe` with Singularity or Apptainer, and test it.

    Neither an engine nor root is needed.

    Raises
    ------
    UsageError : the recipe or the request is wrong, or a definition file cannot do what the recipe asks for.
    LargeContext : the code has more than 1 GB, and the request does not allow that.
    ToolMissing : there is no runtime.
    ToolFailed : a step failed.
    CheckFailed : the smoke test failed.
    """
    sif_request, pack_context = _prepare_sif_build(recipe, request, report)
    return builds.build_sif(sif_request, pack_context, report)


def plan_sif(
    recipe: str | Path, request: SifBuildRequest = SifBuildRequest(), *, report: Reporter = SILENT
) -> SifPlan:
    """Return what `build_sif` would do, for a dry run, with its command and definition file.

    Raises
    ------
    UsageError : the recipe or the request is wrong, or a definition file cannot do what the recipe asks for.
    LargeContext : the code has more than 1 GB, and the request does not allow that.
    ToolMissing : there is no runtime.
    """
    sif_request, pack_context = _prepare_sif_build(recipe, request, report)
    build_plan, command = builds.plan_build(sif_request, pack_context, report)
    base = build_plan.context.manifest.base
    return SifPlan(
        recipe=sif_request.recipe.name,
        file=sif_request.recipe.file,
        base=base.name,
        base_from=request.base_from or "its registry",
        platform=base.platform,
        sif=sif_request.target,
        context_bytes=build_plan.context.size_bytes,
        command=command,
        definition=build_plan.definition,
    )


def _prepare_sif_build(
    recipe: str | Path, request: SifBuildRequest, report: Reporter
) -> tuple[SifRequest, Pack]:
    """Return the two arguments of `apptainer.build.build_sif`: a request, and a function.

    The function packs the build context, the files that the build gets. The context depends on the base
    image, which `build_sif` looks up first. So `build_sif` calls the function once the base is known.
    """
    loaded_recipe = _load_recipe(recipe, request, report)
    _refuse_for_sif(loaded_recipe, request)
    # A definition file is always built for this machine's platform.
    locked = _attach_lock(loaded_recipe, host_platform(), request, report)
    _refuse_local_base(locked, request)  # needs the lock

    def pack_context(base: BaseImage) -> BuildContext:
        _check_base(locked, base)
        return _pack_context(locked, base, request, report)

    options = Options(
        runtime=request.runtime,
        compression=locked.system.runtime.compression,
        module_hint=module_line(locked.system),
        tmpdir=request.tmpdir,
        test=not request.no_test,
    )
    sif_request = SifRequest(
        recipe=locked,
        target=request.output or Path(f"{locked.name}.sif"),
        base=_choose_base_name(locked, request),
        base_from=request.base_from,
        options=options,
    )
    return sif_request, pack_context


def _refuse_local_base(recipe: Recipe, request: SifBuildRequest) -> None:
    """Raise UsageError if the base in the recipe's lock would have to be pulled, but was never in a registry.

    Such a base existed only in the engine of the machine on which the lock was made.
    """
    # Without --base-from, the runtime pulls the base from its registry. Otherwise it is on this machine.
    is_pulled = request.base_from in (None, "registry")
    if is_pulled and recipe.lock and not recipe.lock.base.digest:
        raise UsageError(
            f"the lock's base {recipe.lock.base.name} was never in a registry: only its id is known",
            where=recipe.where("image", "base"),
            hint="name its archive, OCI folder or .sif: --base-from PATH",
        )


def _refuse_for_sif(recipe: Recipe, request: SifBuildRequest) -> None:
    """Raise UsageError for a build that Singularity and Apptainer cannot do.

    They build only for this machine's platform. They also have no build secrets, because a definition file
    would store a secret in the image.
    """
    if request.platform:
        _refuse_other_platform((request.platform,), "--platform", recipe.name)
    else:
        _refuse_other_platform(recipe.image.platforms, recipe.where("image", "platform"), recipe.name)
    if recipe.image.used_secrets:
        raise UsageError(
            "--with apptainer has no build secrets: a definition file would store them",
            where=recipe.where("image", "secrets"),
            hint=f"build with Docker: imgkit build {recipe.name}",
        )


def _refuse_other_platform(platforms: Sequence[str], where: str, recipe: str) -> None:
    """Raise UsageError if this machine's platform is not one of `platforms`.

    `where` is the position of the setting, such as a line of the recipe, for the message.
    """
    host = host_platform()
    if host not in platforms:
        raise UsageError(
            f"--with apptainer builds for this machine's platform, {host}, and not for {platforms[0]}",
            where=where,
            hint=f"run it on a machine of that kind, or build with Docker: imgkit build {recipe}",
        )


def _load_recipe(recipe: str | Path, request: AnyBuildRequest, report: Reporter) -> Recipe:
    """Load the recipe of a build, and report its warnings.

    Raises
    ------
    UsageError : the recipe has problems, or ``--locked`` and ``--no-lock`` are both given.
    """
    if request.locked and request.no_lock:
        raise UsageError("--locked cannot be combined with --no-lock", where="--no-lock")
    loaded_recipe = load(str(recipe), build_args=request.build_args)
    for line in warning_lines(loaded_recipe.warnings):
        report.note(line)
    return loaded_recipe


def _pack_context(
    recipe: Recipe, base: BaseImage, request: AnyBuildRequest, report: Reporter
) -> BuildContext:
    """Pack the build context for `base`, and report which files of the recipe's code are left out."""
    context = pack_context(
        recipe,
        base=base,
        platform=base.platform,
        revision=code_revision(recipe),
        large=request.large,
        report=report,
    )
    for note in whole_project_notes(recipe):
        report.note(note)
    _report_left_out_files(context.code, report)
    return context


def _attach_lock(recipe: Recipe, platform: str, request: AnyBuildRequest, report: Reporter) -> Recipe:
    """Return `recipe` with its lock, which lists the exact version of each package of the image.

    With ``--no-lock``, or if the lock is attached already, the recipe is returned unchanged. If there is no
    lock file, the result has no lock. Otherwise the path of the lock file and the number of its packages are
    reported.

    Raises
    ------
    UsageError : the lock cannot be read, or is stale because the recipe has changed since, or ``--locked`` is
        given and there is no lock.
    """
    if request.no_lock or recipe.lock:
        return recipe
    chosen_base = bases.select_base(request.base, recipe)
    locked_recipe = lock_file.attach_lock(
        recipe, platform=platform, base=chosen_base, required=request.locked
    )
    lock = locked_recipe.lock
    if lock is None:  # there is no lock file
        return locked_recipe
    file = shorten_path(lock_file.lock_path(recipe))
    counts = f"{len(lock.apt)} apt and {len(lock.pip)} pip packages"
    if locked_recipe.kept:  # wheels that no index has, in a folder beside the lock
        counts += f", {len(locked_recipe.kept)} of them kept here"
    report.note(f"locked: {file}, {counts} (to ignore it: --no-lock)")
    return locked_recipe


def _choose_base_name(recipe: Recipe, request: AnyBuildRequest) -> str | None:
    """Return the name of the base image to use, or None for the base that the recipe names.

    If the recipe has a lock, the digest in the lock takes precedence over ``--base``.
    """
    # The base in a lock has no digest if it was never in a registry.
    if recipe.lock and recipe.lock.base.digest:
        return recipe.lock.base.exact
    return bases.select_base(request.base, recipe)


def _check_base(recipe: Recipe, base: BaseImage) -> None:
    """Raise CheckFailed if `base` is not the image that is in the recipe's lock.

    The locked packages were chosen for that image, and may not fit another one.
    """
    if recipe.lock is None:
        return
    # The id of a base in a registry is empty until it has been pulled.
    locked_id = recipe.lock.base.id
    if locked_id and base.id and base.id != locked_id:
        raise CheckFailed(
            f"the base {base.name} is {base.id}, and the lock has {locked_id}",
            where=recipe.where("image", "base"),
            hint="bring back the image that was locked, or lock the new one: imgkit lock; to build without "
            "the lock: --no-lock",
        )


def _report_left_out_files(code: PackedCode, report: Reporter) -> None:
    """Report which files of the recipe's code are left out of the image, and how to include them."""
    if code.secret:
        report.note(
            f"not in the image, as they usually hold secrets: {', '.join(code.secret)}; a step can use "
            'one as a build secret (image.secrets); to bring one back: ignore: ["!NAME"]'
        )
    if code.left_out:
        names = sources.describe_left_out(code.left_out)
        report.note(f'not in the image: {names}; to bring one back: ignore: ["!NAME"]')
