"""The command line of imgkit lock, and what it writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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
def part(recipe: Recipe) -> LockedPlatform:
    return locked_platform(
        request=lock_file.make_request(recipe),
        base=LockedBase(name="registry.invalid/base:1", id=f"sha256:{'c' * 64}"),
        apt=(locked_deb("jq", "1.6"),),
        pip=(locked_wheel("einops", "0.8.1"), locked_wheel("tqdm", "4.1")),
    )


def resolution(
    recipe: Recipe, old: LockedPlatform | None = None, options: LockOptions | None = None
) -> Resolution:
    return Resolution(
        recipe=recipe,
        request=lock_file.make_request(recipe),
        base=BaseImage(name="registry.invalid/base:1", platform="linux/amd64"),
        old=old,
        options=options or LockOptions(),
    )


def order(recipe: Recipe, part: LockedPlatform | None, options: LockOptions) -> dict[str, Any]:
    """Return what the program in the base reads."""
    context = resolve.pack_request(resolution(recipe, part, options))
    (member,) = (member for member in context.members if member.name.endswith("order.json"))
    content: dict[str, Any] = json.loads(member.data)
    return content


def test_locked_versions_stay(recipe: Recipe, part: LockedPlatform) -> None:
    content = order(recipe, part, LockOptions())
    assert content["steps"]["0"]["pins"] == {"einops": "0.8.1", "tqdm": "4.1"}
    assert content["debs"] == [["jq", "1.6"]]


def test_upgrade_frees_the_named_packages_only(recipe: Recipe, part: LockedPlatform) -> None:
    content = order(recipe, part, LockOptions(upgrade=True, packages=("TQDM", "jq")))
    assert content["steps"]["0"]["pins"] == {"einops": "0.8.1"}
    assert content["debs"] == []


def test_upgrade_of_all_frees_all(recipe: Recipe, part: LockedPlatform) -> None:
    assert order(recipe, part, LockOptions(upgrade=True))["steps"]["0"]["pins"] == {}


def test_base_is_asked_with_the_constraints_of_a_build(recipe: Recipe) -> None:
    context = resolve.pack_request(resolution(recipe))
    arguments = context.dockerfile.partition("inside.py 0 install")[2]
    assert "--constraint /opt/imgkit/constraint.txt" in arguments
    assert "python3 -m pip list --format=freeze" in context.dockerfile


def test_changes_are_named_old_and_new(part: LockedPlatform) -> None:
    new = dataclasses.replace(
        part, pip=(locked_wheel("einops", "0.8.2"), locked_wheel("rich", "1.0")), apt=()
    )
    lines = [str(change) for change in changes.list_changes(part, new) if change.kind != "file"]
    assert lines == [
        "pip   einops  0.8.1 -> 0.8.2",
        "pip   rich  1.0",
        "apt   jq:amd64  1.6, removed",
        "pip   tqdm  4.1, removed",
    ]


def test_time_alone_is_no_change(part: LockedPlatform) -> None:
    assert changes.is_same(part, dataclasses.replace(part, source_date_epoch=5))
    assert not changes.is_same(None, part)


def test_files_lie_beside_the_lock_and_old_ones_go(
    recipe: Recipe, part: LockedPlatform, tmp_path: Path
) -> None:
    built = tmp_path / "built"
    built.mkdir()
    part = dataclasses.replace(part, pip=(locked_wheel("einops", "0.8.1", kept=True),), apt=())
    (built / part.pip[0].file).write_text("one")
    file = lock_file.lock_path(recipe)
    resolve.write_lock(recipe, file, None, part, built)
    assert lock_file.read_lock(file).platforms == (part,)
    assert resolve.find_kept_wheels(file, part) == {
        part.pip[0].file: tmp_path / "mine.lock.files" / part.pip[0].file
    }
    new = dataclasses.replace(part, pip=(locked_wheel("einops", "0.8.2", kept=True),))
    (built / new.pip[0].file).write_text("two")
    resolve.write_lock(recipe, file, lock_file.read_lock(file), new, built)
    assert [file.name for file in (tmp_path / "mine.lock.files").iterdir()] == [new.pip[0].file]


def test_answer_of_a_base_that_no_lock_may_hold_is_not_written(recipe: Recipe, part: LockedPlatform) -> None:
    forged = dataclasses.replace(part, pip=(dataclasses.replace(part.pip[0], url="https://${HOME}/a.whl"),))
    with pytest.raises(UsageError, match=r"platforms\[0\]\.pip\[0\]\.url: .* must be a URL"):
        resolve.write_lock(recipe, lock_file.lock_path(recipe), None, forged, None)
    assert not lock_file.lock_path(recipe).exists()


def test_missing_kept_wheel_is_named(recipe: Recipe, part: LockedPlatform) -> None:
    part = dataclasses.replace(part, pip=(locked_wheel("einops", "0.8.1", kept=True),))
    with pytest.raises(UsageError, match=r"einops-0\.8\.1-py3-none-any\.whl is missing"):
        resolve.find_kept_wheels(lock_file.lock_path(recipe), part)


def test_folder_that_cannot_be_written_is_named_before_the_base_is_asked(
    recipe: Recipe, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    code, _, err = call("lock", str(recipe.file))
    assert code == 2
    assert err.startswith(f"imgkit: {recipe.file.parent}: no permission to write the lock here\n")


def test_lock_that_fits_the_recipe_passes_its_check(recipe: Recipe, part: LockedPlatform, call: Any) -> None:
    resolve.write_lock(recipe, lock_file.lock_path(recipe), None, part, None)
    assert call("lock", str(recipe.file), "--check", "--platform", "linux/amd64")[0] == 0


@pytest.mark.parametrize(
    ("answer", "fault"),
    [("[1]", "cannot be read: "), (None, "is missing: ")],
)
def test_wrong_answer_names_the_log(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, fault: str
) -> None:
    def store_files(engine: object, ref: str, source: str, folder: Path, **_: object) -> None:
        (folder / "apt.txt").write_text("")
        if answer is not None:
            (folder / "pip-0.json").write_text(answer)

    built = SimpleNamespace(log="/x.log", image=SimpleNamespace(ref="lock:1"))
    monkeypatch.setattr(resolve.engines, "build", lambda *_, **__: built)
    monkeypatch.setattr(resolve.image_source, "store_files", store_files)
    monkeypatch.setattr(resolve.images, "remove_image", lambda *_: None)
    folder = tmp_path / "answers"
    folder.mkdir()
    engine: Any = None
    with pytest.raises(ToolFailed, match=f"an answer of the base {fault}") as caught:
        resolve.resolve_packages(
            engine,
            resolution(recipe),
            builder="auto",
            values=SecretValues(),
            folder=folder,
            report=Silent(),
        )
    assert caught.value.hint == "full log: /x.log"
