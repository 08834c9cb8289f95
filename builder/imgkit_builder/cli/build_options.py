"""The options of ``imgkit build`` as one value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from imgkit_builder.cli.job_flags import OptionsCommand
from imgkit_builder.job.flags import flag, given
from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of ``imgkit build``; None takes the recipe's value."""

    tag: str | None = flag(None, help="Name of the image (default: RECIPE:latest).")
    base: str | None = flag(None, metavar="REF", help="Base image instead of the recipe's.")
    program: Literal["docker", "apptainer"] = flag(
        "docker",
        "--with",
        help="docker: an engine makes an image. apptainer: Apptainer or Singularity makes a .sif; needs no "
        "Docker and no root.",
    )
    output: Path | None = flag(
        None,
        "--output",
        "-o",
        metavar="X.sif",
        help="Without Docker: file to write (default: RECIPE.sif here).",
    )
    base_from: str | None = flag(
        None,
        metavar="PATH|registry",
        help="Without Docker: an archive, an OCI folder or a .sif of the base (default: its registry).",
    )
    tmpdir: Path | None = flag(
        None,
        metavar="DIR",
        help="Without Docker: folder for temporary files, best on a large local disk (default: "
        "$IMGKIT_TMPDIR, $APPTAINER_TMPDIR, $SINGULARITY_TMPDIR, $TMPDIR, else beside the .sif).",
    )
    runtime: str | None = flag(
        None,
        metavar="CMD",
        help="Without Docker: command name or path of the runtime (default: singularity, else apptainer).",
    )
    platform: str | None = flag(None, help="linux/amd64 or linux/arm64, if the recipe allows both.")
    locked: bool = flag(
        False, "--locked", help="Build from the recipe's lock; fail if there is none, or if it is stale."
    )
    no_lock: bool = flag(False, "--no-lock", help="Build without the recipe's lock.")
    no_cache: bool = flag(False, "--no-cache", help="Run every step again.")
    pull: bool = flag(False, "--pull", help="Pull the base even if it is local.")
    no_test: bool = flag(False, "--no-test", help="Skip the smoke test.")
    large: bool = flag(False, "--large", help="Pack more than 1 GB of code without a question.")
    builder: Literal["auto", "classic", "buildx", "podman"] = flag(
        "auto",
        help="classic: the engine's API. buildx: docker buildx. podman: podman build. "
        "auto: podman for Podman, else classic.",
    )
    dry_run: bool = flag(False, "--dry-run", help="Print the plan and the Dockerfile; needs no Docker.")
    as_json: bool = flag(
        False, "--json", help="Print one JSON object on stdout, progress as JSON lines on stderr."
    )
    verbose: bool = flag(False, "--verbose", "-v", help="Show all output.")


class BuildCommand(OptionsCommand):
    """The verb ``build``, with `BuildOptions` in ``Context.obj``."""

    def owners(self, *, quiet: bool) -> list[type[Any]]:
        """One dataclass."""
        return [BuildOptions]

    def made(self, values: dict[type[Any], dict[str, Any]]) -> BuildOptions:
        """The options."""
        return BuildOptions(**values[BuildOptions])


NOT_WITH = {
    "docker": ("--output", "--base-from", "--tmpdir", "--runtime"),
    "apptainer": ("--tag", "--builder"),
}
"""Options that mean nothing with a program."""


def refuse_others(options: BuildOptions) -> None:
    """Raise UsageError for an option that means nothing with the chosen program, or with another option."""
    if options.locked and options.no_lock:
        raise UsageError("--locked and --no-lock exclude each other", where="--no-lock", hint="leave one out")
    for name in given(options):
        if name in NOT_WITH[options.program]:
            other = next(one for one, names in NOT_WITH.items() if name not in names)
            raise UsageError(
                f"{name} means nothing --with {options.program}",
                where=name,
                hint=f"leave it out, or build --with {other}",
            )
