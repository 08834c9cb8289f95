"""A job that waits for its image, its code and its submission."""

from __future__ import annotations

from dataclasses import dataclass

from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.image_source import ImageSource
from imgkit_builder.jobs.job import Job, Script


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job whose script is written, before anything is built, sent or submitted."""

    job: Job
    """On a remote, as far as it is known before imgkit has looked there."""
    script: Script
    code: CodeFolder | None = None
    """The code over the image; None if there is none."""
    source: ImageSource | None = None
    """Where the image of a job on a remote comes from; None for a job of this machine."""
    image_id: str = ""
    """The id of the image where it is known."""
