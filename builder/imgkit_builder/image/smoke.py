"""The smoke test: the checks that an image must pass before it is copied elsewhere.

Standard library only. The same checks are used with docker and with singularity, because the caller passes
the function that runs a command inside the image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.checks import Check
from imgkit_builder.base.process import Finished
from imgkit_builder.image import inside
from imgkit_builder.image.inside import ImageReport
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import MANIFEST_JSON, Manifest, Probe
from imgkit_builder.oci.platform import kernel_names
from imgkit_builder.recipe.bases import OLDEST_PYTHON
from imgkit_entrypoints import __version__, json_text, system
from imgkit_entrypoints.errors import UsageError

_REBUILD_HINT = "build the image again: imgkit build RECIPE"

Runner = Callable[[Sequence[str]], Finished]
"""A function that runs a command inside the image and waits for its end. A failed command is no error."""


def check_image(run: Runner, *, arch: str, manifest: Manifest | None) -> tuple[Check, ...]:
    """Check an image by running two programs in it.

    Parameters
    ----------
    run : runs a command inside the image.
    arch : the expected architecture, ``amd64`` or ``arm64``. Empty if it is unknown.
    manifest : the provenance that the image must contain. If it is None, the image's own manifest is used.
    """
    finished = run(inside.probe_argv(MANIFEST_JSON, str(system.SYSTEM_JSON)))
    report = inside.parse_probe(finished.output)
    if report is None:
        problem = _last_line(finished.output, f"exit code {finished.returncode}")
        # Without a report there is nothing to compare, so this check is the only one.
        hint = "the architecture differs, or the image has no Python: imgkit show IMAGE, imgkit doctor"
        return (_make_check("python", problem=f"python3 does not run: {problem}", hint=hint),)
    own_manifest, manifest_check = _check_manifest(report, manifest)
    provenance = manifest or own_manifest
    # The versions in the base, with which those in the image are compared.
    probe = Probe(skipped="an image of others has no manifest, and its base is unknown")
    if provenance:
        probe = provenance.base.probe
    return (
        _check_arch(report, arch),
        _check_python(report),
        _check_torch(report, probe),
        _check_nccl(report, probe),
        _check_pip(report, probe),
        manifest_check,
        _check_system(report),
        _check_dist_env(run(["dist-env", "--json"])),
    )


def _last_line(text: str, default: str) -> str:
    """Return the last line of `text`, or `default` if the text is empty."""
    lines = text.strip().splitlines()
    if not lines:
        return default
    return lines[-1]


def has_passed(image_id: str) -> bool:
    """Return whether this image has already passed the checks on this machine.

    It does not have to be checked again, because the content of an image id never changes.
    """
    try:
        return not files.foreign_file_reason(_record_path(image_id))
    except OSError:
        return False


def record_pass(image_id: str) -> None:
    """Record that this image has passed the checks."""
    files.write_cache(_record_path(image_id), "")


def _record_path(image_id: str) -> Path:
    """Return the path of the file whose existence records that an image has passed."""
    # The path contains imgkit's version, because another version may check more.
    return files.cache_dir() / "smoke" / __version__ / image_id.replace(":", "-")


def _make_check(name: str, fact: str = "", *, problem: str = "", hint: str = "", missing: str = "") -> Check:
    """Return the result of a check.

    Parameters
    ----------
    fact : the result of a successful check, such as a version. If it is empty, the check counts as skipped.
    problem : why the check fails. Empty if it does not fail.
    hint : what the user can do about the problem.
    missing : why the check is skipped, such as ``the image has no torch``.
    """
    # A problem has priority, so a caller can always pass the fact and the hint.
    if problem:
        return Check(name, "fail", problem, hint)
    return Check(name, "ok" if fact else "skip", fact or missing)


def _check_arch(report: ImageReport, arch: str) -> Check:
    """Check that the architecture of the image is the one that its metadata names."""
    problem = ""
    if arch and report.machine not in kernel_names(arch):
        problem = f"{report.machine}, but the image is marked {arch}"
    hint = "the base has another architecture: imgkit build RECIPE --platform linux/ARCH --pull"
    return _make_check("arch", report.machine, problem=problem, hint=hint)


def _check_python(report: ImageReport) -> Check:
    """Check that the image's Python is new enough for the entry points."""
    version = tuple(int(part) for part in report.python.split(".")[:2])
    problem = ""
    if version < OLDEST_PYTHON:
        problem = report.python
    floor = ".".join(map(str, OLDEST_PYTHON))
    hint = f"the entry points need Python {floor}: use a newer base"
    return _make_check("python", report.python, problem=problem, hint=hint)


def _check_torch(report: ImageReport, probe: Probe) -> Check:
    """Check that torch can be imported, and that it is still the torch of the base.

    `probe` contains the versions in the base, if they are known.
    """
    if report.torch_error:
        hint = "a pip or apt step broke it; list the steps: imgkit show RECIPE"
        return _make_check("torch", problem=f"cannot be imported: {report.torch_error}", hint=hint)
    hint = (
        "a pip step replaced the base's torch, the only one that fits its CUDA and NCCL; find the "
        "package that requires another one (pip show torch) and pin it"
    )
    problem = ""
    fact = report.torch
    # The base was run, so its version is known.
    if not probe.skipped:
        problem = _describe_difference(report.torch, probe.torch)
    elif fact:
        fact += " (the base was not probed)"
    # A base without torch is allowed. imgkit's own tests use such bases.
    return _make_check("torch", fact, problem=problem, hint=hint, missing="the image has no torch")


def _check_nccl(report: ImageReport, probe: Probe) -> Check:
    """Check that the image still has the NCCL of its base."""
    hint = "a pip step installed another NCCL (pip list | grep nccl): pin or drop it"
    problem = _describe_difference(report.nccl, probe.nccl)
    missing = "torch has no CUDA" if report.torch else "no torch"
    return _make_check("nccl", report.nccl, problem=problem, hint=hint, missing=missing)


def _describe_difference(version: str, base_version: str) -> str:
    """Return how a version in the image differs from the version in the base, or "" if it does not.

    An empty `base_version` means that the version is unknown, so there is no difference.
    """
    if not base_version or version == base_version:
        return ""
    return f"{version or 'none'}, the base has {base_version}"


def _check_pip(report: ImageReport, probe: Probe) -> Check:
    """Check that ``pip check`` reports no conflicts, apart from those that the base already has."""
    if report.pip_conflicts is None:
        return _make_check("pip", missing="the image has no pip")
    # Conflicts of the base itself are not the fault of the recipe.
    new_conflicts = [line for line in report.pip_conflicts if line not in probe.pip_conflicts]
    if new_conflicts:
        hint = "pin these packages in image.pip to versions that fit the base"
        return _make_check("pip", problem=f"new conflicts: {'; '.join(new_conflicts)}", hint=hint)
    fact = "no conflict"
    if report.pip_conflicts:
        fact = f"no new conflict ({len(report.pip_conflicts)} of the base's own)"
    return _make_check("pip", fact)


def _check_manifest(report: ImageReport, expected: Manifest | None) -> tuple[Manifest | None, Check]:
    """Return the image's own manifest, and the check that compares it with the `expected` one.

    The manifest is None if it cannot be read. If `expected` is None, the check only requires that it can be
    read.
    """
    manifest_text = report.files.get(MANIFEST_JSON)
    if manifest_text is None:
        hint = f"imgkit did not build this image; {_REBUILD_HINT}"
        return None, _make_check("manifest", problem=f"no {MANIFEST_JSON}", hint=hint)
    try:
        own_manifest = manifests.from_json(manifest_text)
    except UsageError as error:
        return None, _make_check("manifest", problem=error.what, hint=error.hint or _REBUILD_HINT)
    # Equal manifests have equal text, so any other text means that the build did not write this file.
    if expected is not None and manifest_text != manifests.to_json(expected):
        problem = f"it names recipe {own_manifest.recipe} {own_manifest.recipe_sha256[:12]}, not this build"
        hint = f"a step of the recipe overwrote {MANIFEST_JSON}, or the cache is stale: --no-cache"
        return own_manifest, _make_check("manifest", problem=problem, hint=hint)
    fact = f"{own_manifest.recipe}, imgkit {own_manifest.imgkit}"
    return own_manifest, _make_check("manifest", fact)


def _check_system(report: ImageReport) -> Check:
    """Check that the image contains a readable system.json, with the facts about its system."""
    path = str(system.SYSTEM_JSON)
    system_text = report.files.get(path)
    if system_text is None:
        return _make_check("system", problem=f"no {path}", hint=_REBUILD_HINT)
    try:
        facts = system.from_json(system_text)
    except (ValueError, TypeError, KeyError) as error:
        return _make_check("system", problem=f"{path} cannot be read: {error}", hint=_REBUILD_HINT)
    return _make_check("system", f"{facts.title or '(no title)'}, {facts.scheduler}")


def _check_dist_env(dist_env: Finished) -> Check:
    """Check that imgkit's entry points start in the image: ``dist-env --json`` must print a JSON object.

    The output in `dist_env` includes standard error, so warnings may come before the object.
    """
    problem = ""
    if dist_env.returncode != 0 or "{" not in dist_env.output:
        problem = dist_env.tail() or f"exit code {dist_env.returncode}"
    else:
        try:
            # Only the syntax matters here, so the object itself is discarded.
            json_text.first_object(dist_env.output)
        except ValueError as error:
            problem = str(error)
    if problem:
        message = f"dist-env --json: {_last_line(problem, 'no output')}"
        hint = f"the entry points are broken in this image; {_REBUILD_HINT}"
        return _make_check("dist-env", problem=message, hint=hint)
    return _make_check("dist-env", fact="dist-env --json answers")
