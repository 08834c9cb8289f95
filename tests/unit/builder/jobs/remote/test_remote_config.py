"""The list of remotes: addresses, and the file that a person may edit; cli/refusals has its faults."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest

from imgkit_builder.jobs.image_source import ImageSource, with_transfer_host
from imgkit_builder.jobs.remote import config
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.recipe import targets


@pytest.fixture
def remotes_file(home: Path) -> Path:
    return home / "config/imgkit/remotes.toml"


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
def test_address_has_a_host_and_a_folder(text, address, folder):
    assert config.parse_address(text) == (address, folder)


def test_remote_comes_back_as_it_was_added(remotes_file):
    remote = Remote(
        name="mn5",
        address="me@host",
        folder="/a b/ü",
        recipe="mn5",
        transfer="me@t",
        keep_s=60,
        bwlimit=1.5,
    )
    config.add_remote(remote)
    config.add_remote(Remote(name="two", address="other"))
    assert config.read_remotes() == {"mn5": remote, "two": Remote(name="two", address="other")}
    assert stat.S_IMODE(remotes_file.stat().st_mode) == 0o600


@pytest.mark.parametrize("header", ["[b]", '["b"]', "['b']", "[ 'b' ]"])
def test_table_is_removed_however_its_name_is_quoted(remotes_file, header):
    remotes_file.parent.mkdir(parents=True)
    remotes_file.write_text(f"{header}\naddress = 'x'\n")
    config.remove_remote("b")
    assert remotes_file.read_text() == ""


def test_other_lines_of_the_file_stay(remotes_file):
    remotes_file.parent.mkdir(parents=True)
    remotes_file.write_text(
        "# mine\n[a]\naddress = 'x' # why\n\n[ \"b\" ]\naddress = 'y'\n# of b\n[c]\naddress='z'\n"
    )
    config.remove_remote("b")
    assert remotes_file.read_text() == "# mine\n[a]\naddress = 'x' # why\n\n[c]\naddress='z'\n"
    config.add_remote(Remote(name="c", address="new"), replace=True)
    assert config.get_remote("c").address == "new"
    assert "# why" in remotes_file.read_text()


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
def test_files_go_through_the_host_of_the_system(fake_program, host, transfer, login, expected):
    fake_program("ssh", f"echo user me; echo hostname {login}")  # as ssh -G prints it
    target = targets.load_target("mn5")
    system = dataclasses.replace(
        target.system, transfer=dataclasses.replace(target.system.transfer, host=host)
    )
    source = ImageSource(
        title="mn5",
        target=dataclasses.replace(target, system=system),
        recipe="mn5",
        sif=Path(),
        request=JobRequest.of(),
    )
    remote = Remote(name="mn5", address="mn5-login", transfer=transfer)
    assert with_transfer_host(remote, source).transfer == expected
