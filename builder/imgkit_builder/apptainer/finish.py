"""Makes a .sif that the runtime has written whole: record, configuration, smoke test, final name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from imgkit_builder import __version__
from imgkit_builder.apptainer import start
from imgkit_builder.apptainer.follow import Follower
from imgkit_builder.apptainer.request import BuiltSif, Planned, SifRequest
from imgkit_builder.apptainer.start import Start
from imgkit_builder.base import checks, files
from imgkit_builder.base.checks import Check
from imgkit_builder.image import smoke
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import Manifest
from imgkit_builder.sif import check, coverage, runtime, table
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.conversion import ConversionJob
from imgkit_builder.sif.image import DataType, ImgkitRecord
from imgkit_builder.sif.table import NewObject
from imgkit_entrypoints.errors import CheckFailed

ROUTE = "definition"
"""The route in the record of such a .sif."""
CONFIG_OBJECT = "imgkit-config"
"""Name of the JSON object with the configuration whose digest is the image id."""


def finish(
    request: SifRequest, base: Start, planned: Planned, job: ConversionJob, seen: Follower
) -> BuiltSif:
    """Check, describe, test, publish."""
    part, clock, target = job.work.part, job.clock, request.target.absolute()
    clock.stage("check")
    sif, _ = check.structure(part, config=None, layer_bytes=None)
    labels = {name: str(value) for name, value in start.labels(sif).items()}
    check.compare_labels(labels, {name: value for name, value in planned.labels.items() if value}, part)
    record = _described(request, part, sif, labels, job)
    manifest = planned.context.manifest
    manifest = dataclasses.replace(manifest, base=dataclasses.replace(manifest.base, probe=seen.probe))
    tested = _smoke(part, sif.arch, manifest, job) if request.options.test else ()
    clock.stage("make durable")
    files.publish(part, target)
    clock.finish()
    return BuiltSif(
        path=target,
        size_bytes=target.stat().st_size,
        arch=sif.arch,
        base=base.image,
        record=record,
        labels=labels,
        checks=tuple(tested),
        up_to_date=False,
        stages=tuple(clock.stages),
        log=Path(job.log.name),
    )


def _described(
    request: SifRequest,
    part: Path,
    sif: sif_image.SifImage,
    labels: Mapping[str, str],
    job: ConversionJob,
) -> ImgkitRecord:
    """Write the configuration and the record into the part file."""
    root = sif_image.root_sha256(part, advance=job.clock.advance)
    diff_ids = (f"sha256:{root}",)
    config = {
        "architecture": sif.arch,
        "os": "linux",
        "created": labels.get(manifests.CREATED_LABEL, ""),
        "config": {"Labels": dict(sorted(labels.items()))},
        "rootfs": {"type": "squashfs", "diff_ids": list(diff_ids)},
    }
    raw = json.dumps(config, indent=1, sort_keys=True).encode()
    assert sif.root is not None  # noqa: S101 - for the type checker: `check.structure` found it
    table.add(part, NewObject(datatype=DataType.JSON, name=CONFIG_OBJECT, group=sif.root.group, data=raw))
    record = ImgkitRecord(
        image_id=f"sha256:{hashlib.sha256(raw).hexdigest()}",
        diff_ids=diff_ids,
        root_sha256=root,
        runtime=str(job.tool),
        compression=str(job.compression),
        route=ROUTE,
        imgkit=__version__,
        source=request.recipe.name,
    )
    coverage.put_record(part, record)
    return record


def _smoke(part: Path, arch: str, manifest: Manifest, job: ConversionJob) -> Sequence[Check]:
    assert job.tool is not None  # noqa: S101 - for the type checker: a runtime has built it
    tool = job.tool
    job.clock.stage("smoke test")
    isolated = runtime.isolation(tool)
    job.clock.note(isolated.said("python3"))
    results = smoke.check(
        lambda argv: runtime.attempt(tool, runtime.exec_arguments(part, argv, isolated)),
        arch=arch,
        manifest=manifest,
    )
    if not checks.passed(results):
        raise CheckFailed(
            "the .sif was built, but its smoke test failed; an older file stays as it is",
            hint="\n".join(checks.table(results)) + "\nto keep it anyway: --no-test",
        )
    return results
