"""The command line of imgkit lock, and what it writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from file_tree import write_files
from packed_context import own_file
from sample_lock import locked_deb, locked_platform, locked_wheel

from imgkit_builder.base.progress import Silent
from imgkit_builder.image.secret_values import SecretValues
from imgkit_builder.lock import changes, resolve
from imgkit_builder.lock.resolve import LockOptions, Resolution
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import LockedBase, LockedPlatform, Recipe
from imgkit_entrypoints.errors import ToolFailed, UsageError

RECIPE = """\
image:
  base: registry.invalid/base:1
  apt: [jq]
  pip:
    - packages: [einops, tqdm]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return load(str(tmp_path / "mine.yaml"))


@pytest.fixture
def packages(recipe: Recipe) -> LockedPlatform:
    return locked_platform(
        request=lock_file.make_request(recipe),
        base=LockedBase(name="registry.invalid/base:1", id=f"sha256:{'c' * 64}"),
        apt=(locked_deb("jq", "1.6"),),
        pip=(locked_wheel("einops", "0.8.1"), locked_wheel("tqdm", "4.1")),
    )


def resolution(recipe: Recipe, **fields: Any) -> Resolution:
    base = BaseImage(name="registry.invalid/base:1", platform="linux/amd64")
    return Resolution(recipe=recipe, request=lock_file.make_request(recipe), base=base, **fields)


@pytest.mark.parametrize(
    ("options", "pins", "debs"),
    [
        (LockOptions(), {"einops": "0.8.1", "tqdm": "4.1"}, [["jq", "1.6"]]),
        (LockOptions(upgrade=True, packages=("TQDM", "jq")), {"einops": "0.8.1"}, []),
        (LockOptions(upgrade=True), {}, []),
    ],
    ids=["stay", "upgrade of two", "upgrade of all"],
)
def test_locked_versions_stay_unless_they_are_upgraded(
    recipe,
    packages,
    options,
    pins,
    debs,
):
    context = resolve.pack_request(resolution(recipe, old_lock=packages, options=options))
    content = json.loads(own_file(context, "imgkit/lock/settings.json"))
    assert (content["steps"]["0"]["pins"], content["debs"]) == (pins, debs)


def test_base_is_asked_with_the_constraints_of_a_build(recipe):
    context = resolve.pack_request(resolution(recipe))
    arguments = context.dockerfile.partition("inside.py 0 install")[2]
    assert "--constraint /opt/imgkit/constraint.txt" in arguments
    assert "python3 -m pip list --format=freeze" in context.dockerfile


def test_changes_are_named_old_and_new(packages):
    new = dataclasses.replace(
        packages, pip=(locked_wheel("einops", "0.8.2"), locked_wheel("rich", "1.0")), apt=()
    )
    lines = [str(change) for change in changes.list_changes(packages, new) if change.kind != "file"]
    assert lines == [
        "pip   einops  0.8.1 -> 0.8.2",
        "pip   rich  1.0",
        "apt   jq:amd64  1.6, removed",
        "pip   tqdm  4.1, removed",
    ]


def test_time_alone_is_no_change(packages):
    assert changes.is_same(packages, dataclasses.replace(packages, source_date_epoch=5))
    assert not changes.is_same(None, packages)


def test_files_lie_beside_the_lock_and_old_ones_go(recipe, packages, tmp_path):
    file = lock_file.lock_path(recipe)
    kept = tmp_path / "mine.lock.files"
    lock = None
    for version in ("0.8.1", "0.8.2"):
        wheel = locked_wheel("einops", version, kept=True)
        packages = dataclasses.replace(packages, pip=(wheel,), apt=())
        built = write_files(tmp_path / "built", {wheel.file: version})
        resolve.write_lock(recipe, file, lock, packages, built)
        lock = lock_file.read_lock(file)
        assert lock.platforms == (packages,)
        assert resolve.find_kept_wheels(file, packages) == {wheel.file: kept / wheel.file}
        assert [path.name for path in kept.iterdir()] == [wheel.file]


def test_answer_of_a_base_that_no_lock_may_hold_is_not_written(recipe, packages):
    forged = dataclasses.replace(
        packages, pip=(dataclasses.replace(packages.pip[0], url="https://${HOME}/a.whl"),)
    )
    with pytest.raises(UsageError, match=r"platforms\[0\]\.pip\[0\]\.url: .* must be a URL"):
        resolve.write_lock(recipe, lock_file.lock_path(recipe), None, forged, None)
    assert not lock_file.lock_path(recipe).exists()


def test_missing_kept_wheel_is_named(recipe, packages):
    packages = dataclasses.replace(packages, pip=(locked_wheel("einops", "0.8.1", kept=True),))
    with pytest.raises(UsageError, match=r"einops-0\.8\.1-py3-none-any\.whl is missing"):
        resolve.find_kept_wheels(lock_file.lock_path(recipe), packages)


def test_folder_that_cannot_be_written_is_named_before_the_base_is_asked(recipe, call, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    code, _, err = call("lock", str(recipe.file))
    assert code == 2
    assert err.startswith(f"imgkit: {recipe.file.parent}: no permission to write the lock here\n")


def test_lock_that_fits_the_recipe_passes_its_check(recipe, packages, call):
    resolve.write_lock(recipe, lock_file.lock_path(recipe), None, packages, None)
    assert call("lock", str(recipe.file), "--check", "--platform", "linux/amd64")[0] == 0


@pytest.mark.parametrize(
    ("answer", "fault"),
    [("[1]", "cannot be read: "), (None, "is missing: ")],
)
def test_wrong_answer_names_the_log(recipe, tmp_path, monkeypatch, answer, fault):
    def store_files(engine: object, ref: str, source: str, folder: Path, **_: object) -> None:
        (folder / "apt.txt").write_text("")
        if answer is not None:
            (folder / "pip-0.json").write_text(answer)

    built = SimpleNamespace(log="/x.log", image=SimpleNamespace(ref="lock:1"))
    monkeypatch.setattr(resolve.engines, "build", lambda *_, **__: built)
    monkeypatch.setattr(resolve.image_source, "store_files", store_files)
    monkeypatch.setattr(resolve.images, "remove_image", lambda *_: None)
    options: Any = {"builder": "auto", "values": SecretValues(), "folder": tmp_path, "report": Silent()}
    with pytest.raises(ToolFailed, match=f"an answer of the base {fault}") as caught:
        resolve.resolve_packages(None, resolution(recipe), **options)  # type: ignore[arg-type]
    assert caught.value.hint == "full log: /x.log"
