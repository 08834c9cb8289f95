"""The list of packages: what dpkg and Python say inside the image, and the same from every form of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from labkit import IMGKIT, docker, imgkit, in_image, output

from imgkit_builder.inventory.collector import SPDX_PATH
from imgkit_builder.sif import unsquash

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("line")]

DISTRIBUTIONS = """
import importlib.metadata as m
for one in m.distributions():
    print(one.metadata["Name"], one.version)
"""


def listed(name, *options):
    return output(*IMGKIT, "sbom", name, *options)


def pairs(document, kind):
    """Name and version of the packages whose package URL is of `kind`."""
    packages: list[dict[str, Any]] = json.loads(document)["packages"]
    return {
        (package["name"], package["versionInfo"])
        for package in packages
        for reference in package.get("externalRefs", ())
        if reference["referenceLocator"].startswith(f"pkg:{kind}/")
    }


def word_pairs(name, *argv):
    """Return the lines of two words that a command prints inside the image."""
    result = in_image(name, *argv, options=("--entrypoint", ""))
    assert result.returncode == 0, result.stderr
    rows = (line.split() for line in result.stdout.splitlines())
    return {(row[0], row[1]) for row in rows if len(row) == 2}


@pytest.fixture(scope="module")
def document(mn5_sif):
    return listed(mn5_sif)


def test_document_lies_in_the_sif(mn5_sif, document):
    assert unsquash.read(mn5_sif, [SPDX_PATH])[SPDX_PATH].decode() == document


def test_packages_are_those_of_dpkg_and_python(mn5_image, document):
    debian = word_pairs(mn5_image, "dpkg-query", "-W", "-f", "${Package} ${Version}\n")
    assert len(debian) > 50
    assert pairs(document, "deb") == debian
    python = word_pairs(mn5_image, "python3", "-c", DISTRIBUTIONS)
    assert ("torch", dict(python)["torch"]) in python
    assert pairs(document, "pypi") == python
    text = in_image(
        mn5_image, "python3", "-m", "pip", "list", "--format", "freeze", options=("--entrypoint", "")
    )
    freeze = {tuple(line.split("==")) for line in text.stdout.splitlines() if "==" in line}
    assert freeze <= pairs(document, "pypi")
    assert {name for name, _ in freeze} == {name for name, _ in pairs(document, "pypi")}


def test_image_and_sif_have_the_same_list(mn5_image, document):
    assert listed(mn5_image) == document


def test_list_names_image_base_and_own_files(mn5_image, document):
    data = json.loads(document)
    labels = json.loads(docker("inspect", mn5_image, "--format", "{{json .Config.Labels}}"))
    created = docker("inspect", mn5_image, "--format", "{{.Created}}")
    assert data["creationInfo"]["created"] == f"{created[:19]}Z"
    base = next(package for package in data["packages"] if package["SPDXID"] == "SPDXRef-Base")
    assert base["versionInfo"] == labels["org.opencontainers.image.base.digest"]
    names = [file["fileName"] for file in data["files"]]
    assert "./opt/imgkit/manifest.json" in names
    assert not any("sbom" in name for name in names)
    assert not re.search(r"/tmp/|localhost", document)


def test_output_file_has_the_document(mn5_sif, document, tmp_path):
    target = tmp_path / "a list.json"
    assert listed(mn5_sif, "-o", target) == ""
    assert target.read_text() == document


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("no.sif", 1, "there is no such file"),
        ("no.tar", 2, "there is no such archive"),
        ("-", 1, "standard input"),
        ("imgkit.local/no-such-image:1", 2, "no-such-image"),
    ],
)
def test_missing_image_refused(name, code, expected, tmp_path):
    result = imgkit("sbom", name, "-o", "x.json", folder=tmp_path)
    assert (result.returncode, result.stdout) == (code, "")
    assert expected in result.stderr
    assert list(tmp_path.iterdir()) == []
