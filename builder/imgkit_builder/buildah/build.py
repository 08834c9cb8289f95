"""Build a recipe by buildah to a tested .sif at its final name: the order of the steps."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.apptainer import start
from imgkit_builder.apptainer.earlier import whole
from imgkit_builder.apptainer.request import BuildPlan, BuiltSif, Pack, SifRequest
from imgkit_builder.apptainer.start import SifFile, Start
from imgkit_builder.base import checks, files
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import Reporter
from imgkit_builder.buildah import program
from imgkit_builder.buildah.program import ISOLATION, Buildah
from imgkit_builder.engine import build_program, labels, probing
from imgkit_builder.engine.following import BuildFollower
from imgkit_builder.image import inside, secret_values, smoke
from imgkit_builder.image import manifest as manifests
from imgkit_builder.image.config import parse_config
from imgkit_builder.image.manifest import CONTEXT_LABEL, BaseImage, Probe
from imgkit_builder.image.secret_values import SecretValues
from imgkit_builder.sif import convert, runtime, runtime_build
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.compression import ZSTD
from imgkit_builder.sif.conversion_job import Clock, ConversionJob
from imgkit_builder.sif.convert import Place
from imgkit_builder.sif.options import OciFolder, Registry
from imgkit_builder.sif.workspace import remove_tree, tmp_base, workspace
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed, UsageError

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

_ID_FILE = "image-id"
_SHARE = 3.0
"""Peak of the temporary files per byte of the image: the base as a folder, in the storage, the result."""


def build(request: SifRequest, pack: Pack, report: Reporter) -> BuiltSif:
    """Build the .sif `request.target`, which afterwards is whole and tested, or as it was before.

    Raises
    ------
    UsageError : there is no such base, it is a .sif, a secret cannot be read, or the target is no .sif.
    ToolMissing : there is no buildah.
    ToolFailed : a step failed; names the recipe's line, quotes its last lines and names the log.
    CheckFailed : this user cannot build here, there is too little space, or the result fails its smoke test.
    """
    target, options = request.target.absolute(), request.options
    convert.check_target(target, force=False)
    program.needed()
    secrets = secret_values.read(request.recipe)
    report.stage(f"base {request.base or request.recipe.image.base}")
    base = found(request, report)
    probe = probing.known(base.image.id) if base.image.id else None
    if probe and (done := _earlier(request, base.image, pack(_probed(base.image, probe)))):
        return done
    temporary = tmp_base(target, options.tmpdir)
    start.check_space(base, target, temporary, share=_SHARE)
    with workspace(target, temporary) as work, runtime.log_file(target.stem) as log:
        clock = Clock(report)
        place = Place(work=work, log=log, clock=clock)
        with _opened(temporary, target, clock) as buildah:
            image, ref = _brought(base, place, options=request, buildah=buildah)
            probe = probing.known(image.id) or _look(buildah, ref, image, clock)
            clock.stage("context")
            context = pack(_probed(image, probe))
            if done := _earlier(request, image, context):
                return done
            secret_values.refuse_in(context, secrets)
            built = _run(buildah, ref, context, secrets, place)
            tested = _smoke(buildah, built, context, clock) if options.test else ()
            clock.stage("take the image out of buildah")
            folder = buildah.folder / "image" / request.recipe.name
            folder.parent.mkdir()
            buildah.need("push", "--disable-compression", built, f"oci:image/{folder.name}")
            buildah.remove()
            made = convert.convert_in(place, OciFolder(path=folder), target, options)
    return BuiltSif(
        path=made.path,
        size_bytes=made.size_bytes,
        arch=made.arch,
        base=image,
        record=made.record,
        labels=start.labels(sif_image.read(made.path)),
        checks=tuple(tested),
        up_to_date=False,
        stages=made.stages,
        log=made.log,
    )


def plan(request: SifRequest, pack: Pack, report: Reporter) -> BuildPlan:
    """What `build` would run: the Dockerfile and the command."""
    convert.check_target(request.target.absolute(), force=False)
    base = found(request, report)
    context = pack(base.image)
    command = shlex.join((program.NAME, *words("BASE", SecretValues())))
    return BuildPlan(context=context, text=context.dockerfile, base=base.image, command=command)


def found(request: SifRequest, report: Reporter) -> Start:
    """The base of `request`.

    Raises
    ------
    UsageError : there is no such base, or it is a .sif, whose layers are merged.
    CheckFailed : it is damaged, or for another platform than this machine's.
    """
    base = start.find(request.recipe, name=request.base, place=request.base_from, report=report)
    if isinstance(base.source, SifFile):
        raise UsageError(
            "buildah builds on layers, and a .sif has none",
            where=f"--base-from {request.base_from}",
            hint="give an archive or an OCI folder; or build --with apptainer",
        )
    return _fit_for_from(base)


def _fit_for_from(base: Start) -> Start:
    """`base` under a name that FROM takes: an image without one has that of its file."""
    name = re.sub(r"\s+", "-", base.image.name)
    return dataclasses.replace(base, image=dataclasses.replace(base.image, name=name))


def _probed(image: BaseImage, probe: Probe) -> BaseImage:
    return dataclasses.replace(image, probe=probe)


def _earlier(request: SifRequest, base: BaseImage, context: BuildContext) -> BuiltSif | None:
    """The result without work: the context holds the recipe, the files and, in the manifest, the base."""
    return whole(
        request,
        base,
        lambda sif, record: (
            record.route != "flatten" and start.labels(sif).get(CONTEXT_LABEL) == context.label_sha256
        ),
    )


@contextlib.contextmanager
def _opened(temporary: Path, target: Path, report: Reporter) -> Iterator[Buildah]:
    """A storage of its own, under a name by which the next run finds what a killed one left."""
    key = hashlib.sha256(os.fsencode(target)).hexdigest()[:12]
    folder = temporary / f".imgkit-buildah.{key}"
    if folder.exists():
        _remove(Buildah(folder=folder, driver="vfs"))
    folder.mkdir(mode=0o700)
    made = Buildah(folder=folder, driver="vfs")
    try:
        made = program.opened(folder)
        if made.driver == "vfs":
            report.note(f"{folder.parent} has no overlay: buildah copies every layer (slower, more space)")
        yield made
    finally:
        _remove(made)


def _remove(buildah: Buildah) -> None:
    buildah.remove()
    remove_tree(buildah.folder)


def _brought(base: Start, place: Place, *, options: SifRequest, buildah: Buildah) -> tuple[BaseImage, str]:
    """Put the base into the storage; returns what it is, and its id there."""
    if isinstance(base.source, Registry):
        place.clock.stage(f"pull {base.source.reference}")
        plain = ("--tls-verify=false",) if runtime_build.is_local(base.source) else ()
        ref = buildah.need("pull", "--quiet", *plain, f"docker://{base.source.reference}").split()[-1]
        return _of_registry(base.image, json_text.parse(buildah.need("inspect", "--type=image", ref))), ref
    assert not isinstance(base.source, SifFile)  # noqa: S101 - for the type checker: `found` refuses it
    job = ConversionJob(
        tool=None,
        options=options.options,
        compression=ZSTD,
        work=place.work,
        clock=place.clock,
        log=place.log,
    )
    laid = runtime_build.lay_out(base.source, job)
    known = base if base.known else _fit_for_from(start.identified(base, laid.config, laid.names))
    next(place.work.folder.glob("*/oci-layout")).parent.rename(buildah.folder / start.FOLDER)
    place.clock.stage("put the base into buildah's storage")
    ref = buildah.need("pull", "--quiet", f"oci:{start.FOLDER}").split()[-1]
    remove_tree(buildah.folder / start.FOLDER)
    return known.image, ref


def _of_registry(image: BaseImage, about: object) -> BaseImage:
    assert isinstance(about, dict)  # noqa: S101 - what buildah prints
    config = parse_config(
        json.dumps(about["OCIv1"]).encode(), where=image.name, image_id=f"sha256:{about['FromImageID']}"
    )
    digest = str(about.get("FromImageDigest") or "")
    return dataclasses.replace(
        image,
        id=config.image_id,
        digest=f"{image.name.partition('@')[0]}@{digest}" if digest else "",
        env={name: value or "" for name, value in config.env},
    )


def _look(buildah: Buildah, ref: str, image: BaseImage, report: Reporter) -> Probe:
    report.stage("look into the base")
    done = _inside(buildah, ref)(inside.argv())
    lines = done.output.strip().splitlines()
    skipped = f"python3 failed with exit code {done.returncode}: {lines[-1] if lines else 'no output'}"
    return probing.learned(image.id, done.output) or Probe(skipped=skipped)


def _inside(buildah: Buildah, ref: str) -> smoke.Runner:
    """A function that runs a command in a container of the image `ref`."""
    container = buildah.need("from", ref).split()[-1]
    return lambda argv: buildah.run("run", ISOLATION, container, "--", *argv)


class _Follower(BuildFollower):
    """Follows buildah, whose log begins with the Dockerfile."""

    def _advice(self, error: ImgkitError) -> str:
        # What helps where an engine's disk is full, or its service is gone, does not help here.
        found = super()._advice(error)
        return "" if "docker" in found else found

    def _where_to_look(self) -> str:
        return f"full log: {self.log_path}, with the Dockerfile in it"


def _run(buildah: Buildah, ref: str, context: BuildContext, secrets: SecretValues, place: Place) -> str:
    """Run the steps, and return the image's id."""
    created = manifests.time_of_build(context.source_date_epoch)
    values = manifests.labels(
        context.manifest,
        context_sha256=context.label_sha256,
        created=created,
        locked=context.source_date_epoch is not None,
    )
    dockerfile = context.dockerfile.rstrip("\n") + "\n" + labels.instruction(values)
    files.put(buildah.folder / "Dockerfile", dockerfile)
    place.log.write(dockerfile)
    watch = _Follower(
        place.log,
        dockerfile,
        base=context.manifest.base.name,
        log_path=Path(place.log.name),
        report=place.clock,
        hide=secrets.masked,
    )
    chunks = build_program.context_chunks(context, dockerfile, watch)
    with contextlib.closing(chunks):
        code = buildah.run(*words(ref, secrets), chunks=chunks, take=watch.text).returncode
    if code:
        raise watch.failed(code)
    try:
        return (buildah.folder / _ID_FILE).read_text(encoding="ascii").strip()
    except OSError as error:
        raise watch.located(ToolFailed("buildah ended before the image was finished")) from error


def words(ref: str, secrets: SecretValues) -> tuple[str, ...]:
    """The subcommand that builds."""
    fixed = ("build", ISOLATION, "--layers=false", "--force-rm", "--identity-label=false")
    return (
        *fixed,
        f"--from={ref}",
        f"--iidfile={_ID_FILE}",
        f"--file={labels.DOCKERFILE}",
        *secrets.options,
        "-",
    )


def _smoke(buildah: Buildah, built: str, context: BuildContext, report: Reporter) -> Sequence[Check]:
    report.stage("smoke test")
    report.note("python3 runs in the image: without this machine's files, with its network and processes")
    platform = context.manifest.platform
    run = _inside(buildah, built)
    results = smoke.check(run, arch=platform.partition("/")[2], manifest=context.manifest)
    if not checks.passed(results):
        raise CheckFailed(
            "the image was built, but its smoke test failed; an older file stays as it is",
            hint=f"{checks.table(results)}\n  -> to keep it anyway: --no-test",
        )
    return results
