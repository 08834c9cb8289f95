"""Image configurations, which may come from a stranger's archive."""

from __future__ import annotations

import json

import pytest

from imgkit_builder.oci.config import parse_config
from imgkit_builder.sif import objects
from imgkit_entrypoints.errors import CheckFailed

FORGED = "amd64\nok    signature  good"


def config(**fields: object) -> bytes:
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{'0' * 64}"]}
    return json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs, **fields}).encode()


def test_configuration_without_a_system_is_read():
    image_config = parse_config(config(os=None), where="x.tar")
    assert (image_config.os, image_config.arch) == ("", "amd64")


@pytest.mark.parametrize(
    "fields", [{"architecture": FORGED}, {"architecture": "../x"}, {"architecture": 7}, {"os": FORGED}]
)
def test_system_that_is_no_word_is_refused(fields):
    with pytest.raises(CheckFailed, match="its image configuration cannot be read"):
        parse_config(config(**fields), where="x.tar")


@pytest.mark.parametrize("architecture", ["loong64", "unknown"])
def test_architecture_without_a_number_makes_no_sif(architecture):
    with pytest.raises(CheckFailed) as caught:
        objects.make_metadata(parse_config(config(architecture=architecture), where="x.tar"))
    assert caught.value.what == f"no .sif can be for the architecture {architecture!r}"
    assert "riscv64" in str(caught.value)
