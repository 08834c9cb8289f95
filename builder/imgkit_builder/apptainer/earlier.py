"""Finds the .sif of an earlier build from the same input."""

from __future__ import annotations

from imgkit_builder.apptainer import definition as definitions
from imgkit_builder.apptainer import start
from imgkit_builder.apptainer.finish import ROUTE
from imgkit_builder.apptainer.request import BuiltSif, Planned, SifRequest
from imgkit_builder.apptainer.start import Start
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.sif import coverage
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.conversion import Compression
from imgkit_builder.sif.image import DataType, ImgkitRecord, SifImage
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_builder.sif.workspace import remove_leftovers


def earlier(
    request: SifRequest, base: Start, planned: Planned, tool: RuntimeTool, packing: Compression
) -> BuiltSif | None:
    """The result without work, if the target was built from the same definition, context and base."""

    def same(sif: SifImage, record: ImgkitRecord) -> bool:
        if (record.route, record.runtime, record.compression) != (ROUTE, str(tool), str(packing)):
            return False
        texts = (one for one in sif.descriptors if one.datatype == DataType.DEFFILE)
        old = b"".join(sif_image.data(sif, one) for one in texts).decode("utf-8", "surrogateescape")
        # Of the definition that the runtime has kept, only the time of the build may differ.
        dated = {**planned.labels, manifests.CREATED_LABEL: definitions.created(old)}
        return definitions.definition(request.recipe, base, dated).text.strip() == old.strip()

    target = request.target.absolute()
    found = None if request.options.force else coverage.undamaged(target, same)
    if found is None:
        return None
    sif, record = found
    remove_leftovers(target)  # a run that was killed after it had put the file in place
    return BuiltSif(
        path=target,
        size_bytes=sif.size_bytes,
        arch=sif.arch,
        base=base.image,
        record=record,
        labels=start.labels(sif),
        checks=(),
        up_to_date=True,
    )
