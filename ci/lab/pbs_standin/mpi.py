"""mpiexec of PALS: its options, and the variables of its ranks."""

from __future__ import annotations

import getopt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pbs_standin.protocol import RefusedError

HELP = "Usage: mpiexec ...\n  --disable-rdzv-get   stand-in\n"
LONG_OPTIONS = ("ppn=", "cpu-bind=", "env=", "hosts=", "disable-rdzv-get")


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiLaunch:
    """A call of mpiexec: ``mpiexec -n 4 --ppn 2 --env A=1 program``."""

    ranks: int
    ranks_per_node: int = 1
    env: Mapping[str, str]
    """The variables of ``--env``."""
    argv: Sequence[str]
    """The program, with its arguments."""

    def node_index(self, rank: int) -> int:
        """Return the position of a rank's host among the job's hosts."""
        return rank // self.ranks_per_node

    def rank_environment(self, rank: int) -> dict[str, str]:
        """Return the variables that mpiexec sets for a rank."""
        node_index = self.node_index(rank)
        ranks_from_here = self.ranks - node_index * self.ranks_per_node
        values = {
            "PALS_RANKID": rank,
            "PALS_NODEID": node_index,
            "PALS_APID": "c0de",
            "PALS_LOCAL_RANKID": rank % self.ranks_per_node,
            "PALS_LOCAL_SIZE": min(self.ranks_per_node, ranks_from_here),
            "PMI_RANK": rank,
            "PMI_SIZE": self.ranks,
        }
        return {name: str(value) for name, value in values.items()}


def parse_mpiexec(args: Sequence[str]) -> MpiLaunch:
    """Return what a call of mpiexec asks for."""
    try:
        options, argv = getopt.getopt(list(args), "n:", list(LONG_OPTIONS))
    except getopt.GetoptError as error:
        raise RefusedError(f"mpiexec: {error}\n") from None
    by_flag = dict(options)
    env = {}
    for flag, value in options:
        if flag == "--env":
            name, _, text = value.partition("=")
            env[name] = text
    return MpiLaunch(
        ranks=int(by_flag["-n"]), ranks_per_node=int(by_flag.get("--ppn", 1)), env=env, argv=argv
    )


def exit_status(codes_at_end: Sequence[int | None], final_codes: Sequence[int]) -> int:
    """Return mpiexec's exit status, in 0 to 255.

    Parameters
    ----------
    codes_at_end : the exit status of each rank when mpiexec ended the others; None for a rank that ran
    final_codes : the exit status of each rank after that
    """
    for code in (*codes_at_end, *final_codes):
        if code:
            return code % 256
    return 0
