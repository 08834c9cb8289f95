"""Sign a .sif, a .sqsh, a delta or an archive, and check who signed it. Only keys that the user names count.

A .sif carries its signatures, which the runtime makes. Each covers a list of digests that the runtime made;
one of them has to be that of the coverage object, which in turn holds the digests of everything else
(`sif.coverage`). A .sqsh, a delta and an archive have a detached signature of gpg next to them: of the .sqsh
or delta, and of the archive's manifest, which holds the archive's sha256. ``gpg --verify FILE.asc`` checks
these by hand. Both programs ask for passphrases.

gpg checks OpenPGP signatures, and openssl those of a public key in PEM. gpg gets a separate home folder,
which holds the keys of the given file and nothing else: neither the user's keys nor a key server can make a
stranger known. A runtime's own ``verify`` asks both, fails on a file with signatures of both kinds, and is
absent on a laptop (docs/adr/0013-signatures.md).

A good signature says who signed these bytes. It does not say that they are the newest.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import read, sidecar
from imgkit_builder.base import files, process
from imgkit_builder.base.progress import Reporter, Silent
from imgkit_builder.delta import apply, descriptor
from imgkit_builder.sif import coverage, image, runtime, sqsh, table
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError

VERSIONS = {"--key": "Apptainer 1.2 or SingularityCE 3.11", "--keyidx": "any Apptainer, or Singularity 3.2"}
"""The first runtime with each option of ``sign``."""

_LOOK = "imgkit verify FILE lists what differs"
_SIGNED_FIELDS = struct.Struct("<iBIIqqqq")
"""What a signature covers of a descriptor, before name and extra (apptainer/sif, pkg/sif/descriptor.go)."""

_PAYLOAD_TYPE = "application/vnd.sylabs.sif-metadata+json"
"""Type of what a runtime signs with a PEM key, in a DSSE envelope."""
_PEM = b"-----BEGIN PUBLIC KEY-----"
_GPG_HINT = "Debian, Ubuntu: apt-get install gnupg; RHEL: dnf install gnupg2"
_OPENSSL_HINT = "Debian, Ubuntu: apt-get install openssl; RHEL: dnf install openssl"
_CLEAR_SIGNED = b"-----BEGIN PGP SIGNED MESSAGE-----"
_LEAST_FINGERPRINT = 40
_WRONG = ("BADSIG", "ERRSIG", "EXPSIG", "EXPKEYSIG", "REVKEYSIG", "NODATA")


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
        why = f"it was modified: {found.faults[0]}" if found.faults else "another tool made it"
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
    """Write the signature of the .sqsh, delta or archive `path` with gpg's default key, or `key`.

    Returns its place.

    Raises
    ------
    CheckFailed : the file is damaged.
    UsageError : neither a .sqsh or delta, nor an archive with its manifest.
    ToolMissing, ToolFailed : no gpg, or it did not sign.
    """
    signed, target = signed_file(path), signature_path(path)
    if descriptor.is_delta(path):
        delta = descriptor.read(path)
        if descriptor.sha256(path, delta) != delta.sha256:
            raise CheckFailed("the delta is damaged", where=str(path), hint="copy it again")
    elif sqsh.is_sqsh(path):
        _refuse_changed(path)
    elif (described := sidecar.read(path)) is None:
        raise UsageError(
            f"not a .sqsh or delta, nor an archive with {signed.name}, which the signature covers",
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


def signed_file(path: Path) -> Path:
    """The file that the detached signature of a .sqsh, a delta or an archive covers."""
    return path if descriptor.is_delta(path) or sqsh.is_sqsh(path) else sidecar.json_path(path)


def _refuse_changed(path: Path) -> None:
    """Raise CheckFailed where a .sqsh differs from its own record."""
    record = sqsh.record(path)
    if record is not None and sqsh.digests(path)[0] != record.root_sha256:
        raise CheckFailed("it is damaged", where=str(path), hint=_LOOK)


def signature_path(path: Path) -> Path:
    """Place of the detached signature of a .sqsh, a delta or an archive."""
    signed = signed_file(path)
    return signed.with_name(signed.name + ".asc")


def require(path: Path, keyring: Path, report: Reporter | None = None) -> Signer:
    """Return who signed the .sif, .sqsh, delta or archive `path`; reads all of it.

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
            raise CheckFailed(f"it was modified: {faults[0]}", where=str(path), hint=_LOOK)
        return signer_of_sif(path, keyring)
    found = signer_of_file(path, keyring)
    if sqsh.is_sqsh(path):  # all of it is signed
        return found
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


def signer_of_sif(path: Path, keyring: Path) -> Signer:
    """Return who signed the coverage object of a .sif whose coverage was checked.

    Raises
    ------
    CheckFailed, UsageError, ToolMissing : as in `require`.
    """
    sif = image.read(path)
    if not sif.signatures:
        raise CheckFailed("it is unsigned", where=str(path), hint=f"imgkit sign {path.name} --keyidx 0")
    wanted = _signed_digests(path)
    check = _enveloped if _is_pem(keyring) else clear_signed
    refusals = []
    for one in sif.signatures:
        try:
            signer, content = check(image.data(sif, one), keyring)
            if not _covers(content, wanted):
                raise CheckFailed("the signature is of another file, or of an older version of this one")
            return signer
        except CheckFailed as error:
            refusals.append(f"object {one.id}: {error.what}")
    raise CheckFailed("; ".join(refusals), where=str(path), hint=f"trusted keys: those in {keyring}")


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


def signer_of_file(path: Path, keyring: Path) -> Signer:
    """Return who signed the delta or archive `path`, whose own record was checked.

    Raises
    ------
    CheckFailed, UsageError, ToolMissing : as in `require`.
    """
    if _is_pem(keyring):
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
        return _detached(signature, signed, keyring)
    except CheckFailed as error:
        trusted = f"trusted keys: those in {keyring}"
        raise CheckFailed(error.what, where=str(signature), hint=trusted) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """The key that made a good signature."""

    fingerprint: str
    """Hex digits of an OpenPGP primary key, or ``SHA256:...`` of a PEM key."""
    name: str
    """User id of an OpenPGP key, for people."""

    def __str__(self) -> str:
        return f"{self.name} {self.fingerprint}".strip()


def _is_pem(keyring: Path) -> bool:
    """Whether the file holds one public key in PEM, and not OpenPGP keys.

    Raises
    ------
    UsageError : it cannot be read.
    """
    try:
        return files.read_bytes(keyring).lstrip().startswith(_PEM)
    except OSError as error:
        raise UsageError(f"cannot read the keyring: {error.strerror}", where=str(keyring)) from error


def clear_signed(message: bytes, keyring: Path) -> tuple[Signer, bytes]:
    """The signer of an OpenPGP message, and the content that the signature covers.

    Raises
    ------
    CheckFailed : not one good signature of a key in `keyring`.
    UsageError : `keyring` holds no key.
    ToolMissing : no gpg.
    """
    if not message.startswith(_CLEAR_SIGNED):
        raise CheckFailed("not an OpenPGP clear-signed message")
    with _gpg(keyring) as (words, folder):
        signed, content = folder / "signed", folder / "content"
        signed.write_bytes(_with_checksum(message))
        # The limit: gpg would unpack what a stranger has compressed.
        words += [
            "--max-output",
            str(json_text.MOST_BYTES),
            "--output",
            str(content),
            "--decrypt",
            str(signed),
        ]
        return _gpg_signer(words, folder, keyring, plaintexts=1), files.read_bytes(content)


def _with_checksum(message: bytes) -> bytes:
    """Add the checksum of the armor, which runtimes leave out.

    Without it gpg 2.2 does not see where the signature ends, unless its base64 ends in ``=``: 1 of 100 RSA
    signatures of Apptainer 1.4.5 does not (RFC 4880, section 6.1).
    """
    before, end, behind = message.rpartition(b"\n-----END PGP SIGNATURE-----")
    armor = before[before.rfind(b"-----BEGIN PGP SIGNATURE-----") :].replace(b"\r", b"").split(b"\n")
    if not end or b"" not in armor or armor[-1].startswith(b"="):
        return message
    try:
        data = base64.b64decode(b"".join(armor[armor.index(b"") :]), validate=True)
    except ValueError as error:
        raise CheckFailed(f"the signature cannot be read: {error}") from error
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc = (crc << 1) ^ (0x1864CFB if crc & 0x800000 else 0)
    return before + b"\n=" + base64.b64encode(crc.to_bytes(4, "big")[1:]) + end + behind


def _detached(signature: Path, signed: Path, keyring: Path) -> Signer:
    """The signer of the file `signed`; `signature` is beside it.

    Raises
    ------
    CheckFailed, UsageError, ToolMissing : as in `clear_signed`.
    """
    with _gpg(keyring) as (words, folder):
        files = (str(signature.absolute()), str(signed.absolute()))
        # A message with a content of its own says nothing about the file.
        return _gpg_signer([*words, "--verify", *files], folder, keyring, plaintexts=0)


@contextlib.contextmanager
def _gpg(keyring: Path) -> Iterator[tuple[list[str], Path]]:
    """Yield the words of a gpg that knows the keys of `keyring` alone, and its folder."""
    with tempfile.TemporaryDirectory(prefix="imgkit-keys-") as name:
        folder = Path(name)
        words = ["gpg", "--homedir", name, "--batch", "--no-tty", "--no-autostart", "--no-options"]
        words += ["--no-auto-key-retrieve", "--trust-model", "always", "--weak-digest", "SHA1"]
        done = process.run([*words, "--import", str(keyring.absolute())], check=False, hint=_GPG_HINT)
        known = process.run([*words, "--with-colons", "--list-keys"], check=False, hint=_GPG_HINT)
        if not any(line.startswith("pub:") for line in known.output.splitlines()):
            raise UsageError(
                "the keyring holds no OpenPGP key and is not a public key in PEM",
                where=str(keyring),
                hint=f"gpg --export --armor KEY > {keyring.name}\n{done.tail()}",
            )
        yield words, folder


def _gpg_signer(words: list[str], folder: Path, keyring: Path, *, plaintexts: int) -> Signer:
    """Run gpg, whose status lines go to a file: what it prints beside them can hold anything.

    `plaintexts` is how many contents the message itself has to have.
    """
    status = folder / "status"
    argv = [words[0], "--status-file", str(status), *words[1:]]
    done = process.run(argv, check=False, hint=_GPG_HINT)
    lines = files.read_text(status, errors="replace").split("\n") if status.exists() else []
    said = [line.removeprefix("[GNUPG:] ").split(" ") for line in lines]
    expected = {"NEWSIG": 1, "GOODSIG": 1, "VALIDSIG": 1, "PLAINTEXT": plaintexts}
    counts = {word: sum(one[0] == word for one in said) for word in expected}
    missing = next((one[1] for one in said if one[0] == "NO_PUBKEY" and len(one) > 1), "")
    if missing:
        issuer = next((one[-1] for one in said if one[0] == "ERRSIG"), missing)
        fingerprint = issuer if len(issuer) >= _LEAST_FINGERPRINT else missing
        raise CheckFailed(f"signed by the key {fingerprint}, which is not in {keyring.name}")
    wrong = next((one[0] for one in said if one[0] in _WRONG), "")
    if done.returncode != 0 or wrong or counts != expected:
        raise CheckFailed(f"the signature is not good: gpg says {wrong or done.tail() or counts}")
    good = next(one for one in said if one[0] == "GOODSIG")
    valid = next(one for one in said if one[0] == "VALIDSIG")
    return Signer(fingerprint=valid[-1], name=" ".join(good[2:]))


def _enveloped(message: bytes, key: Path) -> tuple[Signer, bytes]:
    """The signer of a DSSE envelope (https://github.com/secure-systems-lab/dsse), and its payload.

    Raises
    ------
    CheckFailed : no envelope, or none of its signatures is of the PEM public key in the file `key`.
    ToolMissing : no openssl.
    """
    try:
        envelope = json_text.parse(message)
        kind, payload = envelope["payloadType"], base64.b64decode(envelope["payload"], validate=True)
        found = [base64.b64decode(one["sig"], validate=True) for one in envelope["signatures"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckFailed(f"the signature cannot be read: {error!r}") from error
    if kind != _PAYLOAD_TYPE:
        raise CheckFailed(f"the signature is of {str(kind)[:60]!r}, not of a .sif")
    raw = kind.encode()
    covered = b"DSSEv1 %d %s %d %s" % (len(raw), raw, len(payload), payload)
    with tempfile.TemporaryDirectory(prefix="imgkit-keys-") as name:
        data, signature = Path(name, "data"), Path(name, "signature")
        data.write_bytes(covered)
        for one in found:
            signature.write_bytes(one)
            if _openssl(key, data, signature):
                return Signer(fingerprint=_pem_fingerprint(key), name=""), payload
    raise CheckFailed(f"signed by another key than the one in {key.name}")


def _openssl(key: Path, data: Path, signature: Path) -> bool:
    """Whether `signature` is good: ECDSA and RSA over SHA-256, or Ed25519, which needs openssl 3."""
    names = str(key.absolute()), str(signature), str(data)
    by_digest = ["openssl", "dgst", "-sha256", "-verify", names[0], "-signature", names[1], names[2]]
    raw = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", names[0], "-rawin", "-sigfile", names[1]]
    ways = (by_digest, [*raw, "-in", names[2]])
    return any(process.run(words, check=False, hint=_OPENSSL_HINT).returncode == 0 for words in ways)


def _pem_fingerprint(key: Path) -> str:
    # openssl, too, takes the first key of the file.
    body = files.read_bytes(key).split(_PEM, 1)[1].partition(b"-----")[0]
    digest = hashlib.sha256(base64.b64decode(body)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
