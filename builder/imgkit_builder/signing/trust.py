"""Whether a file is signed by a key that the user trusts.

A .sif carries its signatures. Each covers a list of digests that the runtime made; one of them has to be that
of the coverage object, which in turn holds the digests of everything else (`sif.coverage`). A delta and an
archive have a detached signature beside them: of the delta's file, and of the archive's manifest, which holds
the archive's sha256. ``gpg --verify FILE.asc`` checks these by hand.

A good signature says who signed these bytes. It does not say that they are the newest.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from imgkit_builder.archive import read, sidecar
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.delta import descriptor
from imgkit_builder.sif import coverage, image, table
from imgkit_builder.signing import keys
from imgkit_builder.signing.keys import Signer
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import CheckFailed, UsageError

_LOOK = "imgkit verify FILE lists what differs"
_SIGNED_FIELDS = struct.Struct("<iBIIqqqq")
"""What a signature covers of a descriptor, before name and extra (apptainer/sif, pkg/sif/descriptor.go)."""


def signed_file(path: Path) -> Path:
    """The file that the detached signature of a delta or an archive covers."""
    return path if descriptor.is_delta(path) else sidecar.json_path(path)


def signature_path(path: Path) -> Path:
    """Place of the detached signature of a delta or an archive."""
    signed = signed_file(path)
    return signed.with_name(signed.name + ".asc")


def require(path: Path, keyring: Path, report: Reporter | None = None) -> Signer:
    """Return who signed the .sif, delta or archive `path`; reads all of it.

    Raises
    ------
    CheckFailed : unsigned, changed since, or signed by nobody in `keyring`.
    UsageError : no such file, or a keyring that cannot be used.
    ToolMissing : no gpg, or for a PEM key no openssl.
    """
    if not path.is_file():
        raise UsageError("there is no such file", where=str(path))
    if image.is_sif(path):
        if faults := coverage.check(path).faults:
            raise CheckFailed(f"it is changed: {faults[0]}", where=str(path), hint=_LOOK)
        return of_sif(path, keyring)
    found = of_detached(path, keyring)
    if descriptor.is_delta(path):
        delta = descriptor.read(path)
        if descriptor.sha256(path, delta) != delta.sha256:
            raise CheckFailed("it is damaged", where=str(path), hint=_LOOK)
        return found
    described = sidecar.read(path)
    actual = read.sha256(path, report=report or Silent())
    if described is None or described.archive.sha256 != actual:
        raise CheckFailed(
            f"its sha256 is {actual}, and the signed manifest has another", where=str(path), hint=_LOOK
        )
    return found


def of_sif(path: Path, keyring: Path) -> Signer:
    """Return who signed the coverage object of a .sif whose coverage was checked.

    Raises
    ------
    CheckFailed, UsageError, ToolMissing : as in `require`.
    """
    sif = image.read(path)
    if not sif.signatures:
        raise CheckFailed("it is unsigned", where=str(path), hint=f"imgkit sign {path.name} --keyidx 0")
    wanted = _signed_digests(path)
    check = keys.enveloped if keys.is_pem(keyring) else keys.clear_signed
    refusals = []
    for one in sif.signatures:
        try:
            signer, content = check(image.data(sif, one), keyring)
            if not _covers(content, wanted):
                raise CheckFailed("the signature is of another file, or of an older version of this one")
            return signer
        except CheckFailed as error:
            refusals.append(f"object {one.id}: {error.what}")
    raise CheckFailed("; ".join(refusals), where=str(path), hint=f"trusted are the keys in {keyring}")


def _signed_digests(path: Path) -> tuple[int, str, str]:
    """What a runtime signs of the coverage object: id within its group, digests of descriptor and data."""
    with files.open_regular(path) as stream:
        found = table.read(path, stream)
    own = next((one for one in found.entries if one.label == coverage.NAME), None)
    data = coverage.data_of(path)
    if own is None or data is None:
        raise CheckFailed(
            "it has no coverage object, so its signature does not cover the whole file",
            where=str(path),
            hint=f"convert it again with this imgkit, and sign that: imgkit sif IMAGE --force -o {path.name}",
        )
    number = own.id - min(one.id for one in found.entries if one.group == own.group)
    fields = (own.datatype, own.used, number, own.link, own.size_bytes, own.created_s, own.uid, own.gid)
    described = _SIGNED_FIELDS.pack(*fields) + own.name + own.extra
    return number, _digest(described), _digest(data)


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _covers(content: bytes, wanted: tuple[int, str, str]) -> bool:
    """Whether the list of digests `content` has the coverage object."""
    try:
        listed = json_text.parse(content)["objects"]
        found = [(one["relativeId"], one["descriptorDigest"], one["objectDigest"]) for one in listed]
    except (ValueError, KeyError, TypeError):
        return False
    return wanted in found


def of_detached(path: Path, keyring: Path) -> Signer:
    """Return who signed the delta or archive `path`, whose own record was checked.

    Raises
    ------
    CheckFailed, UsageError, ToolMissing : as in `require`.
    """
    if keys.is_pem(keyring):
        raise UsageError(
            "a PEM key signs a .sif only; deltas and archives have OpenPGP signatures",
            where=str(keyring),
            hint="gpg --export --armor KEY > keyring.asc",
        )
    signed, signature = signed_file(path), signature_path(path)
    if not signature.is_file() or not signed.is_file():
        raise CheckFailed(
            f"it is unsigned: {(signature if signed.is_file() else signed).name} is missing",
            where=str(path),
            hint=f"imgkit sign {path.name}",
        )
    try:
        return keys.detached(signature, signed, keyring)
    except CheckFailed as error:
        trusted = f"trusted are the keys in {keyring}"
        raise CheckFailed(error.what, where=str(signature), hint=trusted) from error
