"""Describe a job before its image and its code are brought to its machine, and before it is submitted."""

from __future__ import annotations

from dataclasses import dataclass

from imgkit_builder.data.folder import DataFolder
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.image_source import ImageSource
from imgkit_builder.jobs.job import Job, Script


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job with its script, before anything is built, sent or submitted."""

    job: Job
    """The job. In paths on a remote, `image_source.UNKNOWN_HOME` stands for imgkit's folder there.

    `submit.make_ready` replaces this text by the real path.
    """
    script: Script
    code: CodeFolder | None = None
    """The code that the run gets a copy of, or None for a run without code."""
    data: tuple[DataFolder, ...] = ()
    """The folders of data that are on this machine."""
    source: ImageSource | None = None
    """Where the image of a job on a remote comes from. None means that this machine has the image."""
    image_id: str = ""
    """The image's id, or "" if it is not known."""
    request: str = ""
    """The request as `resume.to_json` writes it. It is stored in the job's record."""
