"""A container in which the run's copy of its code is missing is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from file_tree import write_files

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.launch import run_code

LINE = "1209 1207 8:17 /me/runs/x-7/workspace {} rw,relatime master:9 - ext4 /dev/sdb1 rw"


def env(root: Path, mount_point: str) -> dict[str, str]:
    write_files(root, {"/proc/self/mountinfo": LINE.format(mount_point)})
    return {"IMGKIT_ROOT": str(root), "IMGKIT_CODE": "abc"}


def test_mounted_copy_is_accepted(tmp_path: Path) -> None:
    run_code.refuse_missing_code(env(tmp_path, "/workspace"))


@pytest.mark.parametrize("mount_point", ["/workspace/data", "/scratch"])
def test_missing_copy_is_refused(tmp_path: Path, mount_point: str) -> None:
    with pytest.raises(NoPlan) as caught:
        run_code.refuse_missing_code(env(tmp_path, mount_point))
    assert str(caught.value) == (
        "IMGKIT_CODE=abc: the run's copy of the code is not mounted at /workspace\n"
        "  -> if an admin has set `user bind control = no`, no folder can be mounted: build the code into "
        "the image (image.copy), and submit with --no-code"
    )


def test_job_without_code_is_not_checked(tmp_path: Path) -> None:
    variables = env(tmp_path, "/scratch")
    del variables["IMGKIT_CODE"]
    run_code.refuse_missing_code(variables)
