"""Which failed tests ``ci/check`` runs once more."""

from __future__ import annotations

import pytest
from steady_tests import select_reruns


@pytest.mark.parametrize(
    ("failed", "reruns"),
    [
        (["a.py::test_b[x@y]@wires", "a.py::test_c"], ["a.py::test_b[x@y]", "a.py::test_c"]),
        ([f"a.py::test_{number}" for number in range(4)], []),
    ],
    ids=["few", "too many"],
)
def test_few_failed_tests_run_again_without_their_group(failed, reruns):
    assert list(select_reruns(dict.fromkeys(failed, True))) == reruns
