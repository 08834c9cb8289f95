"""The list of remotes: addresses, the file that a person may edit, and its faults with their keys."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from imgkit_builder.job.request import Request
from imgkit_builder.recipe import targets
from imgkit_builder.remote import config
from imgkit_builder.remote.config import Remote
from imgkit_builder.workflow.remote_run import RunPlan, with_transfer_host
from imgkit_entrypoints.errors import UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "imgkit/remotes.toml"


@pytest.mark.parametrize(
    ("text", "address", "folder"),
    [
        ("me@host", "me@host", "imgkit"),
        ("alias", "alias", "imgkit"),
        ("me@host:", "me@host", "imgkit"),
        ("me@host:/scratch/a b", "me@host", "/scratch/a b"),
        ("me@host:~/runs", "me@host", "runs"),
        ("me@[2001:db8::1]:/x", "me@2001:db8::1", "/x"),
    ],
)
def test_address_has_a_host_and_a_folder(text: str, address: str, folder: str) -> None:
    assert config.parse(text) == (address, folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "-oProxyCommand=x",
        "me@-x",
        "a b",
        "me@host:/a'b",
        "me@host:$HOME",
        "me@host:/a\nb",
        "me@host:-x",
    ],
)
def test_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        config.parse(text)


def test_remote_comes_back_as_it_was_added(home: Path) -> None:
    one = Remote(name="mn5", address="me@host", folder="/a b/ü", recipe="mn5", transfer="me@t", keep_s=60)
    config.add(one)
    config.add(Remote(name="two", address="other"))
    assert config.remotes() == {"mn5": one, "two": Remote(name="two", address="other")}
    assert stat.S_IMODE(home.stat().st_mode) == 0o600


def test_other_lines_of_the_file_stay(home: Path) -> None:
    home.parent.mkdir()
    home.write_text(
        "# mine\n[a]\naddress = 'x' # why\n\n[ \"b\" ]\naddress = 'y'\n# of b\n[c]\naddress='z'\n"
    )
    config.remove("b")
    assert home.read_text() == "# mine\n[a]\naddress = 'x' # why\n\n[c]\naddress='z'\n"
    config.add(Remote(name="c", address="new"), replace=True)
    assert config.find("c").address == "new"
    assert "# why" in home.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\naddress = 'x'\nkeep_s = 'soon'\n", "a.keep_s: must be an integer"),
        ("[a]\naddress = 'x'\nkeep_s = -1\n", "a.keep_s: must be 0 to 86400 seconds"),
        ("[a]\naddress = 'x'\n[b]\naddress = 'y'\nport = 22\n", "b.port: unknown key"),
        ("[a]\nfolder = 'x'\n", "a.address: is missing"),
        ("a = 1\n", "a: must be a mapping"),
        ("# no\n\n[a]\naddress = '-oProxyCommand=x'\n", "a.address: '-oProxyCommand=x' is not an address"),
        ("[a]\naddress = 'x'\ntransfer = '-x'\n", "a.transfer: '-x' is not an address"),
        ("[a]\naddress = 'x'\nfolder = \"/a'b\"\n", 'a.folder: "/a\'b" cannot be the folder of jobs'),
        ("['a b']\naddress = 'x'\n", "a b: 'a b' is not a valid name of a remote"),
    ],
)
def test_fault_of_the_file_names_its_key(home: Path, text: str, message: str) -> None:
    home.parent.mkdir()
    home.write_text(text)
    with pytest.raises(UsageError) as caught:
        config.remotes()
    assert (caught.value.where, caught.value.what) == (str(home), message)


def test_syntax_error_of_the_file_names_its_line(home: Path) -> None:
    home.parent.mkdir()
    home.write_text("[a]\naddress = x\n")
    with pytest.raises(UsageError, match="not TOML") as caught:
        config.remotes()
    assert caught.value.where == f"{home}:2"


@pytest.mark.parametrize("text", ["[a\n", "a = [[[[", "\0", "[a]\n[a]\n"])
def test_no_toml_is_no_traceback(home: Path, text: str) -> None:
    home.parent.mkdir()
    home.write_text(text)
    with pytest.raises(UsageError, match="not TOML"):
        config.remotes()


def test_unknown_remote_names_the_nearest() -> None:
    with pytest.raises(UsageError) as none:
        config.find("mn5")
    assert none.value.hint == "imgkit remote add mn5 USER@HOST:DIR"
    config.add(Remote(name="mn5", address="x"))
    with pytest.raises(UsageError) as near:
        config.find("mn4")
    assert "did you mean mn5?" in str(near.value)


def test_name_is_not_taken_twice() -> None:
    config.add(Remote(name="mn5", address="x"))
    with pytest.raises(UsageError, match="already"):
        config.add(Remote(name="mn5", address="y"))
    assert config.find("mn5").address == "x"


@pytest.mark.parametrize(
    ("host", "transfer", "login", "expected"),
    [
        ("transfer1.bsc.es", "", "glogin1.bsc.es", "me@transfer1.bsc.es"),
        ("you@transfer1.bsc.es", "", "glogin1.bsc.es", "you@transfer1.bsc.es"),
        ("transfer1.bsc.es", "me@glogin1.bsc.es", "glogin1.bsc.es", "me@glogin1.bsc.es"),
        ("transfer1.bsc.es", "", "transfer1.bsc.es", ""),
        ("", "", "glogin1.bsc.es", ""),
        ("-oProxyCommand=x", "", "glogin1.bsc.es", ""),
    ],
    ids=["of the system", "with a user", "of the user", "login host", "none", "an option"],
)
def test_files_go_through_the_host_of_the_system(
    home: Path, monkeypatch: pytest.MonkeyPatch, host: str, transfer: str, login: str, expected: str
) -> None:
    programs = home.parent
    programs.mkdir()
    (programs / "ssh").write_text(f"#!/bin/sh\n# A fake ssh -G.\necho user me\necho hostname {login}\n")
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    target = targets.find("mn5")
    system = dataclasses.replace(
        target.system, transfer=dataclasses.replace(target.system.transfer, host=host)
    )
    plan = RunPlan(
        source="mn5",
        target=dataclasses.replace(target, system=system),
        recipe="mn5",
        sif=Path(),
        request=Request(),
    )
    remote = Remote(name="mn5", address="mn5-login", transfer=transfer)
    assert with_transfer_host(remote, plan).transfer == expected
