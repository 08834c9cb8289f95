"""NVIDIA's table of drivers."""

from __future__ import annotations

import pytest

from imgkit_entrypoints import cuda_drivers


@pytest.mark.parametrize(("branch", "cuda"), [(418, (0, 0)), (535, (12, 2)), (540, (12, 2)), (700, (13, 1))])
def test_driver_supports_the_cuda_of_its_release(branch, cuda):
    assert cuda_drivers.supported_cuda(branch) == cuda


@pytest.mark.parametrize(("cuda", "branch"), [("12.9.1", 525), ("13", 580), ("14.0", None), ("", None)])
def test_first_driver_is_that_of_the_major_version(cuda, branch):
    assert cuda_drivers.first_driver(cuda) == branch


@pytest.mark.parametrize("text", ["", "12", "v12.4", "twelve"])
def test_text_that_is_no_cuda_version_is_none(text):
    assert cuda_drivers.parse_cuda(text) is None
