"""Signatures that real runtimes, gpg and openssl make, and attacks on them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sample_delta
import small_sif
from labkit import imgkit, output, run
from stored_images import archive as archive_of
from stored_images import convert_as

from imgkit_builder.archive import sidecar
from imgkit_builder.archive.sidecar import SavedArchive, SavedImage, Sidecar
from imgkit_builder.sif import coverage, image, table
from imgkit_builder.sif.image import DataType
from imgkit_builder.sif.table import NewObject
from imgkit_builder.signing import signatures
from imgkit_builder.signing.signatures import clear_signed
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

pytestmark = [pytest.mark.singularity, pytest.mark.xdist_group("signing")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Keys of a friend and of a stranger."""

    runtime: dict[str, str]
    """Variables with which the runtime finds the friend's OpenPGP key."""
    keyring: Path
    private: Path
    public: Path
    """The friend's PEM keys."""
    stranger: Path
    """A keyring without the friend."""
    stranger_pem: Path
    home: Path
    """Home of gpg, with the key of the friend that signs deltas and archives."""
    gpg_keyring: Path


def gpg(home: Path, *words: object) -> str:
    return output(
        "gpg", "--homedir", home, "--batch", "--pinentry-mode", "loopback", "--passphrase", "", *words
    )


def pem(folder: Path, name: str) -> tuple[Path, Path]:
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    output("openssl", "genpkey", "-algorithm", "ed25519", "-out", private)
    output("openssl", "pkey", "-in", private, "-pubout", "-out", public)
    return private, public


def gpg_home(folder: Path, name: str, *when: str) -> tuple[Path, Path]:
    home, keyring = folder / name, folder / f"{name}.asc"
    home.mkdir(mode=0o700)
    gpg(
        home,
        *when,
        "--quick-gen-key",
        f"{name} <{name}@example.org>",
        "ed25519",
        "sign",
        "1d" if when else "never",
    )
    keyring.write_text(gpg(home, "--export", "--armor"))
    return home, keyring


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    if not shutil.which("gpg") or not shutil.which("openssl"):
        pytest.skip("gpg or openssl is missing: apt-get install gnupg openssl")
    folder = tmp_path_factory.mktemp("keys")
    place = str(folder / "runtime")
    runtime = {"APPTAINER_KEYSDIR": place, "SINGULARITY_SYPGPDIR": place}
    words = ("--name", "friend", "--email", "c@example.org", "--comment", "x", "--password", "")
    output("singularity", "key", "newpair", *words, "--bit-length", "2048", "--push=false", env=runtime)
    private, public = pem(folder, "friend")
    _, stranger_pem = pem(folder, "other")
    home, gpg_keyring = gpg_home(folder, "me")
    other, stranger = gpg_home(folder, "stranger")
    yield Keys(
        runtime=runtime,
        keyring=folder / "runtime/pgp-public",
        private=private,
        public=public,
        stranger=stranger,
        stranger_pem=stranger_pem,
        home=home,
        gpg_keyring=gpg_keyring,
    )
    for one in (home, other):
        run("gpgconf", "--homedir", one, "--kill", "all")


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    return small_sif.write(tmp_path / "x.sif")


@pytest.fixture
def signed(sif: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A .sif with an OpenPGP signature of the friend."""
    for name, value in keys.runtime.items():
        monkeypatch.setenv(name, value)
    signatures.sign_sif(sif, ("--keyidx", "0"))
    return sif


def refusal(path: Path, keyring: Path) -> str:
    with pytest.raises(CheckFailed) as caught:
        signatures.require(path, keyring)
    return caught.value.what


def signature(path: Path) -> bytes:
    found = image.read(path)
    return image.data(found, found.signatures[-1])


def test_runtime_verifies_what_imgkit_signs(signed: Path, keys: Keys) -> None:
    output("singularity", "verify", "--local", signed, env=keys.runtime)
    assert "friend" in signatures.require(signed, keys.keyring).name


def test_runtime_signs_what_imgkit_wrote(tmp_path: Path, keys: Keys) -> None:
    """Its UUID and its times are zero."""
    (tmp_path / "x.tar").write_bytes(archive_of([[]]))
    sif = tmp_path / "x.sif"
    assert convert_as(0, tmp_path / "x.tar", sif) == ""
    output("singularity", "sign", "--key", keys.private, sif)
    output("singularity", "verify", "--key", keys.public, sif)
    assert signatures.require(sif, keys.public).fingerprint.startswith("SHA256:")
    assert coverage.check(sif).faults == ()


def test_both_kinds_of_key_in_one_file(signed: Path, keys: Keys) -> None:
    """The runtime's own verify fails here, because it lacks the key of one of them."""
    assert imgkit("sign", signed, "--key", keys.private).returncode == 0
    assert run("singularity", "verify", "--key", keys.public, signed).returncode != 0
    assert signatures.require(signed, keys.public).fingerprint.startswith("SHA256:")
    assert len(signatures.require(signed, keys.keyring).fingerprint) == 40
    assert coverage.check(signed).faults == ()


@pytest.mark.parametrize("kind", ["RSA", "EC"])
def test_other_pem_keys_verify(sif: Path, keys: Keys, kind: str, tmp_path: Path) -> None:
    private, public = tmp_path / "k.pem", tmp_path / "k.pub"
    options = {"RSA": "rsa_keygen_bits:2048", "EC": "ec_paramgen_curve:P-256"}
    output("openssl", "genpkey", "-algorithm", kind, "-pkeyopt", options[kind], "-out", private)
    output("openssl", "pkey", "-in", private, "-pubout", "-out", public)
    signatures.sign_sif(sif, ("--key", str(private)))
    assert signatures.require(sif, public)
    assert "another key" in refusal(sif, keys.stranger_pem)


def test_unsigned_and_unknown_are_refused(sif: Path, keys: Keys) -> None:
    assert refusal(sif, keys.keyring) == "it is unsigned"
    output("singularity", "sign", "--keyidx", "0", sif, env=keys.runtime)
    assert "which is not in stranger.asc" in refusal(sif, keys.stranger)
    assert "signature cannot be read" in refusal(sif, keys.public)
    assert imgkit("verify", sif, "--keyring", keys.public).returncode == 1


def test_signature_of_another_file_is_refused(signed: Path, keys: Keys, tmp_path: Path) -> None:
    other = small_sif.write(tmp_path / "other.sif", seed=2)
    small_sif.sign(other, signature(signed))
    assert "of another file" in refusal(other, keys.keyring)


def test_signature_of_an_older_version_is_refused(signed: Path, keys: Keys) -> None:
    old = signature(signed)
    table.delete(signed, [one.id for one in image.read(signed).signatures])
    coverage.put_record(signed, dataclasses.replace(small_sif.record(), source="newer:1"))
    small_sif.sign(signed, old)
    assert coverage.check(signed).faults == ()
    assert "older version" in refusal(signed, keys.keyring)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_object_added_after_signing_is_refused(signed: Path, keys: Keys, group: int) -> None:
    table.add(signed, NewObject(datatype=DataType.JSON, name="extra", group=group, data=b"{}"))
    assert "was added and is not a signature" in refusal(signed, keys.keyring)


def test_bytes_behind_a_signature_are_refused(signed: Path, keys: Keys) -> None:
    with signed.open("ab") as stream:
        stream.write(b"#!/bin/sh\n")
    assert "10 bytes after the last object" in refusal(signed, keys.keyring)


def test_moved_descriptor_is_refused(signed: Path, keys: Keys) -> None:
    """A runtime does not sign the place of an object; the coverage object holds it."""
    with signed.open("r+b") as stream:
        root = table.read(signed, stream).entries[2]
        copy = signed.stat().st_size
        stream.seek(root.offset)
        data = stream.read(root.size_bytes)
        stream.seek(copy)
        stream.write(data)
        stream.seek(small_sif.TABLE_AT + 2 * table.DESCRIPTOR.size)
        stream.write(table.DESCRIPTOR.pack(*root._replace(offset=copy)))
    output("singularity", "verify", "--local", signed, env=keys.runtime)
    assert "descriptor of object 3" in refusal(signed, keys.keyring)


def test_two_messages_in_one_signature_are_refused(signed: Path, keys: Keys) -> None:
    data = signature(signed)
    table.delete(signed, [6])
    small_sif.sign(signed, data + b"\n" + data)
    assert "the signature is not good" in refusal(signed, keys.keyring)


def test_file_of_another_tool_is_not_trusted(sif: Path, keys: Keys) -> None:
    small_sif.write(sif, covered=False)
    output("singularity", "sign", "--key", keys.private, sif)
    assert "no coverage object" in refusal(sif, keys.public)
    with pytest.raises(CheckFailed, match="would not cover the whole file"):
        signatures.sign_sif(sif, ("--key", str(keys.private)))


def test_failed_signing_leaves_the_file(sif: Path, tmp_path: Path) -> None:
    before = sif.read_bytes()
    assert imgkit("sign", sif, "--key", tmp_path / "absent.pem").returncode == 4
    assert sif.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.sif"]


def test_verify_says_who_signed(tmp_path: Path, keys: Keys) -> None:
    (tmp_path / "tree").mkdir()
    output("mksquashfs", tmp_path / "tree", tmp_path / "root", "-all-root", "-quiet")
    sif = small_sif.write(tmp_path / "x.sif", (tmp_path / "root").read_bytes())
    assert "unsigned" in imgkit("verify", sif).stdout
    assert imgkit("verify", sif, "--keyring", keys.keyring).returncode == 1
    done = imgkit("sign", sif, "--keyidx", 0, env=keys.runtime)
    assert done.returncode == 0, done.stderr
    done = imgkit("verify", sif, "--keyring", keys.keyring)
    assert (done.returncode, "good, by friend" in done.stdout) == (0, True), done.stdout
    assert "not checked: --keyring FILE" in imgkit("verify", sif).stdout
    assert imgkit("verify", sif, "--keyring", keys.stranger).returncode == 1


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    return sample_delta.put(tmp_path / "x.imgdelta")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "x.tar"
    path.write_bytes(bytes(10240))
    sums = output("sha256sum", path).split()[0]
    about = SavedArchive(name="x.tar", size_bytes=10240, sha256=sums, compress="none")
    of = SavedImage(id="sha256:1", tag="x:1", platform="linux/amd64", diff_ids=(), labels={})
    with sidecar.replacing(Sidecar(image=of, archive=about, system=None, manifest=None), path):
        pass
    return path


def signed_by_gpg(path: Path, keys: Keys) -> Path:
    done = imgkit("sign", path, env={"GNUPGHOME": str(keys.home)})
    assert done.returncode == 0, done.stderr
    return signatures.signature_path(path)


@pytest.mark.parametrize("kind", ["delta", "archive"])
def test_detached_signature_names_the_signer(kind: str, keys: Keys, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    assert "it is unsigned" in refusal(path, keys.gpg_keyring)
    made = signed_by_gpg(path, keys)
    assert signatures.require(path, keys.gpg_keyring).name == "me <me@example.org>"
    assert "not in stranger.asc" in refusal(path, keys.stranger)
    # By hand, as the page says.
    output("gpg", "--homedir", keys.home, "--batch", "--verify", made, signatures.signed_file(path))
    with path.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"x")
    assert refusal(path, keys.gpg_keyring)


def test_manifest_of_an_archive_cannot_be_replaced(archive: Path, keys: Keys) -> None:
    signed_by_gpg(archive, keys)
    path = sidecar.json_path(archive)
    described = sidecar.read(archive)
    assert described is not None
    path.write_text(sidecar.to_json(dataclasses.replace(described, manifest=None)) + " ")
    assert "BADSIG" in refusal(archive, keys.gpg_keyring)


@pytest.mark.parametrize("way", ["--clear-sign", "--sign"])
def test_signed_mail_is_no_signature_of_a_delta(delta: Path, keys: Keys, tmp_path: Path, way: str) -> None:
    """Somebody may have signed any text; it is not the delta."""
    (tmp_path / "mail").write_text("hello")
    gpg(keys.home, "--armor", "--output", signatures.signature_path(delta), way, tmp_path / "mail")
    assert "the signature is not good" in refusal(delta, keys.gpg_keyring)


def test_packed_message_is_no_signature_of_a_sif(sif: Path, keys: Keys, tmp_path: Path) -> None:
    """gpg would unpack 64 MB from it."""
    (tmp_path / "zeros").write_bytes(bytes(64 << 20))
    gpg(keys.home, "--output", tmp_path / "packed", "--compress-level", "9", "--sign", tmp_path / "zeros")
    small_sif.sign(sif, (tmp_path / "packed").read_bytes())
    assert "not an OpenPGP clear-signed message" in refusal(sif, keys.gpg_keyring)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_signature_without_a_checksum_is_read(keys: Keys, tmp_path: Path, length: int) -> None:
    """Runtimes write none; one of these lengths leaves no padding in the base64, and gpg finds no end."""
    (tmp_path / "text").write_text("{}")
    longer = ("--sig-notation", f"a@b.org={'x' * length}")
    gpg(keys.home, "--output", tmp_path / "x", *longer, "--clear-sign", tmp_path / "text")
    lines = (tmp_path / "x").read_text().splitlines()
    bare = "\n".join(line for line in lines if not line.startswith("=")).encode()
    signer, content = clear_signed(bare, keys.gpg_keyring)
    assert (signer.name, content.strip()) == ("me <me@example.org>", b"{}")


def test_expired_key_is_refused(delta: Path, tmp_path: Path) -> None:
    home, keyring = gpg_home(tmp_path, "late", "--faked-system-time", "20200101T000000")
    made = signatures.signature_path(delta)
    past = ("--faked-system-time", "20200101T010000")
    gpg(home, *past, "--armor", "--output", made, "--detach-sign", delta)
    run("gpgconf", "--homedir", home, "--kill", "all")
    assert "EXPKEYSIG" in refusal(delta, keyring)


def test_keyring_without_a_key_is_a_usage_error(delta: Path, sif: Path, keys: Keys, tmp_path: Path) -> None:
    signed_by_gpg(delta, keys)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for keyring in (empty, tmp_path / "absent", keys.public):
        with pytest.raises(UsageError):
            signatures.require(delta, keyring)


def test_missing_gpg_is_named(delta: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    signed_by_gpg(delta, keys)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ToolMissing) as caught:
        signatures.require(delta, keys.gpg_keyring)
    assert "apt-get install gnupg" in str(caught.value.hint)


def test_apply_and_submit_refuse_strangers(signed: Path, delta: Path, keys: Keys, tmp_path: Path) -> None:
    require = ("--require-signature", keys.keyring)
    done = imgkit("apply", delta, signed, "-o", "new.sif", *require, folder=tmp_path)
    assert (done.returncode, "it is unsigned" in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "new.sif").exists()
    job = ("submit", "mn5", "--image", signed, "-A", "a", "--qos", "acc_debug", "--time", "10m")
    stranger = imgkit(*job, "--require-signature", keys.stranger, "--", "dist-hello", folder=tmp_path)
    assert (stranger.returncode, "is not in stranger.asc" in stranger.stderr) == (1, True), stranger.stderr
    known = imgkit(*job, *require, "--", "dist-hello", folder=tmp_path, env={"PATH": os.environ["PATH"]})
    assert "x.sif is signed by friend" in known.stderr


def test_json_of_sign_names_the_file(archive: Path, keys: Keys) -> None:
    done = imgkit("sign", archive, "--json", env={"GNUPGHOME": str(keys.home)})
    assert json.loads(done.stdout)["signature"] == str(signatures.signature_path(archive))


@pytest.mark.parametrize("words", [(), ("--key", "k", "--keyidx", "0"), ("--gpg-key", "x")])
def test_one_key_has_to_be_named(sif: Path, words: tuple[str, ...]) -> None:
    assert imgkit("sign", sif, *words).returncode == 2
