"""Recorded answers of apt and pip as packages of a lock, and answers that no lock can hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from imgkit_builder.lock import answers, inside
from imgkit_builder.lock.answers import Unresolved

ONIG = "59ecfce6d88c7c4b09496ce182b3b8303e8e8477664e009b16ae83a09cd12be7"
EINOPS = "54058201ac7087911181bfec4af6091bb59380360f069276601256a76af08193"


def report(text: str) -> str:
    """Return what the program in the base makes of a report of pip."""
    return json.dumps([inside.describe_package(item) for item in json.loads(text)["install"]])


def item(**download: Any) -> str:
    """Return the report of one package, flash-attn 2.5.5, from `download`."""
    metadata = {"name": "flash_attn", "version": "2.5.5"}
    return report(json.dumps({"install": [{"download_info": download, "metadata": metadata}]}))


def test_debs_that_apt_printed(apt_answer):
    jq, libjq1, libnuma1, onig = answers.read_debs(apt_answer)
    assert (libjq1.name, libnuma1.name, onig.name) == ("libjq1", "libnuma1", "libonig5")
    assert (onig.version, onig.architecture, onig.size_bytes) == ("6.9.8-1", "amd64", 187828)
    assert onig.sha256 == ONIG
    assert (jq.name, jq.version) == ("jq", "1.6-2.1+deb12u2")
    assert jq.url.startswith("http://archive.example/debian/pool/main/j/jq/jq_1.6")


def test_epoch_of_a_deb_is_part_of_its_version():
    line = f"'http://u:p@a.example/g/git_2_amd64.deb' git_1%3a2.39_amd64.deb 5 SHA256:{'b' * 64}"
    (git,) = answers.read_debs(line)
    assert (git.version, git.url) == ("1:2.39", "http://a.example/g/git_2_amd64.deb")


def test_deb_without_sha256_is_refused(apt_answer):
    with pytest.raises(Unresolved, match="no sha256 of libonig5") as error:
        answers.read_debs(apt_answer.replace("SHA256:", "MD5Sum:"))
    assert (error.value.step, error.value.packages) == ("apt", ("libonig5",))


def test_deb_of_a_local_archive_is_refused():
    line = f"'file:/srv/debs/x_1_all.deb' x_1_all.deb 5 SHA256:{'b' * 64}"
    with pytest.raises(Unresolved, match="apt takes x from file:///srv/debs/x_1_all") as error:
        answers.read_debs(line)
    assert error.value.packages == ("x",)


def test_wheels_of_a_report(pip_report):
    wheels = {wheel.name: wheel for wheel in answers.read_wheels(report(pip_report), 3, {})}
    assert list(wheels) == sorted(wheels, key=str.lower)
    assert {"einops", "requests", "PySocks", "tqdm"} <= set(wheels)
    einops = wheels["einops"]
    assert (einops.step, einops.version, einops.sha256) == (3, "0.8.2", EINOPS)
    assert [wheel.name for wheel in wheels.values() if wheel.direct] == ["tqdm"]
    assert not any(wheel.kept for wheel in wheels.values())


def test_credentials_and_fragments_are_not_in_a_lock():
    url = "https://me:word-9@index.example/f/flash_attn-2.5.5%2Bcu12-py3-none-any.whl#sha256=1"
    (wheel,) = answers.read_wheels(item(url=url, archive_info={"hashes": {"sha256": "c" * 64}}), 0, {})
    assert wheel.url == "https://index.example/f/flash_attn-2.5.5%2Bcu12-py3-none-any.whl"
    assert wheel.file == "flash_attn-2.5.5+cu12-py3-none-any.whl"


FILE = "flash_attn-2.5.5-cp311-cp311-linux_x86_64.whl"


@pytest.mark.parametrize(
    "download",
    [
        {"url": "https://i.example/flash_attn-2.5.5.tar.gz", "archive_info": {"hash": "sha256=" + "d" * 64}},
        {"url": "https://git.example/flash.git", "vcs_info": {"vcs": "git", "commit_id": "f" * 40}},
        {"url": f"file:///opt/wheels/{FILE}", "archive_info": {}},
    ],
    ids=["source", "git repository", "folder of the base"],
)
def test_wheel_that_no_index_has_must_be_kept(download):
    with pytest.raises(Unresolved, match=r"no index has a wheel of flash_attn==2\.5\.5") as error:
        answers.read_wheels(item(**download), 0, {})
    assert error.value.packages == ("flash_attn==2.5.5",)
    (wheel,) = answers.read_wheels(item(**download), 0, {FILE: "e" * 64})
    assert (wheel.file, wheel.sha256, wheel.url, wheel.kept) == (FILE, "e" * 64, "", True)


@pytest.mark.parametrize("sha256", ["b" * 64, ""])
def test_file_that_differs_from_its_index_is_refused(sha256):
    text = item(url=f"https://i.example/{FILE}", archive_info={"hashes": {"sha256": sha256}})
    with pytest.raises(Unresolved, match="no sha256, or another one than its file"):
        answers.read_wheels(text, 0, {FILE: "a" * 64})


@pytest.mark.parametrize("text", ["[1]", '[{"name": "x"}]', '[{"name": 1}]', "[", "{}"])
def test_answer_of_another_program_is_refused(text):
    with pytest.raises(ValueError, match=r"pip|JSON|Expecting"):
        answers.read_wheels(text, 0, {})
