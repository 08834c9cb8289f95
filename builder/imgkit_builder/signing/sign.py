"""Sign a .sif through the runtime, a delta or an archive through gpg; these ask for passphrases."""

from __future__ import annotations

import tempfile
from pathlib import Path

from imgkit_builder.archive import read, sidecar
from imgkit_builder.base import files, process
from imgkit_builder.base.progress import Silent
from imgkit_builder.delta import apply, descriptor
from imgkit_builder.sif import coverage, image, runtime
from imgkit_builder.signing import trust
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError

VERSIONS = {"--key": "Apptainer 1.2 or SingularityCE 3.11", "--keyidx": "any Apptainer, or Singularity 3.2"}
"""The first runtime with each option of ``sign``."""


def sign_sif(path: Path, way: tuple[str, str], command: str | None = None) -> None:
    """Add a signature to the .sif `path`; a failure leaves it as it was.

    Parameters
    ----------
    path : a .sif with a coverage object.
    way : ``--key`` and a PEM private key's path, or ``--keyidx`` and a number from ``key list --secret``.
    command : the runtime to use, as in `runtime.find_runtime`.

    Raises
    ------
    CheckFailed : the .sif is changed, or has no coverage object.
    ToolMissing : no runtime, or one without this option.
    ToolFailed : it did not sign.
    """
    found = coverage.check(path)
    if found.faults or not found.covered:
        why = f"it is changed: {found.faults[0]}" if found.faults else "another tool made it"
        raise CheckFailed(
            f"{why}; a signature would not cover the whole file",
            where=str(path),
            hint=f"imgkit sif IMAGE --force -o {path.name}",
        )
    tool = runtime.find_runtime(command)
    option, value = way
    if f"{option} " not in process.run([tool.path, "sign", "--help"], check=False).output:
        raise ToolMissing(f"{tool} has no `sign {option}`", hint=f"it needs {VERSIONS[option]}")
    part = files.temporary_name(path)
    try:
        apply.clone(path, part)
        code = process.attached([str(tool.path), "sign", option, value, str(part)])
        before = len(image.read(path).signatures)
        if code != 0 or len(image.read(part).signatures) <= before or coverage.check(part).faults:
            raise ToolFailed(f"{tool} did not sign the file (exit code {code})", where=str(path))
        part.chmod(path.stat().st_mode & 0o777)
        files.publish(part, path)
    finally:
        part.unlink(missing_ok=True)


def sign_detached(path: Path, key: str = "") -> Path:
    """Write the signature of the delta or archive `path` with gpg's default key, or `key`; return its place.

    Raises
    ------
    CheckFailed : the delta is damaged.
    UsageError : neither a delta, nor an archive with its manifest.
    ToolMissing, ToolFailed : no gpg, or it did not sign.
    """
    signed, target = trust.signed_file(path), trust.signature_path(path)
    if descriptor.is_delta(path):
        delta = descriptor.read(path)
        if descriptor.sha256(path, delta) != delta.sha256:
            raise CheckFailed("the delta is damaged", where=str(path), hint="copy it again")
    elif (described := sidecar.read(path)) is None:
        raise UsageError(
            f"no delta, and an archive without {signed.name}, which the signature would cover",
            where=str(path),
            hint="imgkit save writes both",
        )
    elif described.archive.sha256 != read.sha256(path, report=Silent()):
        raise CheckFailed(
            f"it differs from {signed.name}", where=str(path), hint=f"imgkit verify {path.name}"
        )
    process.need("gpg", "Debian, Ubuntu: apt-get install gnupg; RHEL: dnf install gnupg2")
    with tempfile.TemporaryDirectory(prefix="imgkit-sign-") as folder:
        made = Path(folder, "signature")
        local = ["--local-user", key] if key else []
        code = process.attached(
            ["gpg", *local, "--armor", "--output", str(made), "--detach-sign", str(signed.absolute())]
        )
        if code != 0 or not made.exists():
            raise ToolFailed(f"gpg did not sign (exit code {code})", where=str(path))
        files.put(target, files.read_text(made))
    return target
