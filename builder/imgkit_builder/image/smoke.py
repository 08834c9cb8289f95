"""The smoke test: the checks that an image must pass before it travels. Standard library only.

docker and singularity run the same checks: the caller passes a function that runs a command inside the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.checks import Check
from imgkit_builder.base.process import Finished
from imgkit_builder.image import inside
from imgkit_builder.image.inside import Seen
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import MANIFEST_JSON, Manifest, Probe
from imgkit_builder.oci.platform import kernel_names
from imgkit_builder.recipe.bases import FLOOR
from imgkit_entrypoints import json_text, system
from imgkit_entrypoints.errors import UsageError

_REBUILD = "build the image again: imgkit build RECIPE"

Runner = Callable[[Sequence[str]], Finished]
"""Runs a command inside the image to its end, with any exit code."""


def check(run: Runner, *, arch: str, manifest: Manifest | None) -> tuple[Check, ...]:
    """Check an image by running two programs in it.

    Parameters
    ----------
    run : runs a command inside the image.
    arch : ``amd64`` or ``arm64``; empty where it is unknown.
    manifest : the provenance that the image must have; None takes the image's own manifest.
    """
    finished = run(inside.argv(MANIFEST_JSON, str(system.SYSTEM_JSON)))
    seen = inside.parse(finished.output)
    if seen is None:
        return (_did_not_run(finished),)
    baked, manifest_check = _manifest(seen, manifest)
    made_from = manifest or baked
    probe = made_from.base.probe if made_from else None
    return (
        _arch(seen, arch),
        _python(seen),
        _torch(seen, probe),
        _nccl(seen, probe),
        _pip(seen, probe),
        manifest_check,
        _system(seen),
        _dist_env(run(["dist-env", "--json"])),
    )


def passed_before(image_id: str) -> bool:
    """Whether this image has passed on this machine; the content behind an id never changes."""
    try:
        return not files.foreign(_record(image_id))
    except OSError:
        return False


def remember(image_id: str) -> None:
    """Record that this image passed."""
    files.write_cache(_record(image_id), "")


def _record(image_id: str) -> Path:
    from imgkit_entrypoints import __version__

    # Other versions of imgkit may check more.
    return files.cache_dir() / "smoke" / __version__ / image_id.replace(":", "-")


def _did_not_run(finished: Finished) -> Check:
    lines = finished.output.strip().splitlines()
    return Check(
        name="python",
        verdict="fail",
        found=f"python3 does not run: {lines[-1] if lines else f'exit code {finished.returncode}'}",
        hint="the architecture differs, or the image has no Python: imgkit show IMAGE, imgkit doctor",
    )


def _arch(seen: Seen, arch: str) -> Check:
    if arch and seen.machine not in kernel_names(arch):
        return Check(
            name="arch",
            verdict="fail",
            found=f"{seen.machine}, but the image is marked {arch}",
            hint="the base has another architecture: imgkit build RECIPE --platform linux/ARCH --pull",
        )
    return Check(name="arch", verdict="ok", found=seen.machine)


def _python(seen: Seen) -> Check:
    version = tuple(int(part) for part in seen.python.split(".")[:2])
    if version < FLOOR:
        least = ".".join(map(str, FLOOR))
        return Check(
            name="python",
            verdict="fail",
            found=seen.python,
            hint=f"the entry points need Python {least}: use a newer base",
        )
    return Check(name="python", verdict="ok", found=seen.python)


def _torch(seen: Seen, probe: Probe | None) -> Check:
    known = probe is not None and not probe.skipped
    expected = probe.torch if probe and known else ""
    if seen.torch_error:
        return Check(
            name="torch",
            verdict="fail",
            found=f"cannot be imported: {seen.torch_error}",
            hint="a pip or apt step broke it; list the steps: imgkit show RECIPE",
        )
    if expected and seen.torch != expected:
        return Check(
            name="torch",
            verdict="fail",
            found=f"{seen.torch or 'none'}, the base has {expected}",
            hint="a pip step replaced the base's torch, the only one that fits its CUDA and NCCL; find the "
            "package that requires another one (pip show torch) and pin it",
        )
    if not seen.torch:
        # A base without torch serves tests of imgkit itself.
        return Check(name="torch", verdict="skip", found="the image has no torch")
    return Check(
        name="torch", verdict="ok", found=seen.torch + ("" if known else " (the base was not probed)")
    )


def _nccl(seen: Seen, probe: Probe | None) -> Check:
    expected = probe.nccl if probe else ""
    if expected and seen.nccl != expected:
        return Check(
            name="nccl",
            verdict="fail",
            found=f"{seen.nccl or 'none'}, the base has {expected}",
            hint="a pip step installed another NCCL (pip list | grep nccl): pin or drop it",
        )
    if not seen.nccl:
        return Check(name="nccl", verdict="skip", found="torch has no CUDA" if seen.torch else "no torch")
    return Check(name="nccl", verdict="ok", found=seen.nccl)


def _pip(seen: Seen, probe: Probe | None) -> Check:
    if seen.pip_conflicts is None:
        return Check(name="pip", verdict="skip", found="the image has no pip")
    before = probe.pip_conflicts if probe else ()
    new = [line for line in seen.pip_conflicts if line not in before]
    if new:
        return Check(
            name="pip",
            verdict="fail",
            found="new conflicts: " + "; ".join(new),
            hint="pin these packages in image.pip to versions that fit the base",
        )
    old = len(seen.pip_conflicts)
    return Check(
        name="pip", verdict="ok", found=f"no new conflict ({old} of the base's own)" if old else "no conflict"
    )


def _manifest(seen: Seen, expected: Manifest | None) -> tuple[Manifest | None, Check]:
    text = seen.files.get(MANIFEST_JSON)
    if text is None:
        return None, Check(
            name="manifest",
            verdict="fail",
            found=f"no {MANIFEST_JSON}",
            hint=f"imgkit did not build this image; {_REBUILD}",
        )
    try:
        baked = manifests.from_json(text)
    except UsageError as error:
        return None, Check(name="manifest", verdict="fail", found=error.what, hint=error.hint or _REBUILD)
    if expected is not None and text != manifests.to_json(expected):
        return baked, Check(
            name="manifest",
            verdict="fail",
            found=f"it names recipe {baked.recipe} {baked.recipe_sha256[:12]}, not this build",
            hint=f"a step of the recipe overwrote {MANIFEST_JSON}, or the cache is stale: --no-cache",
        )
    return baked, Check(name="manifest", verdict="ok", found=f"{baked.recipe}, imgkit {baked.imgkit}")


def _system(seen: Seen) -> Check:
    path = str(system.SYSTEM_JSON)
    text = seen.files.get(path)
    if text is None:
        return Check(name="system", verdict="fail", found=f"no {path}", hint=_REBUILD)
    try:
        facts = system.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        return Check(name="system", verdict="fail", found=f"{path} cannot be read: {error}", hint=_REBUILD)
    return Check(name="system", verdict="ok", found=f"{facts.title or '(no title)'}, {facts.scheduler}")


def _dist_env(finished: Finished) -> Check:
    # The output includes standard error: warnings may precede the object.
    try:
        if finished.returncode != 0 or "{" not in finished.output:
            raise ValueError(finished.tail() or f"exit code {finished.returncode}")
        json_text.first_object(finished.output)
    except ValueError as error:
        lines = str(error).splitlines()
        return Check(
            name="dist-env",
            verdict="fail",
            found=f"dist-env --json: {lines[-1] if lines else 'no output'}",
            hint=f"the entry points are broken in this image; {_REBUILD}",
        )
    return Check(name="dist-env", verdict="ok", found="dist-env --json answers")
