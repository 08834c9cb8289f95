"""Recorded answers of apt and pip as packages of a lock, and answers that no lock can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from imgkit_builder.lock import answers
from imgkit_builder.lock.answers import BaseFile, Unresolved

ONIG = "59ecfce6d88c7c4b09496ce182b3b8303e8e8477664e009b16ae83a09cd12be7"
DIGEST = "d" * 64
EINOPS = "54058201ac7087911181bfec4af6091bb59380360f069276601256a76af08193"


def item(**place: Any) -> str:
    """A report of one package, flash-attn 2.5.5, from `place`."""
    metadata = {"name": "flash_attn", "version": "2.5.5"}
    return json.dumps({"install": [{"download_info": place, "is_direct": False, "metadata": metadata}]})


def test_debs_have_the_sha256_of_their_records(apt_answer: str) -> None:
    found = {one.name: one for one in answers.debs(apt_answer)}
    assert list(found) == ["jq", "libjq1", "libnuma1", "libonig5"]
    onig = found["libonig5"]
    assert (onig.version, onig.architecture, onig.size_bytes, onig.sha256) == (
        "6.9.8-1",
        "amd64",
        187828,
        ONIG,
    )
    assert found["jq"].version == "1.6-2.1+deb12u2"
    assert found["jq"].url.startswith("http://archive.example/debian/pool/main/j/jq/jq_1.6")


def test_sha256_that_apt_prints_wins(apt_answer: str) -> None:
    data = json.loads(apt_answer)
    lines = data["uris"].splitlines()
    data["uris"] = "\n".join(f"{line.rpartition(' ')[0]} SHA256:{'a' * 64}" for line in lines)
    assert {one.sha256 for one in answers.debs(json.dumps({**data, "records": ""}))} == {"a" * 64}


def test_epoch_of_a_deb_is_part_of_its_version() -> None:
    line = f"'http://u:p@a.example/g/git_2_amd64.deb' git_1%3a2.39_amd64.deb 5 SHA256:{'b' * 64}"
    (git,) = answers.debs(json.dumps({"uris": line, "records": ""}))
    assert (git.version, git.url) == ("1:2.39", "http://a.example/g/git_2_amd64.deb")


def test_deb_without_sha256_is_refused(apt_answer: str) -> None:
    data = json.loads(apt_answer)
    with pytest.raises(Unresolved) as error:
        answers.debs(json.dumps({**data, "records": data["records"].replace("SHA256", "SHA1")}))
    assert error.value.failure.kind == "no sha256"


def test_deb_of_a_local_archive_is_refused() -> None:
    line = f"'file:/srv/debs/x_1_all.deb' x_1_all.deb 5 SHA256:{'b' * 64}"
    with pytest.raises(Unresolved) as error:
        answers.debs(json.dumps({"uris": line, "records": ""}))
    assert (error.value.failure.kind, error.value.failure.about) == ("no url", "x")


def test_wheels_of_a_report(pip_report: str) -> None:
    found = {one.name: one for one in answers.wheels(pip_report, 3, {})}
    assert list(found) == sorted(found, key=str.lower)
    assert {"einops", "requests", "PySocks", "tqdm"} <= set(found)
    assert (found["einops"].step, found["einops"].version, found["einops"].sha256) == (3, "0.8.2", EINOPS)
    assert [one.name for one in found.values() if one.direct] == ["tqdm"]
    assert not any(one.kept for one in found.values())


def test_credentials_and_fragments_are_not_in_a_lock() -> None:
    digest = "c" * 64
    url = "https://me:word-9@index.example/f/flash_attn-2.5.5%2Bcu12-py3-none-any.whl#sha256=1"
    (one,) = answers.wheels(item(url=url, archive_info={"hashes": {"sha256": digest}}), 0, {})
    assert one.url == "https://index.example/f/flash_attn-2.5.5%2Bcu12-py3-none-any.whl"
    assert one.file == "flash_attn-2.5.5+cu12-py3-none-any.whl"


def test_source_needs_a_wheel_that_the_base_built() -> None:
    report = item(
        url="https://i.example/flash_attn-2.5.5.tar.gz", archive_info={"hash": "sha256=" + "d" * 64}
    )
    with pytest.raises(Unresolved) as error:
        answers.wheels(report, 0, {})
    assert (error.value.failure.kind, error.value.failure.about) == ("source", "flash_attn==2.5.5")
    built = BaseFile(name="flash_attn-2.5.5-cp311-cp311-linux_x86_64.whl", sha256="e" * 64)
    (one,) = answers.wheels(report, 0, {built.name: built})
    assert (one.file, one.sha256, one.url, one.kept) == (built.name, built.sha256, "", True)


def test_git_repository_needs_a_wheel_too() -> None:
    report = item(url="https://git.example/flash.git", vcs_info={"vcs": "git", "commit_id": "f" * 40})
    with pytest.raises(Unresolved) as error:
        answers.wheels(report, 0, {})
    assert error.value.failure.kind == "source"


def test_wheel_in_a_folder_of_the_base_must_be_kept() -> None:
    name = "flash_attn-2.5.5-py3-none-any.whl"
    report = item(url=f"file:///opt/wheels/{name}", archive_info={})
    with pytest.raises(Unresolved) as error:
        answers.wheels(report, 0, {})
    assert error.value.failure.kind == "local"
    (one,) = answers.wheels(report, 0, {name: BaseFile(name=name, sha256="e" * 64)})
    assert one.kept


def test_file_that_differs_from_its_index_is_refused() -> None:
    name = "flash_attn-2.5.5-py3-none-any.whl"
    report = item(url=f"https://i.example/{name}", archive_info={"hashes": {"sha256": "a" * 64}})
    with pytest.raises(Unresolved) as error:
        answers.wheels(report, 0, {name: BaseFile(name=name, sha256="b" * 64)})
    assert error.value.failure.kind == "no sha256"
