"""Make the image of a job available on a remote.

An image is built if its input has changed, converted to a .sif, and sent. Each step is skipped if the remote
already has its result.
"""

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
from imgkit_builder.workflow.build import build, plan
from imgkit_builder.workflow.build_record import built_image_id
from imgkit_builder.workflow.build_request import BuildRequest
from imgkit_builder.workflow.convert import compression_for, convert, open_engine_image
from imgkit_builder.workflow.names import system_of
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing


def has_content(sif: Path, image: RemoteImage) -> bool:
    """Return whether the local file `sif` has the same content as `image`, which is on the remote.

    The result is false if the local file is from another build, or if there is no such file.
    """
    try:
        return store.describe_sif(sif).root_sha256 == image.root_sha256
    except CheckFailed:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Make an image available on a remote. An image that is already there is not built or sent again."""

    source: ImageSource
    connection: Connection
    report: Reporter

    def bring(self, remote_store: Store) -> RemoteImage:
        """Return the image in imgkit's folder on the remote, after sending it if it is not there yet.

        Parameters
        ----------
        remote_store : what imgkit's folder on the remote contains now.

        Raises
        ------
        ImgkitError : the build, the conversion or the transfer failed.
        """
        if self.source.recipe:
            return self._bring_recipe(remote_store)
        if self.source.archive:
            self._convert_archive_to_sif(self.source.archive)
        # There is a local .sif by now: the converted archive, or the file that the user names.
        return self._bring_sif(remote_store)

    def _bring_recipe(self, remote_store: Store) -> RemoteImage:
        """Return the image of the recipe on the remote. If the remote does not have it, it is built and sent.

        An image on the remote is used if it was built from the same input, which is the recipe and its files.
        """
        request = BuildRequest(base=self.source.base or None)
        input_sha256 = plan(self.source.recipe, request).input_sha256
        stored_image = _find_built_image(remote_store, input_sha256)
        if stored_image is not None:
            self._report_present()
            return stored_image
        build_result = build(self.source.recipe, request, report=self.report)
        # A build from other input can still give an image that the remote already has.
        same_image = remote_store.find_image(build_result.id)
        if same_image is not None:
            self._report_present()
            return same_image
        self._convert_recipe_to_sif()
        image = self._describe_local_sif(build_result.input_sha256)
        self._send(remote_store, image)
        return image

    def _bring_sif(self, remote_store: Store) -> RemoteImage:
        """Return the image of the local .sif on the remote. If the remote does not have it, it is sent."""
        image = self._describe_local_sif()
        stored_image = remote_store.find_image(image.image_id, image.root_sha256)
        if stored_image is not None:
            self._report_present()
            return stored_image
        self._send(remote_store, image)
        return image

    def _report_present(self) -> None:
        """Report that the remote has the image."""
        self.report.note(f"to send: nothing; {self.connection.remote.name} has the image")

    def _describe_local_sif(self, input_sha256: str = "") -> RemoteImage:
        """Return the description of the local .sif, which is stored beside the image on the remote.

        Parameters
        ----------
        input_sha256 : digest of the build's input, or "" for a .sif that is not from a recipe.
        """
        # When a newer image has been sent, older images of the same project are found by this name and
        # removed.
        project = f"{socket.gethostname()}:{self.source.request.project_folder.absolute()}"
        return store.describe_sif(self.source.sif, input_sha256=input_sha256, project=project)

    def _send(self, remote_store: Store, image: RemoteImage) -> None:
        """Send the local .sif, and then remove older images of the project from the remote.

        Parameters
        ----------
        image : the description of the local .sif.
        """
        size = size_text(image.sif_bytes)
        message = f"to send: image: {self.source.sif}, {size}"
        # The basis is the most similar image on the remote. rsync sends only the blocks that differ from it.
        basis = remote_store.closest_image(image)
        if basis is not None:
            message += f"; {self.connection.remote.name} has most of {basis.title}"
        self.report.note(message)
        transferred = transfer.send_image(
            self.connection,
            self.source.sif,
            image,
            home=remote_store.home,
            basis=basis,
            report=self.report,
        )
        if transferred is not None:
            self.report.note(f"sent: {size_text(transferred.new_bytes)} of {size}")
        # The old images are removed only now, because one of them was the basis of the transfer.
        self._remove_superseded(remote_store, image)

    def _remove_superseded(self, remote_store: Store, new_image: RemoteImage) -> None:
        """Remove older images of the project from the remote if no job uses them.

        If that fails, the failure is only reported, because the job can start nevertheless.

        Parameters
        ----------
        new_image : the image that was sent just now. It is not in `remote_store` yet.
        """
        try:
            unused_folders, image_by_path = gc.find_superseded(
                self.connection, remote_store.images, new_image
            )
            removed_paths = gc.remove_unused(self.connection, unused_folders)
        except ToolFailed as error:
            self.report.note(f"older images were not removed: {error.what}")
            return
        for path in removed_paths:
            older_image = image_by_path[path]
            name = older_image.title.removesuffix(".sif")
            digest = older_image.image_id.removeprefix("sha256:")
            # Four digits of the id distinguish two images of the same name.
            self.report.note(f"removed {name}-{digest[:4]}.sif, {size_text(older_image.sif_bytes)}")

    def _convert_recipe_to_sif(self) -> None:
        """Convert the recipe's image from the container engine, such as Docker, to the local .sif."""
        with open_engine_image(self.source.recipe) as engine_source:
            options = Options(compression=compression_for(system_of(self.source.recipe)))
            sif_convert.convert(engine_source, self.source.sif, options, self.report)

    def _convert_archive_to_sif(self, archive: Path) -> None:
        """Convert an archive of an image to the local .sif.

        Raises
        ------
        ToolMissing : this machine has no program that writes a .sif. The hint contains a command by which the
            remote can convert the archive itself.
        """
        try:
            convert(archive, self.source.sif, report=self.report)
        except ToolMissing as error:
            command = (
                f"imgkit sif {shlex.quote(archive.name)} --submit --system RECIPE, then imgkit run RECIPE"
            )
            hint = f"{error.hint}\nor copy it to {self.connection.remote.name}, and there: {command}"
            raise ToolMissing(error.what, where=str(archive), hint=hint) from error


def _find_built_image(remote_store: Store, input_sha256: str) -> RemoteImage | None:
    """Return the image on the remote that was built from this input, or None if the remote has none.

    The input is the recipe and its files. If this machine has built an image from the same input, only that
    image is used. Otherwise, an image that another machine has built from the input is used.
    """
    local_image_id = built_image_id(input_sha256)
    # Two builds from the same input can differ, because packages come from the network.
    if local_image_id:
        return remote_store.find_image(local_image_id)
    return remote_store.find_built(input_sha256)
