"""A real sshd for tests of remotes, with keys, a configuration and a count of ssh's calls of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from labkit import IMGKIT, Cluster, Done, expect_success, output, run, split_line, until

far_marks = [pytest.mark.sshd, pytest.mark.programs("rsync")]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "sshd"


@dataclass(frozen=True, kw_only=True)
class FarHost:
    """An account that ssh reaches by the names ``far`` and ``far2``, and a person's home here."""

    folder: Path
    """Short, since sockets lie in it."""

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "XDG_CACHE_HOME": f"{self.folder}/cache",
            "XDG_CONFIG_HOME": f"{self.folder}/config",
            "XDG_STATE_HOME": f"{self.folder}/state",
            "XDG_RUNTIME_DIR": f"{self.folder}/run",
        }

    def imgkit(self, *args: object, **options: Any) -> Done:
        """Run imgkit without a terminal, so that ssh cannot ask this test's person."""
        env = {**self.env, **options.pop("env", {})}
        return run("setsid", "--wait", *IMGKIT, *split_line(*args), env=env, **options)

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process reach ``far``, too."""
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)

    def calls(self) -> list[str]:
        """The words of each call of ssh so far, without those that only look at the shared connection."""
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if " -O " not in line]

    def configure(self, *lines: str) -> None:
        """Write ssh's configuration: how ``far`` is reached."""
        common = (
            f"IdentityFile {self.folder}/id",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.folder}/known_hosts",
            "GlobalKnownHostsFile /dev/null",
            "StrictHostKeyChecking yes",
            "HostKeyAlias far",
        )
        (self.folder / "ssh_config").write_text(
            "Host far far2\n" + "".join(f"  {row}\n" for row in (*common, *lines))
        )

    def direct(self, user: str = "") -> None:
        """Reach ``far`` without a proxy; ends the shared connection."""
        self.through(user=user)

    def through(self, *proxy_argv: object, user: str = "") -> None:
        """Reach ``far`` through a ProxyCommand; ends the shared connection."""
        self.disconnect()
        port = next(
            line.split()[1]
            for line in (self.folder / "sshd_config").read_text().splitlines()
            if "Port " in line
        )
        proxy = (f"ProxyCommand {shlex.join(map(str, proxy_argv))}",) if proxy_argv else ()
        self.configure("HostName 127.0.0.1", f"Port {port}", f"User {user or getpass.getuser()}", *proxy)

    def know(self, key: Path) -> None:
        """Make the public key `key` the one that ssh expects of ``far``."""
        kind, text, *_ = key.read_text().split()
        (self.folder / "known_hosts").write_text(f"far {kind} {text}\n")

    def disconnect(self) -> None:
        """End the shared connections."""
        for name in ("far", "far2"):
            self.master("exit", name)

    def master(self, command: str, name: str = "far") -> Done:
        """Ask the process that holds the shared connection."""
        return run(
            *(self.folder / "bin/ssh", "-O", command, "-o", f"ControlPath={self.folder}/run/imgkit/%C", name)
        )

    def kill_master(self) -> None:
        """Kill the process that holds the shared connection; its socket stays."""
        match = re.search(r"pid=(\d+)", self.master("check").stderr)
        assert match
        os.kill(int(match[1]), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class FarSite:
    """A person's folder here, and a login node with a store."""

    far: FarHost
    cluster: Cluster
    folder: Path
    store: Path

    def imgkit(self, *args: object, **env: str) -> Done:
        return self.far.imgkit(*args, folder=self.folder, env=env)

    def add_remote(self, recipe: str, name: str = "site", user: str = "root") -> None:
        """Write the recipe here, and make the login node its remote ``far``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.yaml").write_text(recipe)
        login_node(self.far, self.cluster, user)
        expect_success(self.imgkit("remote add far", f"far:{self.store}", "--recipe", f"./{name}.yaml"))


def login_node(
    host: FarHost, cluster: Cluster, user: str = "root", *, through: Sequence[object] = ()
) -> None:
    """Configure `host` for the login node of a virtual cluster that is up.

    Parameters
    ----------
    through : a program before the words that reach the node, such as ``lab/remote/wire_proxy.py``.
    """
    keys = cluster.state / "etc"
    for key in ("id", "id.pub"):
        shutil.copy(keys / key, host.folder / key)
    (host.folder / "id").chmod(0o600)
    shutil.chown(host.folder / "id", os.geteuid())
    host.know(keys / "hostkey.pub")
    serve = (*cluster.argv("exec", "login", "--clean-env", "--"), SSHD, "-i", "-f", keys / "sshd_config")
    proxy = shlex.join(map(str, (*through, *serve)))
    host.configure(f"User {user}", f"ProxyCommand {proxy}")
    until(lambda: run(host.folder / "bin/ssh", "far", "true").returncode == 0)


@contextlib.contextmanager
def far_host(folder: Path) -> Iterator[FarHost]:
    """A home without a way to ``far``; `folder` must be new and short."""
    for part in (folder, folder / "bin", folder / "run"):
        part.mkdir(mode=0o700)
    wrapper = folder / "bin/ssh"
    real = shutil.which("ssh") or "ssh"
    wrapper.write_text(
        f'#!/bin/sh\necho "ssh $*" >> {folder}/calls\nexec {real} -F {folder}/ssh_config "$@"\n'
    )
    wrapper.chmod(0o755)
    output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id")
    host = FarHost(folder=folder)
    try:
        yield host
    finally:
        if (folder / "ssh_config").exists():
            host.disconnect()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def sshd(host: FarHost, *options: str, forced: Sequence[str] = (), pam: str = "") -> Iterator[int]:
    """A real sshd on a port of its own, which `host` is configured for; yields its process id.

    Parameters
    ----------
    options : lines of sshd_config.
    forced : a command that runs instead of each command, which is in ``$SSH_ORIGINAL_COMMAND``.
    pam : text of ``/etc/pam.d/sshd`` for this sshd alone; needs root.
    """
    folder = host.folder
    key = folder / "hostkey"
    if not key.exists():
        output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    shutil.copy(folder / "id.pub", folder / "authorized")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = (
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {key}",
        f"AuthorizedKeysFile {folder}/authorized",
        f"PidFile {folder}/sshd.pid",
        "StrictModes no",
        *options,  # the first value of a word counts
        f"UsePAM {'yes' if pam else 'no'}",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        *([f"ForceCommand {shlex.join(forced)}"] if forced else []),
    )
    (folder / "sshd_config").write_text("".join(f"{row}\n" for row in lines))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    service: tuple[str | Path, ...] = ()
    if pam:
        (folder / "pam").write_text(pam)
        mount = 'mount --bind "$1" /etc/pam.d/sshd && shift && exec "$@"'
        service = ("unshare", "--mount", "sh", "-c", mount, "sh", folder / "pam")
    server = subprocess.Popen(
        [*service, SSHD, "-D", "-e", "-f", folder / "sshd_config"],
        stdin=subprocess.DEVNULL,
        stderr=(folder / "sshd.log").open("ab"),
        start_new_session=True,
    )
    host.know(folder / "hostkey.pub")
    host.configure("HostName 127.0.0.1", f"Port {port}", f"User {getpass.getuser()}")
    try:
        until(lambda: _listens(port), within_s=20)
        yield server.pid
    finally:
        host.disconnect()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def run_at_once(function: Callable[[], object]) -> None:
    """Call a function in three threads, and wait for them."""
    threads = [threading.Thread(target=function) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
