"""A second build asks the engine two questions, and loads no SDK, until anything changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_answers import said
from typer.testing import CliRunner

import imgkit_recipes
from imgkit_builder.cli.app import build_app
from imgkit_builder.engine import unchanged
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Lock, LockedBase, LockedPlatform

BASE = "registry.test/base:1"
HEAVY = ("docker", "requests", "pydantic", "yaml", "jinja2", "rich", "spython")
"""What takes most of the time of a start."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe over a parent that only extends, with requirements, code and a git-ignored file."""
    place = tmp_path / "work"
    (place / "code" / "inner").mkdir(parents=True)
    (place / "code" / "train.py").write_text("print(1)\n")
    (place / "code" / "inner" / "data.txt").write_text("one\n")
    (place / "code" / ".gitignore").write_text("*.log\n")
    (place / "code" / "run.log").write_text("x\n")
    (place / "needs.txt").write_text("einops==0.8.0\n")
    (place / "first.yaml").write_text(f"image:\n  base: {BASE}\n")
    (place / "middle.yaml").write_text("extends: ./first.yaml\n")
    (place / "small.yaml").write_text(
        "extends: ./middle.yaml\nimage:\n  pip: [{requirements: needs.txt}]\n"
        "  copy: [{source: code, target: /workspace/code}]\n"
    )
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def engine(fake: Any, folder: Path, container_says: Callable[[str, int], None]) -> Any:
    """An engine that has the base, builds at once, and keeps the result."""
    container_says(said(), 0)
    fake.on_image(BASE, fake.image(identifier="sha256:" + "b" * 64, tags=[BASE]))
    fake.on("POST", "/build", fake.events({"aux": {"ID": fake.image_id}}))
    fake.on_image(fake.image_id, fake.image())
    fake.on_image("small:latest", fake.image(tags=["small:latest"]))
    return fake


def build(*words: str) -> Any:
    result = CliRunner().invoke(build_app(("build",)), ["build", "./small.yaml", "--no-test", *words])
    assert result.exit_code == 0, result.output
    return result


def is_hit(engine: Any, *words: str) -> bool:
    """Whether a further build with `words` asks the engine to build nothing."""
    before = len(engine.requests("POST /build"))
    build(*words)
    return len(engine.requests("POST /build")) == before


def test_second_build_gives_the_same_answer(engine: Any) -> None:
    first = build()
    before = len(engine.seen)
    second = build()
    assert second.stdout == first.stdout
    assert "small:latest is up to date" in second.stderr
    assert "run.log (git" in second.stderr
    # One question each for the base and the image.
    assert [str(one) for one in engine.seen[before:]] == [
        f"GET /images/{BASE}/json",
        "GET /images/small:latest/json",
    ]


def test_second_build_says_so_in_json(engine: Any) -> None:
    first, second = (json.loads(build("--json").stdout) for _ in range(2))
    assert (first.pop("up_to_date"), second.pop("up_to_date")) == (False, True)
    assert second == first


def test_warnings_of_the_recipe_come_again(engine: Any, folder: Path) -> None:
    with (folder / "small.yaml").open("a") as recipe:
        recipe.write("  env: {API_TOKEN: hf_abcdefghijklmnopqrstuvwxyzABCDEFGH}\n")
    first, second = build(), build()
    (said,) = (line for line in first.stderr.splitlines() if "warning:" in line)
    assert said in second.stderr.splitlines()


def test_hit_imports_nothing_heavy(engine: Any) -> None:
    program = (
        "import sys\nfrom imgkit_builder.cli.app import main\n"
        "sys.argv[1:] = ['build', './small.yaml', '--no-test']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end\n"
        f"print('loaded', [name for name in {HEAVY} if name in sys.modules])"
    )
    for expected in ("", "loaded []"):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    assert "is up to date" in done.stderr


def _append(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write("# more\n")

    return change


def _same_size_and_time(folder: Path) -> None:
    path = folder / "code" / "train.py"
    before = path.stat()
    path.write_text("print(2)\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "the recipe": _append("small.yaml"),
    "a parent that only extends": _append("middle.yaml"),
    "the first parent": _append("first.yaml"),
    "a requirements file": _append("needs.txt"),
    "a file of the code": _append("code/train.py"),
    "one byte at the same time": _same_size_and_time,
    "a new file": lambda folder: (folder / "code" / "new.py").write_text(""),
    "a new folder": lambda folder: (folder / "code" / "new").mkdir(),
    "a file less": lambda folder: (folder / "code" / "inner" / "data.txt").unlink(),
    "a program": lambda folder: (folder / "code" / "train.py").chmod(0o755),
    "an ignored file comes back": lambda folder: (folder / "code" / ".gitignore").write_text(""),
    "a file that Docker ignores": lambda folder: (folder / "code" / ".dockerignore").write_text("inner\n"),
    "a folder becomes a link": lambda folder: (
        (folder / "code" / "inner").rename(folder / "code" / "outer"),
        (folder / "code" / "inner").symlink_to("outer"),
    ),
    "another name": lambda folder: (folder / "code" / "train.py").rename(folder / "code" / "run.py"),
}
"""Each lies over those before it."""


def test_changed_files_build_again(engine: Any, folder: Path) -> None:
    build()
    for name, change in CHANGES.items():
        assert is_hit(engine), f"before {name}"
        change(folder)
        assert not is_hit(engine), name


def test_new_commit_builds_again(engine: Any, folder: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@y.z")
        subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    build()
    assert is_hit(engine)
    git("commit", "--allow-empty", "-m", "two")
    assert not is_hit(engine)


def test_other_base_under_the_name_builds_again(engine: Any) -> None:
    build()
    engine.on_image(BASE, engine.image(identifier="sha256:" + "d" * 64, tags=[BASE]))
    assert not is_hit(engine)


def test_base_that_got_a_digest_builds_again(engine: Any) -> None:
    build()
    digest = "registry.test/base@sha256:" + "d" * 64
    engine.on_image(BASE, engine.image(identifier="sha256:" + "b" * 64, tags=[BASE], digests=[digest]))
    assert not is_hit(engine)


def test_moved_or_lost_image_builds_again(engine: Any) -> None:
    build()
    engine.on_image("small:latest", engine.image(identifier="sha256:" + "e" * 64, tags=["small:latest"]))
    assert not is_hit(engine)
    engine.on_image("small:latest", engine.image(tags=["small:latest"]))
    assert not is_hit(engine)
    assert is_hit(engine)


def test_other_imgkit_builds_again(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "imgkit_recipes"
    (own / "templates").mkdir(parents=True)
    (own / "templates" / "dockerfile.j2").write_text("one")
    monkeypatch.setattr(imgkit_recipes, "__path__", [str(own)])
    build()
    assert is_hit(engine)
    (own / "templates" / "dockerfile.j2").write_text("two")
    assert not is_hit(engine)


def test_other_packages_build_again(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    build()
    assert is_hit(engine)
    (installed / "plugin.dist-info").mkdir()
    assert not is_hit(engine)


@pytest.mark.parametrize(
    "words", [("--tag", "small:latest"), ("--builder", "classic"), ("--no-cache",), ("--pull",)]
)
def test_other_words_build_again(engine: Any, words: tuple[str, ...]) -> None:
    engine.on("POST", "/images/create", engine.events({"status": "Image is up to date"}))
    build()
    assert not is_hit(engine, *words)


def test_other_time_of_the_source_builds_again(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert not is_hit(engine)


def test_untested_image_is_not_good_enough(engine: Any, folder: Path) -> None:
    build()
    (note,) = (folder.parent / "cache/imgkit/unchanged").iterdir()
    asked = unchanged.BuildInputs(
        recipe="./small.yaml",
        tag=None,
        base=None,
        platform=None,
        build_args=(),
        builder="auto",
        lock="",
        no_test=False,
    )
    tested = note.with_name("tested")
    note.rename(tested)
    # The same note, left by a build with a smoke test, on a machine that has forgotten the test.
    place = unchanged.address.endpoint()
    tested.rename(unchanged._kept(asked, place))
    assert unchanged.find(asked) is None
    unchanged.smoke.remember(engine.image_id)
    assert unchanged.find(asked) is not None


def test_lost_log_builds_again(engine: Any) -> None:
    log = Path(json.loads(build("--json").stdout)["log"])
    log.unlink()
    assert not is_hit(engine, "--json")


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": 1}', "\x00"])
def test_damaged_note_builds_again(engine: Any, folder: Path, damage: str) -> None:
    build()
    (note,) = (folder.parent / "cache/imgkit/unchanged").iterdir()
    note.write_text(damage)
    assert not is_hit(engine)
    assert is_hit(engine)


def test_note_of_another_user_is_not_read(engine: Any, folder: Path) -> None:
    build()
    (note,) = (folder.parent / "cache/imgkit/unchanged").iterdir()
    other = note.with_name("planted")
    note.rename(other)
    note.symlink_to(other)
    assert not is_hit(engine)


def test_build_with_a_secret_leaves_no_note(
    engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    with (folder / "small.yaml").open("a") as recipe:
        recipe.write("  secrets: [{id: token, env: TOKEN}]\n")
    build()
    assert not is_hit(engine)


def test_read_only_home_costs_time_only(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    build()
    assert not is_hit(engine)


def lock(folder: Path) -> Path:
    """A lock of the recipe that installs nothing."""
    recipe = load(folder / "small.yaml")
    part = LockedPlatform(
        platform="linux/amd64",
        source_date_epoch=1700000000,
        request=lock_file.request_of(recipe),
        base=LockedBase(name=BASE, id=f"sha256:{'b' * 64}"),
    )
    file = folder / "small.lock"
    file.write_text(lock_file.text(Lock(recipe="small", imgkit="0.3.0", platforms=(part,))))
    return file


def test_locked_build_is_recognised_too(engine: Any, folder: Path) -> None:
    lock(folder)
    first = build("--locked")
    assert "imgkit: locked: small.lock, 0 apt and 0 pip packages" in first.stderr
    assert is_hit(engine, "--locked")
    assert "imgkit: locked: small.lock" in build("--locked").stderr


def test_new_lock_is_a_reason_to_build(engine: Any, folder: Path) -> None:
    build()
    file = lock(folder)
    assert not is_hit(engine)
    assert is_hit(engine)
    file.write_text(file.read_text().replace("1700000000", "1700000001"))
    assert not is_hit(engine)
    file.unlink()
    assert not is_hit(engine)


def test_lock_is_ignored_on_request(engine: Any, folder: Path) -> None:
    lock(folder).write_text("no lock at all")
    assert "locked" not in build("--no-lock").stderr
    assert is_hit(engine, "--no-lock")


@pytest.mark.parametrize(
    ("word", "change", "said"),
    [
        ("--locked", lambda folder: None, "small has no lock"),
        ("--locked", lambda folder: _stale(folder), "small.lock is stale"),
        ("", lambda folder: _stale(folder), "--no-lock"),
        ("--no-lock", lambda folder: None, "cannot be combined with --no-lock"),
    ],
)
def test_build_that_its_lock_forbids_reaches_no_engine(
    engine: Any, folder: Path, word: str, change: Callable[[Path], object], said: str
) -> None:
    change(folder)
    words = ["--locked", word] if word == "--no-lock" else [word] if word else []
    result = CliRunner().invoke(build_app(("build",)), ["build", "./small.yaml", "--no-test", *words])
    assert said in str(result.exception)
    assert not engine.requests("POST /build")


def test_other_base_than_the_locked_one_is_refused(engine: Any, folder: Path) -> None:
    file = lock(folder)
    file.write_text(file.read_text().replace("b" * 64, "c" * 64))
    result = CliRunner().invoke(build_app(("build",)), ["build", "./small.yaml", "--no-test"])
    assert f"and the lock has sha256:{'c' * 64}" in str(result.exception)
    assert not engine.requests("POST /build")


def _stale(folder: Path) -> None:
    lock(folder)

    (folder / "needs.txt").write_text("einops==0.8.1\n")
