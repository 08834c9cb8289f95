"""Models and data sets of a hub on this machine become folders that jobs read without internet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, serve_hub
from huggingface_hub import constants
from notes import Notes

from imgkit_builder.data import hub as hub_data
from imgkit_builder.data import spec
from imgkit_builder.data.folder import DataFolder
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError

MODEL = {"config.json": b"{}", "weights/a.bin": b"w" * 1000, "weights/same.bin": b"w" * 1000}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that huggingface_hub asks in this process, with a model and a data set."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with serve_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.add("me/tiny", MODEL)
        server.add("datasets/me/letters", {"data/train.csv": b"text\na\n", "README.md": b"# letters\n"})
        yield server


def download(item: str, project: Path) -> DataFolder:
    return hub_data.download(spec.parse_spec(item), project, Notes())


def text(path: Path) -> str:
    return path.read_text()


def test_model_by_revision_is_found_by_its_plain_name(hub, tmp_path):
    """huggingface_hub itself finds it offline, in a process of its own."""
    first = next(iter(hub.repos["me/tiny"].commits))
    hub.repos["me/tiny"].commit({"config.json": b"{1}"})
    data = download(f"hf://me/tiny@{first[:7]}", tmp_path)
    assert data.path.name == first
    (cache := tmp_path / "job/hub").mkdir(parents=True)
    (cache / "models--me--tiny").symlink_to(data.path)
    code = "import huggingface_hub; print(huggingface_hub.hf_hub_download('me/tiny', 'config.json'))"
    env = {"HF_HOME": str(cache.parent), "HF_HUB_OFFLINE": "1"}
    output = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert text(Path(output.stdout.strip())) == "{}"
    assert not (tmp_path / "hf/hub/models--me--tiny/refs/main").exists(), "the user's own cache has changed"


def test_files_are_links_to_blobs_that_take_no_room(hub, tmp_path):
    data = download("hf://me/tiny", tmp_path)
    snapshot = data.path / "snapshots" / data.path.name
    assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*.*")} == MODEL.keys()
    assert all(path.is_symlink() for path in snapshot.rglob("*.*"))
    assert (snapshot / "weights/a.bin").resolve() == (snapshot / "weights/same.bin").resolve()
    assert all(blob.stat().st_nlink == 2 for blob in (data.path / "blobs").iterdir())
    assert data.size_bytes == 2 + 1000 + 40


def test_data_set_is_a_folder_of_its_files_and_a_cache(hub, tmp_path):
    data = download("hf://datasets/me/letters", tmp_path)
    assert data.spec.target == "/workspace/hf/data/me/letters"
    assert sorted(path.name for path in data.path.iterdir()) == [".hub", "README.md", "data"]
    for folder in (data.path, data.path / ".hub/snapshots" / data.path.name):
        assert text(folder / "data/train.csv") == "text\na\n"


def test_lock_keeps_the_commit_until_its_line_goes(hub, tmp_path):
    first = download("hf://me/tiny", tmp_path)
    second = hub.repos["me/tiny"].commit({"config.json": b"{1}"})
    lock = tmp_path / "hf.lock"
    download("hf://datasets/me/letters", tmp_path)
    assert f"\nhf://me/tiny {first.path.name}\n" in text(lock)
    asked = len(hub.requests)
    assert hub_data.find(spec.parse_spec("hf://me/tiny"), tmp_path) == first
    assert len(hub.requests) == asked
    lock.unlink()
    assert hub_data.find(spec.parse_spec("hf://me/tiny"), tmp_path).name == "models--me--tiny@main"
    newest = download("hf://me/tiny", tmp_path)
    assert newest.path.name == second
    assert newest.project_part == first.project_part, "the next revision would be sent as a whole"


def test_second_run_needs_no_internet(hub, tmp_path, monkeypatch):
    first = download("hf://me/tiny", tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert hub_data.find(spec.parse_spec("hf://me/tiny"), tmp_path) == first


def test_token_opens_a_gated_model_and_is_in_no_file(hub, tmp_path, monkeypatch):
    hub.add("me/gated", {"a": b"1"}, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    data = download("hf://me/gated", tmp_path)
    assert hub.tokens == {TOKEN}
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN.encode() not in everything
    assert data.files == 2


@pytest.mark.parametrize(
    ("item", "kind", "message", "hint"),
    [
        ("hf://me/gated", UsageError, "hf://me/gated is gated, and the hub does not", "then: hf auth login"),
        ("hf://me/nothing", UsageError, "hf://me/nothing does not exist, or is private", "correct the name"),
        ("hf://datasets/me/tiny", UsageError, "hf://datasets/me/tiny does not exist", "correct the name"),
        (
            "hf://me/tiny@v9",
            UsageError,
            "hf://me/tiny@v9 has no such revision",
            "/me/tiny/commits/main lists them",
        ),
        ("hf://me/broken", ToolFailed, "hf://me/broken is not in the cache", "export https_proxy="),
    ],
)
def test_repository_that_cannot_be_had_is_refused(hub, tmp_path, item, kind, message, hint):
    hub.add("me/gated", {"a": b"1"}, gated=True)
    hub.add("me/broken", {"a": b"1"}, broken=True)
    with pytest.raises(kind) as caught:
        download(item, tmp_path)
    assert caught.value.what.startswith(message)
    assert hint in str(caught.value.hint)
    assert not (tmp_path / "hf.lock").exists()


def test_hub_that_cannot_be_reached_is_named(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ToolFailed, match=r"tiny is not in the cache, and http://127.0.0.1:9 does not send it: .*refused"
    ):
        download("hf://me/tiny", tmp_path)


def test_missing_package_is_named(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ToolMissing, match="huggingface_hub is not installed") as caught:
        download("hf://me/tiny", tmp_path)
    assert caught.value.hint == 'pip install "imgkit-hpc[hf]"'


def test_cache_that_cannot_be_written_is_named(hub, tmp_path, monkeypatch):
    (tmp_path / "hf").write_text("a file")
    with pytest.raises(CheckFailed, match=r"hf://me/tiny cannot be written: .*Not a directory") as caught:
        download("hf://me/tiny", tmp_path)
    assert caught.value.hint == "another folder: export HF_HOME=/FOLDER"


@pytest.mark.parametrize(
    ("text", "number"),
    [("hf://me/tiny main\n", 1), ("# x\nhf://me/tiny ../../../etc\n", 2), ("\n" * 70000, None)],
)
def test_lock_with_something_else_is_refused(tmp_path, text, number):
    (tmp_path / "hf.lock").write_text(text)
    with pytest.raises(UsageError) as caught:
        hub_data.find(spec.parse_spec("hf://me/tiny"), tmp_path)
    assert caught.value.where == f"{tmp_path}/hf.lock" + (f":{number}" if number else "")
    assert str(caught.value.hint).startswith("remove")
