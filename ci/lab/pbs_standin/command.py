"""The command ``ci/lab/pbs-standin``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pbs_standin
from pbs_standin.client import call_program
from pbs_standin.server import Server
from pbs_standin.site import open_site

USAGE = """\
pbs-standin STATE           serve jobs until this is ended; STATE is the folder of a cluster that is up

The programs qsub, qstat, qselect, qdel, pbsdsh and mpiexec are in STATE/pbs/bin, and on PATH in login shells
of the cluster's user. Needs root, as the cluster does.

Changes: STATE/pbs, the home folder of the cluster's user in STATE, and /var/tmp/pbs.ID while a job runs. The
output of a job stays in the folder of its qsub.
Undo: end it, then `cluster down`, which ends the jobs' processes too.
"""


def main(argv: Sequence[str]) -> int:
    """Serve jobs, or be one of the programs: ``pbs-standin STATE/pbs qsub ARGUMENTS...``."""
    if list(argv) == ["--help"]:
        print(f"{USAGE}\n{pbs_standin.__doc__}")
        return 0
    if len(argv) == 1 and Path(argv[0], "cluster.json").exists():
        server = Server(open_site(Path(argv[0])))
        server.install_programs()
        server.serve()
    if len(argv) > 1 and Path(argv[0], "socket").exists():
        folder, program, *args = argv
        return call_program(Path(folder), program, args)
    print("pbs-standin: no cluster is up there; see pbs-standin --help", file=sys.stderr)
    return 2
