"""A STUB of torch.distributed.run with the flags of torch 2.3.1, no more: any other ends it with code 2.

Starts the workers as torchrun does, without a rendezvous: each node has nproc of them, told its ranks.
"""

import argparse
import os
import subprocess
import sys


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    valued = """nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts
        monitor-interval start-method role log-dir redirects tee local-ranks-filter node-rank master-addr
        master-port local-addr logs-specs"""
    for name in valued.split():
        parser.add_argument(f"--{name}")
    for name in ("standalone", "module", "no-python", "run-path"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    nproc, node = int(args.nproc_per_node), int(args.node_rank or 0)
    world = nproc * int(args.nnodes or "1")
    workers = []
    for local in range(nproc):
        ranks = {"RANK": node * nproc + local, "LOCAL_RANK": local, "WORLD_SIZE": world}
        env = os.environ | {name: str(value) for name, value in ranks.items()}
        command = [args.training_script, *args.training_script_args]
        workers.append(subprocess.Popen(command, env=env, start_new_session=True))
    codes = [worker.wait() for worker in workers]
    sys.exit(1 if any(codes) else 0)
