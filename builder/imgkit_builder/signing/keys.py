"""Who signed a message: gpg answers for OpenPGP, openssl for a public key in PEM. Only the given keys count.

gpg gets a home folder of its own, which holds the keys of the given file and nothing else: neither the user's
keys nor a key server can make a stranger known. A runtime's own ``verify`` asks both, fails on a file with
signatures of both kinds, and is absent on a laptop (docs/adr/0013-signatures.md).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import CheckFailed, UsageError

PAYLOAD_TYPE = "application/vnd.sylabs.sif-metadata+json"
"""Type of what a runtime signs with a PEM key, in a DSSE envelope."""
_PEM = b"-----BEGIN PUBLIC KEY-----"
_GPG_HINT = "Debian, Ubuntu: apt-get install gnupg; RHEL: dnf install gnupg2"
_OPENSSL_HINT = "Debian, Ubuntu: apt-get install openssl; RHEL: dnf install openssl"
_CLEAR_SIGNED = b"-----BEGIN PGP SIGNED MESSAGE-----"
_LEAST_FINGERPRINT = 40
_WRONG = ("BADSIG", "ERRSIG", "EXPSIG", "EXPKEYSIG", "REVKEYSIG", "NODATA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """The key that made a good signature."""

    fingerprint: str
    """Hex digits of an OpenPGP primary key, or ``SHA256:...`` of a PEM key."""
    name: str
    """User id of an OpenPGP key, for people."""

    def __str__(self) -> str:
        return f"{self.name} {self.fingerprint}".strip()


def is_pem(keyring: Path) -> bool:
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
        raise CheckFailed("it is no OpenPGP clear-signed message")
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
        return _asked(words, folder, keyring, plaintexts=1), files.read_bytes(content)


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


def detached(signature: Path, signed: Path, keyring: Path) -> Signer:
    """The signer of the file `signed`; `signature` is beside it.

    Raises
    ------
    CheckFailed, UsageError, ToolMissing : as in `clear_signed`.
    """
    with _gpg(keyring) as (words, folder):
        files = (str(signature.absolute()), str(signed.absolute()))
        # A message with a content of its own says nothing about the file.
        return _asked([*words, "--verify", *files], folder, keyring, plaintexts=0)


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
                "the keyring has no OpenPGP key, and is no public key in PEM",
                where=str(keyring),
                hint=f"gpg --export --armor KEY > {keyring.name}\n{done.tail()}",
            )
        yield words, folder


def _asked(words: list[str], folder: Path, keyring: Path, *, plaintexts: int) -> Signer:
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


def enveloped(message: bytes, key: Path) -> tuple[Signer, bytes]:
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
    if kind != PAYLOAD_TYPE:
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
