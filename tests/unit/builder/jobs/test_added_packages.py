"""Files with packages in jobs of this machine, and the key ``packages`` of imgkit.toml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from imgkit_builder.base import files
from imgkit_builder.jobs import added_packages
from imgkit_builder.packages import record
from imgkit_builder.packages.record import PackagesRecord

SITE = ("-A", "bsc98", "--qos", "acc_debug", "--time", "10m", "--dry-run")


def write_packages(image: Path, file: Path, *, digest: str = "") -> None:
    """Write an image and a file with packages for it, as far as a job on another machine looks at them."""
    image.write_bytes(b"hsqs")
    file.write_bytes(b"hsqs")
    stored = PackagesRecord(
        imgkit="0.4.0",
        image=image.name,
        image_digest=digest or record.image_digest(image),
        image_id="",
        arch="amd64",
        python="3.10.12",
        arguments=("lib",),
        packages=(),
        modules=("lib",),
        squashfs_sha256="",
    )
    files.append_file(file, record.to_bytes(stored))


def script(call: Any, *args: str) -> str:
    status, out, err = call("run", *SITE, "--json", *args)
    assert status == 0, err
    return str(json.loads(out)["script"].replace("\\\n", ""))


def test_packages_of_the_project_are_one_file_beside_it(call, home):
    file = home / "imgkit.toml"
    file.write_text('recipe = "mn5"\npackages = ["einops", "omegaconf>=2.3"]\n')
    name = added_packages.file_name("mn5.sif", ("einops", "omegaconf>=2.3"))
    text = script(call, "--", "dist-run", "train.py")
    assert f"{home}/{name}:/run/imgkit/packages/1:image-src=/,ro" in text
    file.write_text('recipe = "mn5"\npackages = ["einops", "omegaconf"]\n')
    assert name not in script(call, "--", "dist-run", "train.py")


def test_flag_replaces_the_key(call, home):
    (home / "imgkit.toml").write_text('recipe = "mn5"\npackages = ["einops"]\n')
    status, out, _ = call("run", *SITE, "-v", "--json", "--packages", "/a/x.sqsh", "--", "dist-hello")
    assert status == 0
    document = json.loads(out)
    assert "/a/x.sqsh:/run/imgkit/packages/1" in document["script"]
    assert "/run/imgkit/packages/2" not in document["script"]
    rows = [row for row in document["values"] if row["name"] == "packages"]
    assert [(row["value"], row["source"]) for row in rows] == [("/a/x.sqsh", "--packages")]


def test_file_for_another_image_is_refused(call, home):
    write_packages(home / "x.sif", home / "x+1.sqsh", digest="of another image")
    args = ("--image", "x.sif", "--packages", "x+1.sqsh", "--", "dist-hello")
    status, _, err = call("run", "mn5", *SITE, *args)
    assert status == 2
    assert "x+1.sqsh was made for another image" in err
    assert f"-> imgkit add lib --image {home}/x.sif -o {home}/x+1.sqsh" in err


def test_dist_train_refuses_a_model_of_the_packages(call, home):
    write_packages(home / "x.sif", home / "x+1.sqsh")
    job = ("run", "mn5", *SITE, "--image", "x.sif", "--packages", "x+1.sqsh", "--", "dist-train")
    status, _, err = call(*job, "--model", "lib.vision:build")
    assert status == 2
    assert "dist-train does not see lib: its Python ignores PYTHONPATH" in err
    assert call(*job, "--model", "other.vision:build")[0] == 0
