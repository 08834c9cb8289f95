"""What an item of ``data`` means, and how a folder of data is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from file_tree import write_files

from imgkit_builder.data import folder, spec
from imgkit_builder.data.folder import DataFolder
from imgkit_builder.data.spec import DataSpec, HubRepo
from imgkit_entrypoints.errors import UsageError

LOCAL = "a folder of the project: data/NAME; or a path on the cluster: /SRC:/DEST"


def find(project: Path, source: str = "data/x") -> DataFolder:
    return folder.find_folder(spec.parse_spec(source), project)


def test_item_is_of_the_project_or_of_the_cluster():
    specs = spec.parse_all(["./data/x/", "/gpfs/y:/data", "$WORK/z:/workspace/z"])
    assert [item.is_local for item in specs] == [True, False, False]
    assert specs == (
        DataSpec(source="data/x", target="/workspace/data/x"),
        DataSpec(source="/gpfs/y", target="/data"),
        DataSpec(source="$WORK/z", target="/workspace/z"),
    )


@pytest.mark.parametrize(
    ("text", "repo", "target"),
    [
        ("hf://gpt2", HubRepo(name="gpt2", is_data_set=False, revision=""), "hub/models--gpt2"),
        ("hf://a/B.c@v1/x", HubRepo(name="a/B.c", is_data_set=False, revision="v1/x"), "hub/models--a--B.c"),
        ("hf://datasets/a/b@6", HubRepo(name="a/b", is_data_set=True, revision="6"), "data/a/b"),
    ],
)
def test_item_of_the_hub_has_a_place_in_the_code(text, repo, target):
    item = spec.parse_spec(text)
    assert (item.hub, item.target, item.is_local) == (repo, f"/workspace/hf/{target}", True)


@pytest.mark.parametrize(
    "text", ["hf:gpt2", "hf://a/b/c", "hf://a@", "hf://../x", "hf://a--b", "hf://a@../x"]
)
def test_other_items_of_the_hub_are_refused(text):
    with pytest.raises(UsageError) as caught:
        spec.parse_spec(text)
    assert caught.value.what == f"{text!r} is no model or data set of the hub"
    assert str(caught.value.hint).startswith("hf://NAME or hf://datasets/NAME")


@pytest.mark.parametrize(
    ("texts", "message", "hint"),
    [
        (["../x"], "'../x' is not a folder of data", LOCAL),
        (["."], "'.' is not a folder of data", LOCAL),
        (["data/x:/data"], "'data/x:/data' is not a folder of data", LOCAL),
        (["/gpfs/x"], "'/gpfs/x' does not say where the job sees it", "write /gpfs/x:/DEST"),
        (["/gpfs/x:/d:ro"], "'/gpfs/x:/d:ro' does not say where the job sees it", "write /gpfs/x:/DEST"),
        (["/x:/proc"], "/proc belongs to the system or to imgkit", "the default is /workspace"),
        (
            ["hf://me/tiny", "hf://me/tiny@v2"],
            "/workspace/hf/hub/models--me--tiny is in /workspace/hf/hub/models--me--tiny, which is another "
            "folder of data",
            "remove one of them, or give it another place: /SRC:/DEST",
        ),
        (
            ["data/x", "data"],
            "/workspace/data/x is in /workspace/data, which is another folder of data",
            "remove one of them, or give it another place: /SRC:/DEST",
        ),
    ],
)
def test_other_items_are_refused(texts, message, hint):
    with pytest.raises(UsageError) as caught:
        spec.parse_all(texts)
    assert (caught.value.what, caught.value.where, caught.value.hint) == (message, "data", hint)


def test_name_changes_with_a_file_and_with_the_project(tmp_path):
    first = find(write_files(tmp_path / "a", {"data/x/train": "1", "data/x/more/test": "2"}))
    assert (first.files, first.size_bytes) == (2, 4)
    for file in (tmp_path / "a/data/x").rglob("t*"):
        copy = tmp_path / "b" / file.relative_to(tmp_path / "a")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
        os.utime(copy, ns=(0, file.stat().st_mtime_ns))
    other = find(tmp_path / "b")
    assert other.name[:64] == first.name[:64]
    assert other.project_part != first.project_part
    os.utime(tmp_path / "a/data/x/train", (5, 5))
    changed = find(tmp_path / "a")
    assert changed.name[:64] != first.name[:64]
    assert changed.project_part == first.project_part


def test_folder_may_be_a_link_with_links_inside(tmp_path):
    write_files(tmp_path / "disk/x", {"blobs/1": "1"})
    (tmp_path / "disk/x/train").symlink_to("blobs/1")
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    assert find(tmp_path).files == 1


@pytest.mark.parametrize(
    ("path", "message", "hint"),
    [
        ("away", "no such directory", "the key `data` of imgkit.toml names folders of the project"),
        ("file", "not a directory", "the key `data` of imgkit.toml names folders of the project"),
        ("empty", "it holds no files", "fill it, or remove it from `data`"),
        ("fifo", "only files, folders and links can be sent, and this is none", "remove it from the data"),
        ("link", "a link out of the folder of data, to ../../x", "put the files in its place"),
    ],
)
def test_folder_that_cannot_be_sent_is_refused(tmp_path, path, message, hint):
    write_files(tmp_path, {"file": "", "link/sub/x": ""})
    for name in ("empty", "fifo"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo/queue")
    (tmp_path / "link/sub/out").symlink_to("../../x")
    with pytest.raises(UsageError) as caught:
        find(tmp_path, path)
    assert caught.value.what == message
    assert str(caught.value.where).startswith(f"{tmp_path}/{path}")
    assert str(caught.value.hint).startswith(hint)
