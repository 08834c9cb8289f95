from __future__ import annotations

from pathlib import Path

import pytest

from imgkit_builder.jobs.systems import fanout
from imgkit_entrypoints.errors import UsageError


def test_flag_keeps_its_order() -> None:
    assert fanout.parse_hosts("node10, node2,me@10.0.0.1") == ("node10", "node2", "me@10.0.0.1")


def test_no_text_is_no_host() -> None:
    assert fanout.parse_hosts("") == ()


def test_file_of_open_mpi_is_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# head\nnode2 slots=2\n\nnode1 slots=2 max_slots=4 # second\nfd00::7\n")
    assert fanout.parse_hosts(str(file)) == ("node2", "node1", "fd00::7")


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=reboot",
        "-l@node1",
        "a;reboot",
        "a b",
        "a,,b",
        "node1:2",
        "$(reboot)",
        "a\nb",
        "@a",
        "é",
    ],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a host"):
        fanout.parse_hosts(text)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read") as caught:
        fanout.parse_hosts(str(file))
    assert caught.value.where == str(file)


def test_this_machine_is_known() -> None:
    assert fanout.is_this_machine("127.0.0.1")
    assert fanout.is_this_machine("me@localhost")
    assert not fanout.is_this_machine("192.0.2.1")  # of a network that is nobody's: RFC 5737
