"""One node's launcher, as a process of its own: ``node.py OPTIONS_AS_JSON COMMAND...``."""

import json
import os
import resource
import signal
import sys
import time

from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.launch import agent, attempts, command_process, gpu_use, stop_protocol, watchdog
from imgkit_entrypoints.launch.agent import NodeAgent
from imgkit_entrypoints.launch.node_attempt import NodeCommand, NodeConfig
from imgkit_entrypoints.launch.plan import Timeouts
from imgkit_entrypoints.rollcall import probe, session
from imgkit_entrypoints.rollcall.messages import NodeInfo, Software
from imgkit_entrypoints.schedulers.placement import Placement, Size

options = json.loads(sys.argv[1])
session.BEAT_S, session.LOST_AFTER_S = options.get("beat_s", 0.2), options.get("lost_s", 2.0)
command_process.END_STEP_S, attempts.PEER_FAILED_S, stop_protocol.REPEAT_S = 0.5, 1.0, 0.2
watchdog.ANSWER_S, attempts.MIN_START_S = 2.0, 1.0
probe.STEP_S = options.get("step_s", probe.STEP_S)
agent.TICK_S, agent.ALONE_S = options.get("tick_s", 1.0), 1.0
gpu_use.START_AFTER_S = 0.0
rank = options.get("rank", 0)
if "open_files" in options:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (options["open_files"], hard))


def say(*lines: str) -> None:
    print("<{}>".format("\n".join(lines)), file=sys.stderr, flush=True)


def pack() -> None:
    time.sleep(options["pack_s"])
    say("packed")


placement = Placement(
    scheduler="manual",
    nnodes=options.get("nnodes", 1),
    node_rank=rank,
    hosts=tuple(options.get("hosts", ())),
    head=options.get("head", "127.0.0.1"),
    port=options.get("port"),
    job_id=options.get("job", ""),
    source={},
    size=Size.parse(options["size"]) if "size" in options else None,
)
me = NodeInfo(
    host=options.get("host", f"host{rank}"),
    software=Software(torch=options.get("torch", "2.13")),
    nproc=options.get("nproc", 1),
    address=options.get("address", ""),
    interface=options.get("interface", ""),
)
config = NodeConfig(
    command=NodeCommand(
        argv=sys.argv[2:],
        env={**os.environ, **options.get("env", {})},
        is_per_node=options.get("per_node", False),
        gpu_query=options.get("gpu_query", ()),
    ),
    placement=placement,
    node=me,
    log=say,
    max_failures=options.get("max_failures", 0),
    on_success=pack if "pack_s" in options else None,
    timeouts=Timeouts(
        grace_s=options.get("grace_s", 20.0),
        rollcall_s=options.get("timeout_s", 20.0),
        hang_after_s=options.get("hang_after_s", 0.0),
        lost_after_s=options.get("lost_s", 2.0),
    ),
)
try:
    code = NodeAgent(config).run()
except ImgkitError as error:
    say(*str(error).split("\n"))
    code = error.exit_code
if options.get("is_ended_late"):
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(code)
