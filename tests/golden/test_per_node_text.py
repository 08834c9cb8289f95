"""What the commands of the page about ``dist-run --per-node`` become on each of two nodes with four GPUs.

After a wanted change: ``IMGKIT_UPDATE_GOLDEN=1 pytest tests/golden``, then read the diff.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.cli.start import parse_user_program
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.launch import per_node, plan
from imgkit_entrypoints.rollcall.messages import AttemptStart
from imgkit_entrypoints.schedulers.placement import Placement

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/guides/per-node.md"
EXPECTED = HERE / "per-node.txt"
ENV = {"IMGKIT_RUN_DIR": "/runs/7"}
NODE = HostFacts(
    hostname="n1",
    arch="x86_64",
    python="3.12.3",
    cpus=96,
    gpus=4,
    gpus_source="4 device files",
    torch_version="",
)
DIST_RUN = next(command for command in COMMANDS if command.name == "dist-run")


def commands_of_page() -> list[str]:
    """Return the command lines of the page that begin with dist-run."""
    blocks = re.findall(r"(?m)(?:^ {4}.*\n)+", PAGE.read_text(encoding="utf-8"))
    lines = (re.sub(r"\\\n *", "", block).strip() for block in blocks)
    return [line for line in lines if line.startswith("dist-run ")]


def filled(command: str, node_rank: int) -> str:
    """Return what a node starts for a command line of the page."""
    options, worker = parse_user_program(DIST_RUN, shlex.split(command), ENV)
    placement = Placement(scheduler="slurm", nnodes=2, node_rank=node_rank, hosts=("n1", "n2"), head="n1")
    launch_plan = plan.decide_launch(
        options.request,
        worker.argv,
        torchrun="torchrun",
        placement=placement,
        host=NODE,
        system=None,
        env=ENV,
    )
    order = AttemptStart(
        attempt=1,
        nnodes=2,
        node_rank=node_rank or None,
        port=20001,
        second_port=20002,
        head="10.0.0.1",
        world_size=8,
    )
    values = per_node.placeholder_values(order, node_rank, launch_plan.nproc, ENV["IMGKIT_RUN_DIR"])
    return shlex.join(per_node.fill_placeholders(launch_plan.argv, values))


def test_commands_are_as_recorded():
    commands = commands_of_page()
    assert len(commands) == 5
    lines = (f"node {rank}: {filled(command, rank)}\n" for command in commands for rank in range(2))
    text = "".join(lines)
    if os.environ.get("IMGKIT_UPDATE_GOLDEN") == "1":
        EXPECTED.write_text(text, encoding="utf-8")
    assert text == EXPECTED.read_text(encoding="utf-8"), "wanted? IMGKIT_UPDATE_GOLDEN=1 pytest tests/golden"


def test_no_placeholder_is_left():
    assert not re.search(r"\{\w+\}", EXPECTED.read_text(encoding="utf-8"))
