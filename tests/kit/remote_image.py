"""An image in the store of a remote, as its note describes it."""

from __future__ import annotations

from imgkit_builder.jobs.remote.store import RemoteImage


def remote_image(letter: str, project: str = "here:/project") -> RemoteImage:
    """Return an image whose digests consist of `letter`."""
    return RemoteImage(
        image_id=f"sha256:{letter * 64}",
        root_sha256=letter * 64,
        root_offset=4096,
        root_bytes=1,
        sif_bytes=1,
        arch="amd64",
        project=project,
    )
