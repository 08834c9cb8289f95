"""``dist-doctor``: check this node, or all nodes of the job with one collective between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from imgkit_entrypoints.cli import options, start, worker
from imgkit_entrypoints.doctor import node, saved_environment
from imgkit_entrypoints.errors import NoPlan

ALL_NODES = "imgkit_entrypoints.apps.doctor"


def main(words: Sequence[str], env: Mapping[str, str]) -> int:
    """Run the checks; the exit code."""
    summary = "check this node, and under a launcher all nodes, for distributed runs"
    both = options.parser("dist-doctor", summary, env)
    node.add_arguments(both)
    both.add_argument("--bundle", metavar="FILE", help="save what was read here, to replay it elsewhere")
    both.parse_args(words)
    parsed, rest = options.parser("dist-doctor", summary, env).parse_known_args(words)
    asked = options.read(parsed, ("dist-doctor", *words))
    if not any(word.startswith("--bundle") for word in rest) and not saved_environment.is_replay(env):
        try:
            place = start.place(asked.wanted, env)
        except NoPlan as error:
            start.say(*f"this node only: {error}".split("\n"))
        else:
            if place.nnodes > 1 or asked.request.nproc != "auto":
                request = dataclasses.replace(asked.request, prefix=False)
                asked = dataclasses.replace(asked, request=request)
                return start.launch(asked, worker.of_module(ALL_NODES, rest), env, place)
    return node.main(rest, {**env, "IMGKIT_DEVICE": asked.request.device})
