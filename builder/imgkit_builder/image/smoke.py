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
from imgkit_entrypoints import __version__, json_text, system
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
        lines = finished.output.strip().splitlines()
        problem = lines[-1] if lines else f"exit code {finished.returncode}"
        hint = "the architecture differs, or the image has no Python: imgkit show IMAGE, imgkit doctor"
        return (_check("python", problem=f"python3 does not run: {problem}", hint=hint),)
    baked, manifest_check = _manifest(seen, manifest)
    provenance = manifest or baked
    probe = provenance.base.probe if provenance else None
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
    """Return whether this image has passed on this machine; the content behind an id never changes."""
    try:
        return not files.foreign(_record(image_id))
    except OSError:
        return False


def remember(image_id: str) -> None:
    """Record that this image passed."""
    files.write_cache(_record(image_id), "")


def _record(image_id: str) -> Path:
    # Other versions of imgkit may check more.
    return files.cache_dir() / "smoke" / __version__ / image_id.replace(":", "-")


def _check(name: str, fact: str = "", *, problem: str = "", hint: str = "", missing: str = "") -> Check:
    """Return a check that fails by a `problem`; without a `fact` it is skipped, as that is `missing`."""
    if problem:
        return Check(name, "fail", problem, hint)
    return Check(name, "ok" if fact else "skip", fact or missing)


def _arch(seen: Seen, arch: str) -> Check:
    fits = not arch or seen.machine in kernel_names(arch)
    problem = "" if fits else f"{seen.machine}, but the image is marked {arch}"
    hint = "the base has another architecture: imgkit build RECIPE --platform linux/ARCH --pull"
    return _check("arch", seen.machine, problem=problem, hint=hint)


def _python(seen: Seen) -> Check:
    is_old = tuple(int(part) for part in seen.python.split(".")[:2]) < FLOOR
    hint = f"the entry points need Python {'.'.join(map(str, FLOOR))}: use a newer base"
    return _check("python", seen.python, problem=seen.python if is_old else "", hint=hint)


def _torch(seen: Seen, probe: Probe | None) -> Check:
    is_probed = probe is not None and not probe.skipped
    expected = probe.torch if probe and is_probed else ""
    if seen.torch_error:
        hint = "a pip or apt step broke it; list the steps: imgkit show RECIPE"
        return _check("torch", problem=f"cannot be imported: {seen.torch_error}", hint=hint)
    hint = (
        "a pip step replaced the base's torch, the only one that fits its CUDA and NCCL; find the "
        "package that requires another one (pip show torch) and pin it"
    )
    problem = _difference(seen.torch, expected)
    fact = seen.torch and seen.torch + ("" if is_probed else " (the base was not probed)")
    # A base without torch serves tests of imgkit itself.
    return _check("torch", fact, problem=problem, hint=hint, missing="the image has no torch")


def _nccl(seen: Seen, probe: Probe | None) -> Check:
    hint = "a pip step installed another NCCL (pip list | grep nccl): pin or drop it"
    problem = _difference(seen.nccl, probe.nccl if probe else "")
    missing = "torch has no CUDA" if seen.torch else "no torch"
    return _check("nccl", seen.nccl, problem=problem, hint=hint, missing=missing)


def _difference(version: str, expected: str) -> str:
    """Return what is wrong with a version of the image; the base may state none."""
    return f"{version or 'none'}, the base has {expected}" if expected and version != expected else ""


def _pip(seen: Seen, probe: Probe | None) -> Check:
    if seen.pip_conflicts is None:
        return _check("pip", missing="the image has no pip")
    conflicts_of_base = probe.pip_conflicts if probe else ()
    new = [line for line in seen.pip_conflicts if line not in conflicts_of_base]
    count = len(seen.pip_conflicts)
    return _check(
        "pip",
        f"no new conflict ({count} of the base's own)" if count else "no conflict",
        problem=f"new conflicts: {'; '.join(new)}" if new else "",
        hint="pin these packages in image.pip to versions that fit the base",
    )


def _manifest(seen: Seen, expected: Manifest | None) -> tuple[Manifest | None, Check]:
    text = seen.files.get(MANIFEST_JSON)
    if text is None:
        hint = f"imgkit did not build this image; {_REBUILD}"
        return None, _check("manifest", problem=f"no {MANIFEST_JSON}", hint=hint)
    try:
        baked = manifests.from_json(text)
    except UsageError as error:
        return None, _check("manifest", problem=error.what, hint=error.hint or _REBUILD)
    problem = ""
    if expected is not None and text != manifests.to_json(expected):
        problem = f"it names recipe {baked.recipe} {baked.recipe_sha256[:12]}, not this build"
    hint = f"a step of the recipe overwrote {MANIFEST_JSON}, or the cache is stale: --no-cache"
    return baked, _check("manifest", f"{baked.recipe}, imgkit {baked.imgkit}", problem=problem, hint=hint)


def _system(seen: Seen) -> Check:
    path = str(system.SYSTEM_JSON)
    text = seen.files.get(path)
    if text is None:
        return _check("system", problem=f"no {path}", hint=_REBUILD)
    try:
        facts = system.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        return _check("system", problem=f"{path} cannot be read: {error}", hint=_REBUILD)
    return _check("system", f"{facts.title or '(no title)'}, {facts.scheduler}")


def _dist_env(finished: Finished) -> Check:
    # The output includes standard error: warnings may precede the object.
    try:
        if finished.returncode != 0 or "{" not in finished.output:
            raise ValueError(finished.tail() or f"exit code {finished.returncode}")
        json_text.first_object(finished.output)
    except ValueError as error:
        lines = str(error).splitlines()
        problem = lines[-1] if lines else "no output"
        hint = f"the entry points are broken in this image; {_REBUILD}"
        return _check("dist-env", problem=f"dist-env --json: {problem}", hint=hint)
    return _check("dist-env", "dist-env --json answers")
