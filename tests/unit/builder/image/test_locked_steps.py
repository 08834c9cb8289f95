"""The files of a locked build: which packages, from where, and what apt would have added by itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sample_lock import locked_deb, locked_platform, locked_wheel

from imgkit_builder.image import install
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import LockedStep, LockRequest, Recipe

DEB = locked_deb("jq", "1.6", url="http://mirror.example.org/debian/pool/main/j/jq/jq_1.6%2b_amd64.deb")
WHEEL = locked_wheel("rich", "15.0")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe with jq in a version, a requirements file, and its lock."""
    (tmp_path / "needed.txt").write_text("--extra-index-url https://index.example.org/simple\nrich\n")
    file = tmp_path / "mine.yaml"
    file.write_text("image: {base: 'a:1', apt: ['jq=1.6'], pip: [{requirements: needed.txt}]}\n")
    lock = locked_platform(
        request=LockRequest(base="a:1", pip=(LockedStep(),)),
        apt=(DEB, locked_deb("libjq1", "1.6")),
        pip=(WHEEL,),
    )
    return dataclasses.replace(load(file), lock=lock)


@pytest.mark.parametrize(
    ("url", "snapshot"),
    [
        (DEB.url, "https://snapshot.debian.org/archive/debian/{}/pool/main/j/jq/jq_1.6%2b_amd64.deb"),
        (
            "http://security.example.org/debian-security/pool/updates/x.deb",
            "https://snapshot.debian.org/archive/debian-security/{}/pool/updates/x.deb",
        ),
        (
            "http://archive.example.org/ubuntu/pool/main/x.deb",
            "https://snapshot.ubuntu.com/ubuntu/{}/pool/main/x.deb",
        ),
    ],
)
def test_snapshot_service_is_that_of_the_distribution(url, snapshot):
    urls = install.snapshot_urls(dataclasses.replace(DEB, url=url), 1700000000)
    assert urls == (snapshot.format("20231114T221320Z"), snapshot.format("20231115T221320Z"))


def test_package_of_a_vendor_has_no_snapshot():
    url = "https://vendor.example.org/compute/repos/ubuntu2204/x86_64/x.deb"
    assert install.snapshot_urls(dataclasses.replace(DEB, url=url), 1700000000) == ()


def test_packages_that_the_recipe_does_not_name_are_automatic(recipe):
    first, second = install.render_apt_list(recipe).splitlines()
    assert first.split()[:4] == ["a" * 64, "jq_1.6_amd64.deb", "manual", "jq:amd64"]
    assert second.split()[:4] == ["a" * 64, "libjq1_1.6_amd64.deb", "auto", "libjq1:amd64"]


def test_requirements_keep_the_options_of_the_recipes_file(recipe):
    assert install.render_requirements(recipe, 0) == (
        "--extra-index-url https://index.example.org/simple\n" + f"rich==15.0 --hash=sha256:{WHEEL.sha256}\n"
    )


def test_kept_wheels_need_no_index(recipe):
    assert "--no-index" not in install.locked_pip_options(recipe, 0)
    options = install.locked_pip_options(dataclasses.replace(recipe, kept={WHEEL.file: Path("any")}), 0)
    assert "--no-index" in options
    assert "--find-links /opt/imgkit/locked-pip-0" in options
