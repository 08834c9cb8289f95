"""The files by which enroot, pyxis and ch-run configure a container, made from an image configuration."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import small_sif

from imgkit_builder.archive.tar_read import CHARACTER, DIRECTORY, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.oci.config import ImageConfig, parse_config
from imgkit_builder.sif import sqsh
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.image import ImgkitRecord
from imgkit_entrypoints.errors import CheckFailed, UsageError

PATH = "/usr/bin:/bin"


def config(*env: str, **settings: Any) -> ImageConfig:
    values = {
        "architecture": "amd64",
        "rootfs": {"diff_ids": [f"sha256:{1:064x}"]},
        "config": {"Env": list(env), **settings},
    }
    return parse_config(json.dumps(values).encode(), where="x")


def text(of: ImageConfig, path: str) -> str:
    return next(entry.read().decode() for entry in sqsh.enroot_files(of) if entry.name == path)


def environment(*env: str) -> list[str]:
    return text(
        config("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all", *env), "etc/environment"
    )[len("NVIDIA_VISIBLE_DEVICES=0\nNVIDIA_DRIVER_CAPABILITIES=all\n") :].split("\n")[:-1]


def as_enroot(line: str) -> str:
    """The value that enroot 4.1 makes of a line, before and after its hooks; the host has no variables."""
    value = re.sub(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}", "", line).partition("=")[2]
    for _ in range(2):
        quoted = re.fullmatch(r"[\\\"'](.*)[\\\"']\s*", value)
        value = quoted[1] if quoted else value
    return value


def as_ch_run(line: str) -> str:
    """The value that ch-run makes of a line with --env-no-expand."""
    value = line.partition("=")[2]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == "'" else value


@pytest.mark.parametrize(
    "value",
    [
        "",
        "a b",
        '"a"',
        "'a'",
        "'a' ",
        "\"a'",
        "'",
        '"',
        "''",
        " a ",
        "$HOME",
        "$",
        "${",
        "${}",
        "${1}",
        "{}",
        "#",
        *("\\", "\\\\", "\\a'", '"a\\ ', "a\\"),
        *("a\\nb", "a=b", "`id`", "$(id)", "é", "a\rb", "\t", "${a-b}"),
    ],
)
def test_every_value_arrives_exactly(value, tmp_path):
    (line,) = environment(f"X={value}")
    assert as_ch_run(line) == value
    script = text(config(f"X={value}"), "etc/rc")
    (tmp_path / "rc").write_text(script.replace("/etc/rc.local", "/none"))
    argv = ("sh", tmp_path / "rc", "printenv", "X")
    process = subprocess.run(argv, env={"PATH": PATH, "X": as_enroot(line)}, capture_output=True, check=True)
    assert process.stdout.decode() == f"{value}\n"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${HOME}", "enroot replaces ${HOME} by the host's variable"),
        ("/a:${PATH}:/b", "enroot replaces ${PATH}"),
        ("a\nb", "line break"),
        ("a\0b", "zero byte"),
        ("\ud800", "not UTF-8"),
    ],
)
def test_a_value_that_cannot_be_held_is_refused(value, reason):
    with pytest.raises(UsageError) as error:
        sqsh.enroot_files(config(f"MINE={value}"))
    assert reason in str(error.value)
    assert error.value.where == "ENV MINE"
    assert "image.env.MINE" in (error.value.hint or "")


def test_the_last_of_two_values_counts():
    assert environment("A=1", "A=2") == ["A=2"]
    assert environment("A=${X}", "A=2") == ["A=2"]


def test_names_that_enroot_drops_are_left_out_and_told():
    env = ("1a=x", "a-b=x", "ENROOT_ROOTFS=/", "=x", "A=1")
    assert environment(*env) == ["A=1"]
    assert sqsh.skipped_variables(config(*env)) == ("1a", "a-b", "ENROOT_ROOTFS", "")


def test_gpus_are_visible_unless_the_image_says_otherwise():
    added = ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
    assert text(config("A=1"), "etc/environment").splitlines() == [*added, "A=1"]
    variables = text(config("NVIDIA_VISIBLE_DEVICES=void"), "etc/environment").splitlines()
    assert variables == ["NVIDIA_VISIBLE_DEVICES=void", added[1]]


def started(folder: Path, arguments: tuple[str, ...] = (), rc_local: str = "", **settings: Any) -> str:
    """What /etc/rc prints, run by this machine's sh with the paths of `folder`."""
    script = text(config(**{"WorkingDir": str(folder), **settings}), "etc/rc")
    (folder / "rc.local").write_text(rc_local)
    (folder / "rc").write_text(script.replace("/etc/rc.local", str(folder / "rc.local")))
    command = ["sh", str(folder / "rc"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


SHOW = ("printf", "<%s>")


def test_arguments_replace_cmd(tmp_path):
    settings = {"Entrypoint": SHOW, "Cmd": ["a b", "$HOME", "it's"]}
    assert started(tmp_path, **settings) == "<a b><$HOME><it's>"
    assert started(tmp_path, ("c  d", "-e", "*"), **settings) == "<c  d><-e><*>"


def test_rc_begins_in_the_working_folder(tmp_path):
    folder = tmp_path / "in side's"
    assert started(tmp_path, ("pwd",), WorkingDir=str(folder)) == f"{folder}\n"


def test_a_script_that_is_not_empty_replaces_the_entrypoint(tmp_path):
    assert started(tmp_path, ("echo", "mine"), 'exec "$@"\n', Entrypoint=SHOW) == "mine\n"


def test_an_image_without_a_command_starts_a_shell():
    assert text(config(), "etc/rc").endswith('    set -- /bin/sh\nfi\nexec "$@"\n')


@pytest.mark.parametrize("settings", [{"Entrypoint": ["a\0"]}, {"Cmd": ["\ud800"]}, {"WorkingDir": "/\0"}])
def test_a_command_that_no_script_can_hold_is_refused(settings):
    with pytest.raises(UsageError, match="cannot hold"):
        sqsh.enroot_files(config(**settings))


def test_what_a_start_needs_is_added_where_it_lacks():
    kinds = {entry.name: entry.kind for entry in sqsh.mount_points(config(WorkingDir="work/in side"))}
    assert kinds.keys() >= {"dev", "proc", "sys", "tmp", "etc/passwd", "etc/group", "work", "work/in side"}
    assert SYMLINK not in kinds.values()


def entry(name: str, kind: bytes = REGULAR, link: str = "", *other_names: str) -> ImageEntry:
    return ImageEntry(names=(name, *other_names), kind=kind, link=link)


def test_devices_and_all_in_dev_are_left_out():
    messages: list[str] = []
    entries = [
        entry("dev", DIRECTORY),
        entry("dev/null", CHARACTER),
        entry("dev/shm", DIRECTORY),
        entry("a", REGULAR, "", "dev/b"),
        entry("jail/null", CHARACTER),
        entry("jail/too", HARD_LINK, "jail/null"),
        entry("device"),
    ]
    kept_entries = list(sqsh.without_devices(iter(entries), messages.append))
    assert [kept_entry.names for kept_entry in kept_entries] == [("dev",), ("a",), ("device",)]
    assert messages == ["1 devices outside /dev are left out, as /jail/null: only root can unpack one"]


def test_an_etc_that_is_a_link_is_refused():
    entries = sqsh.without_devices(iter([entry("etc", SYMLINK, "/usr/etc")]), lambda _: None)
    with pytest.raises(CheckFailed, match="/etc of the image is not a folder"):
        list(entries)


RECORD = dataclasses.replace(small_sif.record(), root_sha256="", arch="arm64")


def described(path: Path) -> ImgkitRecord:
    path.write_bytes(b"hsqs" + bytes(5000))
    record, _ = sqsh.Sqsh().put_record(path, RECORD, lambda *_: None)
    return record


def test_the_record_at_the_end_is_read_back(tmp_path):
    path = tmp_path / "x.sqsh"
    record = described(path)
    assert sqsh.read_record(path) == record
    assert sqsh.hash_sqsh(path)[0] == record.root_sha256
    assert sqsh.is_sqsh(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rb"(?s)........(?=IMGKSQSH\Z)", (1 << 40).to_bytes(8, "little")),
        (b'"arch"', b'"hcra"'),
        (b'"schema": 2', b'"schema": 9'),
    ],
    ids=["length", "json", "schema"],
)
def test_a_damaged_record_is_refused(tmp_path, old, new):
    path = tmp_path / "x.sqsh"
    described(path)
    damaged, count = re.subn(old, new, path.read_bytes())
    assert count == 1
    path.write_bytes(damaged)
    with pytest.raises(CheckFailed):
        sqsh.read_record(path)


def test_a_squashfs_of_others_has_no_record(tmp_path):
    path = tmp_path / "x.sqsh"
    path.write_bytes(b"hsqs" + bytes(200))
    assert sqsh.is_sqsh(path)
    assert sqsh.read_record(path) is None
    assert not sqsh.is_sqsh(tmp_path / "absent")
