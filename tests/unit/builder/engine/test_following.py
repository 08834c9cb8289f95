"""Output of podman 4.3.1 and of buildx 0.13.1, as recorded: steps, last lines and errors."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from notes import Notes

from imgkit_builder.base.progress import Silent
from imgkit_builder.engine.following import BuildFollower, BuildKitFollower
from imgkit_entrypoints.errors import ToolFailed

DOCKERFILE = """\
# a.yaml:3
FROM base:1

# imgkit: the default folder
ENV A=b
WORKDIR "/workspace"

# a.yaml:6
RUN echo out; \\
    exit 7
"""

PODMAN = """\
STEP 1/4: FROM base:1
STEP 2/4: ENV A=b
--> 1e33e045ffd
STEP 3/4: WORKDIR "/workspace"
--> Using cache 4b7671d96724ea8c15e03508e8d1393977d5e9d1fcb16b84322d8323c1361f01
--> 4b7671d9672
STEP 4/4: RUN echo out;     exit 7
out
Error: of the program itself
Error: building at STEP "RUN echo out;     exit 7": while running runtime: exit status 7
"""

BUILDX = """\
#0 building with "default" instance using docker driver

#4 [1/3] FROM base:1
#4 DONE 0.1s

#5 [2/3] WORKDIR /workspace
#5 CACHED

#7 [3/3] RUN echo out;     exit 7
#7 0.302 out
#7 0.303 \x1b[31merr\x1b[0m

#5 [2/3] WORKDIR /workspace
#7 ERROR: executor failed running [/bin/sh -c echo out;     exit 7]: exit code: 7
------
 > [3/3] RUN echo out;     exit 7:
0.302 out
------
ERROR: failed to solve: executor failed running [/bin/sh -c echo out;     exit 7]: exit code: 7
"""


def follow(kind: type[BuildFollower], text: str, *, code: int = 1) -> tuple[list[str], str]:
    """The stages that `text` reports, and the message of its error; it comes in small pieces."""
    notes = Notes()
    follower = kind(io.StringIO(), DOCKERFILE, base="base:1", log_path=Path("/log"), report=notes)
    for start in range(0, len(text), 7):
        follower.add_text(text[start : start + 7])
    return notes.stages, str(follower.exit_error(code))


@pytest.mark.parametrize("text", [PODMAN, PODMAN.replace("STEP", "Step").replace(": ", " : ", 4)])
def test_podman_fails_at_the_recipes_line(text):
    stages, message = follow(BuildFollower, text)
    assert stages[-1] == "step 4/4: RUN echo out; exit 7"
    assert len(stages) == 4
    assert message.startswith("a.yaml:6: step 4/4 (RUN echo out; exit 7): ")
    assert "\n     out\n     Error: of the program itself\n" in message


def test_podmans_last_line_is_its_verdict():
    _, message = follow(BuildFollower, PODMAN)
    assert "exit 7): while running runtime: exit status 7\n" in message


def test_buildx_fails_at_the_recipes_line():
    stages, message = follow(BuildKitFollower, BUILDX)
    # ENV makes no layer, so BuildKit does not count it.
    assert stages == [
        "step 1/3: FROM base:1",
        "step 2/3: WORKDIR /workspace",
        "step 3/3: RUN echo out; exit 7",
    ]
    assert message.startswith("a.yaml:6: step 3/3 (RUN echo out; exit 7): executor failed")
    assert "\n     out\n     err\n" in message
    assert "DONE" not in message


def test_place_named_by_buildx_counts():
    _, message = follow(
        BuildKitFollower, BUILDX.replace("------\nERROR", "Dockerfile.imgkit:6\n------\nERROR")
    )
    assert message.startswith("imgkit: the default folder: step 3/3")


def test_silent_end_names_the_exit_code():
    _, message = follow(BuildKitFollower, "", code=137)
    assert message.startswith("build: the builder ended with exit code 137")


def test_missing_base_is_a_failure_before_any_step():
    text = "Error: creating build container: base:1: image not known\n"
    _, message = follow(BuildFollower, text)
    assert message.startswith("build: creating build container: base:1: image not known")


def test_full_disk_gets_its_hint():
    text = BUILDX.replace("0.303", "0.303 no space left on device")
    follower = BuildKitFollower(io.StringIO(), DOCKERFILE, base="b", log_path=Path("/log"), report=Silent())
    follower.add_text(text)
    assert isinstance(follower.exit_error(1), ToolFailed)
    assert "docker system df" in str(follower.exit_error(1))


def test_hidden_words_are_nowhere(tmp_path):
    log, notes = io.StringIO(), Notes()
    watch = BuildFollower(
        log,
        DOCKERFILE,
        base="b",
        log_path=tmp_path / "log",
        report=notes,
        mask=lambda x: x.replace("out", "***"),
    )
    watch.add_text(PODMAN)
    error = watch.exit_error(1)
    assert "out" not in "\n".join([log.getvalue(), *notes.lines, str(error)]).replace("without", "")
    assert "***" in error.hint
