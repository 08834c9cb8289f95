"""The requests of ``imgkit build``, whose fields declare its options.

They are apart from the work, so that verbs that share an option do not import the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.base.flags import option_field

BASE_HELP = "Base image instead of the recipe's; current: the recipe's current_base."


# These dataclasses have no slots: the options of ``imgkit build`` inherit from both kinds of request, and
# Python allows only one base class with slots.
@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """The options about the base of an image, of ``imgkit build`` and ``imgkit lock``.

    None stands for the recipe's value.
    """

    base: str | None = option_field(None, metavar="REF", help=BASE_HELP)
    platform: str | None = option_field(
        None, metavar="PLATFORM", help="linux/amd64 or linux/arm64, if the recipe allows both."
    )
    pull: bool = option_field(False, help="Pull the base even if it is local.")


@dataclass(frozen=True, kw_only=True)
class AnyBuildRequest(BaseOptions):
    """The options that both kinds of build have."""

    build_args: tuple[str, ...] = option_field(
        (), "--build-arg", metavar="NAME=VALUE", help="Value for the recipe's image.args; repeatable."
    )
    locked: bool = option_field(
        False, help="Build from the recipe's lock; fail if there is none, or if it is stale."
    )
    no_lock: bool = option_field(False, help="Build without the recipe's lock.")
    no_cache: bool = option_field(False, help="Run every step again.")
    no_test: bool = option_field(False, help="Skip the smoke test.")
    large: bool = option_field(False, help="Do not ask for confirmation above 1 GB of code.")


@dataclass(frozen=True, kw_only=True)
class BuildRequest(AnyBuildRequest):
    """The options of a build by an engine."""

    tag: str | None = option_field(None, help="Tag of the image (default: RECIPE:latest).")
    builder: Literal["auto", "classic", "buildx", "podman"] = option_field(
        "auto",
        help="classic: the engine's API. buildx: docker buildx. podman: podman build. "
        "auto: podman for Podman, else classic.",
    )


@dataclass(frozen=True, kw_only=True)
class SifBuildRequest(AnyBuildRequest):
    """The options of a build by Singularity or Apptainer."""

    output: Path | None = option_field(
        None,
        "--output",
        "-o",
        metavar="X.sif",
        help="Without Docker: file to write (default: RECIPE.sif).",
    )
    base_from: str | None = option_field(
        None,
        metavar="PATH|registry",
        help="Without Docker: an archive, an OCI folder or a .sif of the base (default: its registry).",
    )
    tmpdir: Path | None = option_field(
        None,
        metavar="DIR",
        help="Without Docker: folder for temporary files, best on a large local disk (default: "
        "$IMGKIT_TMPDIR, $APPTAINER_TMPDIR, $SINGULARITY_TMPDIR, $TMPDIR, else next to the .sif).",
    )
    runtime: str | None = option_field(
        None,
        "--runtime-command",
        metavar="COMMAND",
        help="Without Docker: name or path of the runtime (default: singularity, else apptainer).",
    )
