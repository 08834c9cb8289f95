"""The smoke test's verdicts, from what programs inside an image print."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from imgkit_builder.base.checks import Check, passed
from imgkit_builder.base.process import Finished
from imgkit_builder.image import inside, smoke
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import MANIFEST_JSON, BaseImage, Manifest, Probe
from imgkit_entrypoints import system

PROBE = Probe(
    python="3.10.12", torch="2.3.0a0+nv24.03", cuda="12.4", nccl="2.20.5", pip_conflicts=("old: a needs b",)
)
MANIFEST = Manifest(
    imgkit="0.3.0",
    recipe="mn5",
    recipe_sha256="1" * 64,
    base=BaseImage(name="base:1", platform="linux/amd64", probe=PROBE),
    platform="linux/amd64",
    wheel_sha256="2" * 64,
)
GOOD: dict[str, Any] = {
    "machine": "x86_64",
    "python": "3.10.12",
    "torch": PROBE.torch,
    "torch_error": "",
    "cuda": "12.4",
    "nccl": "2.20.5",
    "pip_conflicts": ["old: a needs b"],
    "files": {
        MANIFEST_JSON: manifests.to_json(MANIFEST),
        str(system.SYSTEM_JSON): system.to_json(system.SystemFacts(title="MareNostrum 5")),
    },
}


def finished(output: str, returncode: int = 0) -> Finished:
    return Finished(argv=("program",), returncode=returncode, output=output)


DIST_ENV = finished('a warning\n{"schema": 1}\n')


def checks(
    *, arch: str = "amd64", manifest: Manifest | None = MANIFEST, env: Finished = DIST_ENV, **seen: Any
) -> dict[str, Check]:
    def run(argv: Sequence[str]) -> Finished:
        if argv[0] == "dist-env":
            return env
        return finished("banner\nIMGKIT-SEEN " + json.dumps({**GOOD, **seen}) + "\nbye\n")

    return {check.name: check for check in smoke.check_image(run, arch=arch, manifest=manifest)}


def failures(**options: Any) -> list[str]:
    return [name for name, check in checks(**options).items() if check.verdict == "fail"]


def test_good_image_passes():
    results = checks()
    assert passed(tuple(results.values()))
    assert list(results) == ["arch", "python", "torch", "nccl", "pip", "manifest", "system", "dist-env"]


@pytest.mark.parametrize(
    ("seen", "failed"),
    [
        ({"machine": "aarch64"}, "arch"),
        ({"python": "3.8.10"}, "python"),
        ({"torch": "2.9.0+cu128"}, "torch"),
        ({"torch": "", "cuda": "", "torch_error": "OSError('libcudart.so.12')"}, "torch"),
        ({"nccl": "2.27.3"}, "nccl"),
        ({"pip_conflicts": ["old: a needs b", "new: c needs d"]}, "pip"),
        ({"files": {}}, "manifest"),
        ({"files": {**GOOD["files"], MANIFEST_JSON: "{}"}}, "manifest"),
        ({"files": {**GOOD["files"], str(system.SYSTEM_JSON): "no json"}}, "system"),
    ],
)
def test_each_fault_fails_its_check(seen, failed):
    assert failed in failures(**seen)


@pytest.mark.parametrize(
    ("returncode", "output"),
    [(127, "dist-env: not found"), (0, "no object"), (0, '{"cut": '), (1, '{"schema": 1}')],
)
def test_broken_dist_env_fails(returncode, output):
    assert failures(env=finished(output, returncode)) == ["dist-env"]


def test_manifest_of_other_build_fails():
    manifest = dataclasses.replace(MANIFEST, recipe_sha256="9" * 64)
    assert failures(manifest=manifest) == ["manifest"]


def test_baked_manifest_is_the_measure_without_one():
    assert failures(manifest=None) == []
    assert failures(manifest=None, torch="1.0") == ["torch"]


def test_image_without_torch_is_skipped():
    bare = dataclasses.replace(MANIFEST, base=BaseImage(name="debian", probe=Probe(python="3.11.2")))
    files = {**GOOD["files"], MANIFEST_JSON: manifests.to_json(bare)}
    results = checks(manifest=bare, torch="", cuda="", nccl="", pip_conflicts=[], files=files)
    assert results["torch"].verdict == results["nccl"].verdict == "skip"
    assert passed(tuple(results.values()))


def test_lost_torch_is_no_skip():
    assert failures(torch="", cuda="", nccl="") == ["torch", "nccl"]


def test_silent_python_is_one_failure():
    silent = finished("exec /usr/bin/python3: exec format error\n", 1)
    (only,) = smoke.check_image(lambda argv: silent, arch="amd64", manifest=None)
    assert only.verdict == "fail"
    assert "exec format error" in only.found


def test_program_tells_about_this_python(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    _, *argv = inside.probe_argv(str(file), str(tmp_path / "absent"))
    process = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=True)
    seen = inside.parse_probe("noise\n" + process.stdout)
    assert seen is not None
    assert seen.python == platform.python_version()
    assert seen.files == {str(file): "text"}


@pytest.mark.parametrize("output", ["", "IMGKIT-SEEN {cut", 'IMGKIT-SEEN {"machine": "x86_64"}'])
def test_partial_answer_is_none(output):
    assert inside.parse_probe(output) is None
