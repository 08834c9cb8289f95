"""Options of dist-train; imports no torch, so that ``--help`` and mistakes are quick."""

from __future__ import annotations

import argparse

from imgkit_entrypoints.arguments import positive


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Options of dist-train."""
    parser.add_argument(
        "--steps", type=positive, default=100, metavar="N", help="optimizer steps (default 100)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help="samples a rank (default 32)"
    )
    parser.add_argument("--lr", type=float, default=0.05, metavar="X", help="learning rate (default 0.05)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (default 0)")
    parser.add_argument(
        "--log-every", type=positive, default=10, metavar="N", help="steps a line (default 10)"
    )
