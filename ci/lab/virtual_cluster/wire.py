"""A wire with delay between a node's cable and the switch, for kernels without netem.

The process of the wire takes the node's port from the switch. It carries frames between that port and a tap
device, which is plugged in instead, and holds each frame for some time.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from virtual_cluster.kernel import CLONE_NEWNET, network_of, setns
from virtual_cluster.programs import ClusterError, ProcessId, identify, run_tool
from virtual_cluster.state import Cluster, cluster_argv

# linux/if_tun.h, linux/sockios.h, linux/if_ether.h, asm-generic/socket.h
TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
SIOCETHTOOL = 0x8946
ETH_P_ALL = 3
SO_RCVBUFFORCE = 33

OFFLOADS = (0x15, 0x17, 0x1F, 0x24, 0x2C)
"""Commands of linux/ethtool.h that set the offloads of checksums (received, sent), TSO, GSO and GRO."""

IFREQ_BYTES = 40
INTERFACE_NAME_LIMIT = 15
FRAME_LIMIT = 65536
BATCH = 64
"""Frames that are read from one side before the other has its turn."""

Frame = bytes


class DelayQueue:
    """Frames on their way, each for the same time."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.frames: collections.deque[tuple[float, bool, Frame]] = collections.deque()
        """The time when a frame is due, whether it goes to the switch, and the frame."""

    def put(self, now: float, *, to_switch: bool, frame: Frame) -> None:
        """Begin to hold a frame."""
        self.frames.append((now + self.delay_s, to_switch, frame))

    def take_due(self, now: float) -> Iterator[tuple[bool, Frame]]:
        """Yield and forget the frames that are due, each with True if it goes to the switch."""
        while self.frames and self.frames[0][0] <= now:
            _, to_switch, frame = self.frames.popleft()
            yield to_switch, frame

    def seconds_to_next(self, now: float) -> float:
        """Return how long the next frame is still held; 1 s at most."""
        if not self.frames:
            return 1.0
        due = self.frames[0][0]
        return min(1.0, max(0.0, due - now))


def start_wire(cluster: Cluster, node: str, milliseconds: float) -> None:
    """Start the wire of a node as a process of its own, and wait until it carries frames."""
    state = cluster.config.state
    stop_wire(state, node)
    log_file = state / "log" / f"wire-{node}.out"
    read, write = os.pipe()
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            cluster_argv(state, "_wire", node, milliseconds, write),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[write],
        )
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        if pipe.read(1) != b"+":
            raise ClusterError(f"the delayed wire did not start: {log_file.read_text()[-500:]}")
    pid, start_ticks = identify(process.pid)
    _process_file(state, node).write_text(f"{pid} {start_ticks}")


def stop_wire(state: Path, node: str) -> None:
    """End the wire of a node, if there is one."""
    file = _process_file(state, node)
    if file.exists():
        pid, start_ticks = map(int, file.read_text().split())
        ProcessId(pid, start_ticks).end(signal.SIGKILL, seconds=5)
        file.unlink()


def _process_file(state: Path, node: str) -> Path:
    """Return the file with pid and start time of a node's wire."""
    return state / f"wire-{node}"


def run_wire(cluster: Cluster, node: str, port: str, delay_s: float, ready: int) -> None:
    """Carry frames, until the keeper ends: its network namespace has both ends of the wire.

    Parameters
    ----------
    port : the node's network interface on the switch
    ready : a descriptor that gets a byte when frames are carried
    """
    keeper = os.pidfd_open(cluster.keeper.pid)
    with network_of(cluster.first_process(node).pid):
        _turn_off_offloads("eth0")
    setns(keeper, CLONE_NEWNET)
    _turn_off_offloads(port)
    tap_name = f"t-{node}"[:INTERFACE_NAME_LIMIT]
    tap = _open_tap(tap_name)
    cable = _open_cable(port)
    run_tool("ip", "link", "set", tap_name, "master", "switch", "up")
    os.write(ready, b"+")
    os.close(ready)
    _carry_frames(tap, cable, keeper, DelayQueue(delay_s))


def _carry_frames(tap: int, cable: socket.socket, keeper: int, queue: DelayQueue) -> None:
    """Hand frames from one end to the other until the keeper ends."""
    sources: list[socket.socket | int] = [tap, cable, keeper]
    while True:
        for to_switch, frame in queue.take_due(time.monotonic()):
            with contextlib.suppress(OSError):  # the link is down
                if to_switch:
                    os.write(tap, frame)
                else:
                    cable.send(frame)
        pause_s = queue.seconds_to_next(time.monotonic())
        readable = select.select(sources, [], [], pause_s)[0]
        if keeper in readable:
            return
        now = time.monotonic()
        if tap in readable:
            for frame in _read_tap(tap):
                queue.put(now, to_switch=False, frame=frame)
        if cable in readable:
            for frame in _read_cable(cable):
                queue.put(now, to_switch=True, frame=frame)


def _turn_off_offloads(interface: str) -> None:
    """Let an interface send frames as a wire has them: no 64 KiB frames without checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # an interface without this offload
                fcntl.ioctl(device, SIOCETHTOOL, request.ljust(IFREQ_BYTES, b"\0"))


def _open_tap(name: str) -> int:
    """Make a tap device, and return its descriptor. The device ends with this process."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI)
    fcntl.ioctl(tap, TUNSETIFF, request.ljust(IFREQ_BYTES, b"\0"))
    return tap


def _open_cable(port: str) -> socket.socket:
    """Take a node's port from the switch, and return a socket for its frames."""
    cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    run_tool("ip", "link", "set", port, "nomaster")
    cable.bind((port, 0))
    with contextlib.suppress(OSError):
        cable.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
    cable.setblocking(False)
    return cable


def _read_tap(tap: int) -> Iterator[Frame]:
    """Yield frames that the switch has sent."""
    with contextlib.suppress(OSError):  # no more frames, or the link is down
        for _ in range(BATCH):
            yield os.read(tap, FRAME_LIMIT)


def _read_cable(cable: socket.socket) -> Iterator[Frame]:
    """Yield frames that the node has sent, and not those that the wire has sent to it."""
    with contextlib.suppress(OSError):  # no more frames, or the link is down
        for _ in range(BATCH):
            frame, address = cable.recvfrom(FRAME_LIMIT)
            packet_type = address[2]
            if packet_type != socket.PACKET_OUTGOING:
                yield frame
