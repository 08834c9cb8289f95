"""The labels that only a build knows."""

from __future__ import annotations

import dataclasses

from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import LOCK_LABEL, BaseImage, Manifest

MANIFEST = Manifest(
    imgkit="0.3.0",
    recipe="mine",
    recipe_sha256="ab",
    base=BaseImage(name="example.org/base:1"),
    platform="linux/amd64",
    wheel_sha256="cd",
)


def test_unlocked_image_inherits_no_lock_of_its_base() -> None:
    labels = manifest.labels(MANIFEST, context_sha256="ef", created="2026-01-01T00:00:00Z", locked=False)
    assert labels[LOCK_LABEL] == ""


def test_labels_of_a_build_leave_those_of_its_lock_alone() -> None:
    labels = manifest.labels(MANIFEST, context_sha256="ef", created="2026-01-01T00:00:00Z", locked=True)
    assert LOCK_LABEL not in labels


def test_image_outside_git_inherits_no_revision_of_its_base() -> None:
    without_revision = dataclasses.replace(MANIFEST, revision="")
    labels = manifest.labels(
        without_revision, context_sha256="ef", created="2026-01-01T00:00:00Z", locked=True
    )
    assert labels["org.opencontainers.image.revision"] == ""
