"""The first process of a node: it sets the node up, starts its daemons, and then reaps processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NoReturn

from virtual_cluster.kernel import (
    MS_BIND,
    MS_MOVE,
    MS_REC,
    PR_SET_PDEATHSIG,
    mount,
    prctl,
)
from virtual_cluster.programs import ClusterError, find_program, is_reachable, run_tool, wait_for
from virtual_cluster.state import LOGIN, NETWORK, ClusterConfig

DAEMON_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUN_FOLDERS = ("sys", "etc-upper", "etc-work", "sshd", "munge", "lock", "user", "local")
PLUGIN_FOLDERS = ("slurm-wlm", "pmix2", "openmpi", "prte")
"""Folders of plug-ins, which a program refuses if they are of another version."""

SSH_PORT = 22
SLURMCTLD_PORT = 6817
MUNGE_SOCKET = Path("/run/munge/munge.socket.2")


def run_node(config: ClusterConfig, name: str, go: int, ready: int) -> NoReturn:
    """Be the first process of a node, in namespaces of its own.

    Parameters
    ----------
    go : a descriptor with a byte to read as soon as the keeper has plugged in the network
    ready : a descriptor that gets a byte when all daemons answer
    """
    os.read(go, 1)
    # Not earlier: until then the parent may be the process that forked this one and is about to exit.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    socket.sethostname(name)
    _mount_file_systems(config)
    _write_etc(config, name)
    _set_up_network(config.address(name))
    if config.has_ssh:
        _start_sshd(config, name)
    if config.slurm:
        _start_slurm(config, name)
    if config.has_ssh:
        wait_for(lambda: is_reachable("127.0.0.1", SSH_PORT), 10, f"sshd on {name}")
    os.write(ready, b"+")
    os.close(ready)
    _reap_forever()


def _reap_forever() -> NoReturn:
    """Do what an init must: collect the exit status of processes that have lost their parent."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.2)


def _mount_file_systems(config: ClusterConfig) -> None:
    """Give the node a /proc, /sys, /run, /dev/shm and /etc of its own, and the other release's /usr."""
    mount("proc", "/proc", "proc")
    if config.release:
        _mount_release(config.release)
    mount("tmpfs", "/run", "tmpfs", data="mode=755,size=256m")
    for folder in RUN_FOLDERS:
        Path("/run", folder).mkdir()
    Path("/run/local").chmod(0o1777)  # node-local scratch
    mount("sysfs", "/run/sys", "sysfs")
    if Path("/sys/fs/cgroup").is_dir():  # the machine's control groups are kept
        mount("/sys/fs/cgroup", "/run/sys/fs/cgroup", flags=MS_BIND | MS_REC)
    mount("/run/sys", "/sys", flags=MS_MOVE)
    mount("tmpfs", "/dev/shm", "tmpfs", data="mode=1777")
    mount("overlay", "/etc", "overlay", data="lowerdir=/etc,upperdir=/run/etc-upper,workdir=/run/etc-work")
    for folder in config.private:
        mount("tmpfs", folder, "tmpfs", data="mode=1777")
    _name_libpmix()


def _mount_release(release: str) -> None:
    """Lay the /usr of another release over the node's. A newer C library runs older programs, too."""
    mount("overlay", "/usr", "overlay", data=f"lowerdir={release}/usr:/usr")
    for plugins in PLUGIN_FOLDERS:  # none of another version beside them
        for folder in Path(release, "usr/lib").glob(f"*/{plugins}"):
            mount(str(folder), str(folder).removeprefix(release), flags=MS_BIND)


def _name_libpmix() -> None:
    """Give libpmix the name by which Debian's Slurm asks for it, and which only libpmix-dev has."""
    for folder in Path("/usr/lib").glob("*/pmix2/lib"):
        if (folder / "libpmix.so").exists() or not (folder / "libpmix.so.2").exists():
            continue
        for scratch in ("/run/pmix-upper", "/run/pmix-work"):
            Path(scratch).mkdir()
        layers = f"lowerdir={folder},upperdir=/run/pmix-upper,workdir=/run/pmix-work"
        mount("overlay", str(folder), "overlay", data=layers)
        (folder / "libpmix.so").symlink_to("libpmix.so.2")


def _write_etc(config: ClusterConfig, name: str) -> None:
    """Write the names of all nodes, and the cluster's user, into the node's own /etc."""
    Path("/etc/hosts").write_text(format_hosts(config))
    Path("/etc/hostname").write_text(f"{name}\n")
    with contextlib.suppress(OSError):  # it may be a link into the machine's /run
        Path("/etc/resolv.conf").unlink()
    Path("/etc/resolv.conf").write_text("# no name server in here\n")
    user, uid = config.user, config.uid
    home = config.state / "home" / user
    _append("/etc/passwd", f"{user}:x:{uid}:{uid}:cluster user:{home}:/bin/bash\n")
    _append("/etc/group", f"{user}:x:{uid}:\n")
    _append("/etc/shadow", f"{user}:*:19000:0:99999:7:::\n")


def format_hosts(config: ClusterConfig) -> str:
    """Return the text of /etc/hosts."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{config.address(node)} {node}" for node in config.node_names]
    return "\n".join(lines) + "\n"


def _append(path: str, line: str) -> None:
    with Path(path).open("a") as file:
        file.write(line)


def _set_up_network(address: str) -> None:
    """Bring the node's two interfaces up."""
    run_tool("ip", "link", "set", "lo", "up")
    run_tool("ip", "addr", "add", f"{address}/24", "broadcast", f"{NETWORK}255", "dev", "eth0")
    run_tool("ip", "link", "set", "eth0", "up")


def _start_sshd(config: ClusterConfig, name: str) -> None:
    """Start sshd, and give ssh its configuration."""
    etc = config.state / "etc"
    shutil.copy(etc / "ssh_config", "/etc/ssh/ssh_config")
    _start_daemon(config, name, "sshd", "-D", "-e", "-f", etc / "sshd_config")


def _start_slurm(config: ClusterConfig, name: str) -> None:
    """Start munged, and slurmctld on the login node or slurmd on a compute node."""
    etc = config.state / "etc"
    Path("/etc/munge").mkdir(parents=True, exist_ok=True)
    os.chown("/etc/munge", 0, 0)  # munged refuses a key that others could change
    key = Path("/etc/munge/munge.key")
    shutil.copy(etc / "munge.key", key)
    key.chmod(0o400)
    os.chown(key, 0, 0)
    Path("/etc/slurm").mkdir(parents=True, exist_ok=True)
    for file in (etc / "slurm.conf", etc / "gres.conf"):
        if file.exists():
            shutil.copy(file, "/etc/slurm")
    _start_daemon(
        config,
        name,
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={MUNGE_SOCKET}",
        "--pid-file=/run/munge/munged.pid",
        "--seed-file=/run/munge/seed",
        "--num-threads=2",
    )
    wait_for(MUNGE_SOCKET.exists, 10, f"munged on {name}")
    if name == LOGIN:
        _start_daemon(config, name, "slurmctld", "-D", "-i")
    else:
        wait_for(lambda: is_reachable(config.address(LOGIN), SLURMCTLD_PORT), 20, "slurmctld")
        _start_daemon(config, name, "slurmd", "-D", "-N", name)


def _start_daemon(config: ClusterConfig, node: str, program: str, *args: object) -> None:
    """Start a daemon, whose output is in ``log/PROGRAM-NODE.out`` of the cluster's folder."""
    path = find_program(program)
    if path is None:
        raise ClusterError(f"{program} is not installed")
    with (config.state / "log" / f"{program}-{node}.out").open("ab") as log:
        subprocess.Popen(
            [path, *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={"PATH": DAEMON_PATH, "LANG": "C.UTF-8"},
        )
