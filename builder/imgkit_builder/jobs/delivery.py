"""Make the image of a job available on a remote: build it if what goes into it has changed, convert, send."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.jobs.image_source import ImageSource
from imgkit_builder.jobs.remote import gc, store, transfer
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.remote.store import RemoteImage, Store
from imgkit_builder.sif import convert as sif_convert
from imgkit_builder.sif.conversion import Options
from imgkit_builder.workflow.build import BuildRequest, build, plan
from imgkit_builder.workflow.build_record import built_image_id
from imgkit_builder.workflow.convert import compression_for, convert, engine_image
from imgkit_builder.workflow.names import system_of
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError


def has_content(sif: Path, image: RemoteImage) -> bool:
    """Return whether the local .sif is the image there; that of a recipe may be of an earlier build."""
    try:
        return store.describe_sif(sif).root_sha256 == image.root_sha256
    except CheckFailed:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Make the image available on the remote. An image that is there is not sent again."""

    source: ImageSource
    connection: Connection
    report: Reporter

    def bring(self, program: str, code: str) -> tuple[Store, RemoteImage | None]:
        """Return the store, and the image in it. Return no image if the run names one that lies elsewhere.

        Parameters
        ----------
        program : the program of the scheduler, which must be there.
        code : digest of the code that the job uses.

        Raises
        ------
        UsageError : the remote has no such program.
        ImgkitError : as of the build, the conversion and the transfer.
        """
        remote = self.connection.remote
        self.report.stage(f"look at {remote.name}")
        contents = store.look(self.connection, program=program, code=code)
        if not contents.has_program:
            raise UsageError(
                f"{remote.address} has no {program}",
                where="--on",
                hint=f"imgkit remote check {remote.name}",
            )
        source = self.source
        if source.remote_image:
            return contents, None
        if source.recipe:
            return contents, self._bring_recipe(contents)
        if source.archive:
            self._convert_archive(source.archive)
        return contents, self._send_unless_present(contents, self._describe_sif())

    def _bring_recipe(self, contents: Store) -> RemoteImage:
        """Return the image of the recipe; build and send it if the build's input has changed."""
        request = BuildRequest(base=self.source.base or None)
        if not self.source.rebuild:
            input_sha256 = plan(self.source.recipe, request).input_sha256
            built_id = built_image_id(input_sha256)
            image = contents.find_image(built_id) if built_id else contents.find_built(input_sha256)
            if image is not None:
                self._report_present()
                return image
        built = build(self.source.recipe, request, report=self.report)
        image = contents.find_image(built.id)
        if image is not None:
            self._report_present()
            return image
        self._convert_recipe()
        return self._send(contents, self._describe_sif(built.input_sha256))

    def _send_unless_present(self, contents: Store, image: RemoteImage) -> RemoteImage:
        present = contents.find_image(image.image_id, image.root_sha256)
        if present is None:
            return self._send(contents, image)
        self._report_present()
        return present

    def _report_present(self) -> None:
        self.report.note(f"to send: nothing; {self.connection.remote.name} has the image")

    def _describe_sif(self, input_sha256: str = "") -> RemoteImage:
        project = f"{socket.gethostname()}:{self.source.project_folder.absolute()}"
        return store.describe_sif(self.source.sif, input_sha256=input_sha256, project=project)

    def _send(self, contents: Store, image: RemoteImage) -> RemoteImage:
        """Send the local .sif, and remove older images of the project that nothing needs."""
        basis = contents.closest_image(image)
        similar = f"; {self.connection.remote.name} has most of {basis.title}" if basis else ""
        self.report.note(f"to send: image: {self.source.sif}, {size_text(image.sif_bytes)}{similar}")
        sent = transfer.send_image(
            self.connection, self.source.sif, image, home=contents.home, basis=basis, report=self.report
        )
        if sent:
            self.report.note(f"sent: {size_text(sent.new_bytes)} of {size_text(image.sif_bytes)}")
        self._remove_superseded(contents, image)
        return image

    def _remove_superseded(self, contents: Store, image: RemoteImage) -> None:
        """Remove older images of the project that nothing needs; a failure does not keep the job back."""
        try:
            unused, images = gc.find_superseded(self.connection, contents.images, image)
            removed = gc.remove(self.connection, unused)
        except ToolFailed as error:
            self.report.note(f"older images were not removed: {error.what}")
            return
        for path in removed:
            older = images[path]
            title = f"{older.title.removesuffix('.sif')}-{older.image_id.removeprefix('sha256:')[:4]}.sif"
            self.report.note(f"removed {title}, {size_text(older.sif_bytes)}")

    def _convert_recipe(self) -> None:
        """Make the local .sif of the recipe's image."""
        with engine_image(self.source.recipe) as engine_source:
            options = Options(compression=compression_for(system_of(self.source.recipe)))
            sif_convert.convert(engine_source, self.source.sif, options, self.report)

    def _convert_archive(self, archive: Path) -> None:
        """Make the local .sif of the archive."""
        try:
            convert(archive, self.source.sif, report=self.report)
        except ToolMissing as error:
            command = f"imgkit run RECIPE --sif {shlex.quote(archive.name)}, then imgkit run RECIPE"
            hint = f"{error.hint}\nor copy it to {self.connection.remote.name}, and there: {command}"
            raise ToolMissing(error.what, where=str(archive), hint=hint) from error
