"""A remote that only stores, over a real sshd, and containers of Docker as pods with its volume.

Nothing here can run RunAI: FAKE_RUNAI stands in for its client, and keeps the command of the pods.
"""

from __future__ import annotations

import itertools
import os
import pwd
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import afterwards, expect_success, ordinary_user, output, public_folder
from remotekit import FarHost, far_host, sshd

FAKE_RUNAI = """\
#!/bin/sh
case "$*" in
"submit-dist pytorch --help") echo "      --workers int   pods" ;;
*--help) exit 1 ;;
*) printf '%s\\n' "$@" > "$0-called" ;;
esac
"""
PROGRAM = """\
import os, pathlib
with open("b c.txt", "a") as stream:
    stream.write("more\\n")
pathlib.Path(os.environ["IMGKIT_RUN_DIR"], "place-" + os.environ["RANK"]).write_text(os.getcwd())
print(open("data/table").read())
"""

pytestmark = [
    pytest.mark.docker,
    pytest.mark.sshd,
    pytest.mark.programs("rsync"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes an ordinary user"),
]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A project here, and a volume with the store of an ordinary user."""

    far: FarHost
    folder: Path
    store: Path
    user: pwd.struct_passwd
    image: str
    volume: Path

    def imgkit(self, *args):
        return self.far.imgkit(*args, folder=self.folder)

    def submit(self):
        """Submit the program, and return the arguments of the client."""
        expect_success(
            self.imgkit(
                *("run", "--on", "mlo", "--image", self.image, "--nodes", "2", "--gpus", "0", "--detach"),
                *("--", "python3", "train.py"),
            )
        )
        return self.client_argv()

    def client_argv(self):
        """Return the last arguments of the client."""
        return (self.far.folder / "bin/runai-called").read_text().splitlines()

    def run_pods(self, client_argv):
        """Run both pods to their end, which must be a good one, and return their outputs."""
        pods = [self.start_pod(client_argv, rank) for rank in range(2)]
        outputs = [pod.communicate(timeout=120)[0] for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0], outputs
        return outputs

    def start_pod(self, client_argv, rank, user=""):
        """Start a container as the operator starts a pod of `client_argv`.

        Parameters
        ----------
        user : other ids than those that the client was told.
        """
        values = dict(itertools.pairwise(client_argv))
        env = [text for flag, text in itertools.pairwise(client_argv) if flag == "-e"]
        options = [argument for text in (*env, f"RANK={rank}") for argument in ("--env", text)]
        return subprocess.Popen(
            [
                *("docker", "run", "--rm", "--network", "none", "--volume", f"{self.volume}:/mloscratch"),
                *("--user", user or f"{values['--run-as-uid']}:{values['--run-as-gid']}"),
                *("--workdir", values["--working-dir"], *options, self.image),
                *client_argv[client_argv.index("--") + 1 :],
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def site(standin_notorch):
    folder = public_folder("pod-volume")
    with ExitStack() as stack:
        stack.enter_context(afterwards('rm -rf "$1"', folder))
        name = stack.enter_context(ordinary_user())
        output("usermod", "--password", "*", name)  # a locked account cannot log in
        user = pwd.getpwnam(name)
        volume = folder / "scratch"
        (volume / "homes" / name).mkdir(parents=True)
        os.chown(volume / "homes" / name, user.pw_uid, user.pw_gid)
        far = stack.enter_context(far_host(folder / "far"))
        far.folder.chmod(0o755)  # sshd reads the keys as the user
        stack.enter_context(sshd(far))
        far.direct(name)
        client = far.folder / "bin/runai"
        client.write_text(FAKE_RUNAI)
        client.chmod(0o755)
        project = folder / "my project"
        (project / "data").mkdir(parents=True)
        (project / "train.py").write_text(PROGRAM)
        (project / "b c.txt").write_text("text\n")
        (project / "data/table").write_text("1 2 3\n")
        (project / "imgkit.toml").write_text('code = "."\ndata = ["data"]\n')
        store = volume / "homes" / name / "imgkit"
        new_site = Site(
            far=far,
            folder=project,
            store=store,
            user=user,
            image=standin_notorch,
            volume=volume,
        )
        added = ("--recipe", "mlo", "--pvc", "scratch:/mloscratch", "--volume", volume)
        expect_success(new_site.imgkit("remote", "add", "mlo", f"far:{store}", *added))
        yield new_site


def test_pods_run_the_sent_code_under_the_user_s_ids(site):
    outputs = site.run_pods(site.submit())
    assert all("1 2 3" in text for text in outputs)
    (run_folder,) = (site.store / "runs").iterdir()
    assert run_folder.stat().st_mode & 0o777 == 0o700
    inside = f"/mloscratch/{run_folder.relative_to(site.volume)}"
    assert [(run_folder / f"place-{rank}").read_text() for rank in range(2)] == [f"{inside}/workspace"] * 2
    assert (run_folder / "workspace/b c.txt").read_text() == "text\nmore\nmore\n"
    (stored,) = site.store.glob("code/*/workspace/b c.txt")
    assert stored.read_text() == "text\n"
    owners = {path.lstat().st_uid for path in site.store.rglob("*")}
    assert owners == {site.user.pw_uid}
    expect_success(site.imgkit("fetch", "mlo"))
    assert (site.folder / "runs" / run_folder.name / "place-1").read_text() == f"{inside}/workspace"


def test_resumed_pods_go_on_in_their_folder_with_today_s_code(site):
    site.run_pods(site.submit())
    (site.folder / "train.py").write_text(f'{PROGRAM}print("edited")\n')
    refused = site.imgkit("resume", "mlo", "--detach")
    assert (refused.returncode, "mlo may go on" in refused.stderr) == (2, True)
    expect_success(site.imgkit("cancel", "mlo"))
    expect_success(site.imgkit("resume", "mlo", "--detach"))
    outputs = site.run_pods(site.client_argv())
    assert all("1 2 3\n\nedited\n" in text for text in outputs), outputs
    (run_folder,) = (site.store / "runs").iterdir()
    assert (run_folder / "workspace/b c.txt").read_text() == "text\n" + 4 * "more\n"
    assert {path.lstat().st_uid for path in site.store.rglob("*")} == {site.user.pw_uid}


def test_pod_under_other_ids_cannot_enter_the_store(site):
    pod = site.start_pod(site.submit(), 0, user="4711:4711")
    text, _ = pod.communicate(timeout=120)
    assert pod.returncode != 0
    assert "ermission denied" in text
    assert list(site.store.glob("runs/*/workspace")) == []
