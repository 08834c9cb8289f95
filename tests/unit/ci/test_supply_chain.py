"""CI runs what a digest names, installs what a hash names, and shows a token to one step."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[3]
LOCKED = ROOT / "ci/lab/locked"
GITHUB = yaml.safe_load((ROOT / "ci/pipelines/github.yml").read_text(encoding="utf-8"))
GITLAB = yaml.safe_load((ROOT / "ci/pipelines/gitlab.yml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {"run": (), "dev": ("dev",), "docs": ("docs",)}


def steps():
    for job in GITHUB["jobs"].values():
        yield from job["steps"]


def test_actions_and_images_are_named_by_digest():
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)] == []
    images = [job["container"]["image"] for job in GITHUB["jobs"].values() if "container" in job]
    assert images
    assert [image for image in images if not re.search(r"@sha256:[0-9a-f]{64}$", image)] == []
    assert "image" not in GITLAB, "a shell executor needs none"


def test_pipelines_may_read_and_one_job_may_push():
    assert GITHUB["permissions"] == {"contents": "read"}
    granted = {name: job["permissions"] for name, job in GITHUB["jobs"].items() if "permissions" in job}
    assert granted == {"image": {"contents": "read", "packages": "write"}}
    assert "pull_request" in GITHUB["jobs"]["image"]["if"], "a stranger's change gets no token that may write"
    checkouts = [step for step in steps() if "checkout" in step.get("uses", "")]
    assert checkouts
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_token_is_seen_by_the_step_that_pushes_alone():
    seen = [step["name"] for step in steps() if "secrets." in str(step)]
    assert seen == ["push"]
    outside = {key: value for key, value in GITHUB.items() if key != "jobs"}
    jobs = [{key: value for key, value in job.items() if key != "steps"} for job in GITHUB["jobs"].values()]
    assert "secrets." not in f"{outside} {jobs}"
    jobs_with_it = [name for name, job in GITLAB.items() if "CI_REGISTRY_PASSWORD" in str(job)]
    assert jobs_with_it == ["push"]


def locked(name):
    """The packages of a list, each with its number of hashes."""
    text = (LOCKED / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield Requirement(line.split(" --hash", 1)[0].strip()), line.count("--hash=sha256:")


@pytest.mark.parametrize("name", ["run", "dev", "docs", "uv"])
def test_every_locked_package_has_one_version_and_hashes(name):
    packages = list(locked(name))
    assert packages
    for requirement, hashes in packages:
        assert hashes, requirement
        assert str(requirement.specifier).startswith("=="), requirement


PYTHONS = {
    "run": ("3.10", "3.11", "3.12", "3.13"),
    "dev": ("3.10", "3.11", "3.12", "3.13"),
    "docs": ("3.11", "3.13"),
}


@pytest.mark.parametrize(
    ("name", "python"), [(name, python) for name, versions in PYTHONS.items() for python in versions]
)
def test_lock_holds_what_the_project_asks_for(name, python):
    requirements = [
        *PROJECT["dependencies"],
        *(text for extra in EXTRAS[name] for text in PROJECT["optional-dependencies"][extra]),
    ]
    for system in ("linux", "darwin"):
        environment = {
            **default_environment(),
            "python_version": python,
            "python_full_version": f"{python}.5",
        }
        environment |= {"sys_platform": system, "platform_system": system.title()}
        versions = {
            canonicalize_name(package.name): str(package.specifier).removeprefix("==")
            for package, _ in locked(name)
            if package.marker is None or package.marker.evaluate(environment)
        }
        for text in (*requirements, "hatchling"):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                version = versions.get(canonicalize_name(requirement.name))
                assert version, f"{requirement.name} is not in ci/lab/locked/{name}.txt: ci/lab/lock"
                assert requirement.specifier.contains(version, prereleases=True), (
                    f"{requirement} is not {version}: ci/lab/lock"
                )


def test_environment_takes_nothing_without_a_hash():
    text = (ROOT / "ci/lab/venv").read_text(encoding="utf-8")
    installs = [line for line in text.splitlines() if line.startswith(('"${pip[@]}" install', '"${uv[@]}"'))]
    assert len(installs) == 3
    assert all("--require-hashes" in line or "--no-deps --no-build-isolation" in line for line in installs)


def test_unknown_extra_names_the_lists():
    result = subprocess.run(
        [ROOT / "ci/lab/venv", "--extra", "nothing", "/nonexistent/venv"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "dev.txt" in result.stderr
