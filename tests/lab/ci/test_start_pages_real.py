"""README and the pages of Start do what they promise: their commands, as a reader types them, in their order.

Two things differ from the pages. `imgkit build` takes the stand-in as its base, since no registry is asked.
Jobs get `IMGKIT_DEVICE=cpu`, since the nodes have no GPUs. A command that waits, or that another test runs,
is only rendered.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from labkit import IMGKIT, ROOT, Cluster, docker, expect_success, output, run, until
from remotekit import far_host, login_node

ON_CPU = ("--env", "IMGKIT_DEVICE=cpu", "--env", "IMGKIT_NPROC=2")

# One group with the test of ci/quickstart: both give images the names of shipped recipes.
pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("quickstart")]


def commands(page):
    """The lines of a page's blocks of commands."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)  # recipes and outputs
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    assert lines
    return [line.partition(" #")[0].strip() for line in lines]


def take(lines, start):
    """Remove the first of `lines`, which must begin with `start`."""
    assert lines, f"the page has no more commands; expected: {start}"
    assert lines[0].startswith(start)
    return lines.pop(0)


def shell(line, folder, *args):
    """Run a line of a page in `folder` with `args` at its end, and return its output."""
    typed = re.sub(r"^imgkit ", lambda _: shlex.join(IMGKIT) + " ", " ".join((line, *args)))
    return output("bash", "-c", typed, folder=folder, env={"XDG_STATE_HOME": str(folder / "state")})


@pytest.fixture
def folder():
    """The folder in which the commands run; the images that they name are removed at the end."""
    names = ("cpu:latest", "mn5:latest", "mine:latest", "letters:latest")
    before = docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    # Not pytest's own folder: jobs of the cluster's ordinary user run here.
    folder = Path(f"/tmp/imgkit-start-{os.getpid()}")
    folder.mkdir(mode=0o777)
    yield folder
    shutil.rmtree(folder)
    run("docker", "rmi", *(name for name in names if name not in before))


@pytest.mark.soak  # ci/quickstart does nearly the same
def test_laptop_page_trains_and_resumes(folder, standin):
    lines = commands("docs/start/laptop.md")
    take(lines, "pip install torch numpy --index-url")  # from the internet
    take(lines, "pip install .")
    assert "--run-dir first" in take(lines, "dist-train --nproc 2")  # ci/release runs it: torch is not here
    shell(take(lines, "imgkit build cpu"), folder, "--base", standin)
    train = take(lines, "imgkit run cpu")
    losses = re.search(r"loss (\S+) -> (\S+),", shell(train, folder))
    assert losses is not None
    assert float(losses[2]) < float(losses[1])
    assert {"checkpoints", "metrics.jsonl", "curves.svg"} <= {
        path.name for path in (folder / "second").iterdir()
    }
    metrics = (folder / "second/metrics.jsonl").read_text()
    shell(train, folder)  # typed again: it goes on from the last checkpoint, which is the end
    assert (folder / "second/metrics.jsonl").read_text() == metrics
    assert "docker run" in shell(take(lines, "imgkit run cpu"), folder)
    assert "docker" in shell(take(lines, "imgkit doctor cpu"), folder)
    assert lines == []


CLUSTER_PAGE = "docs/start/cluster.md"
BY_HAND = "imgkit build mn5"
"""The first command of the part of the page about a cluster that is for work by hand."""


def start_site(stack, far, cluster):
    """Start a cluster of two nodes whose logins know `module`, and make its login node the host `far`."""
    stack.callback(cluster.down)
    cluster.up(2, "--cpus", "80")
    for node in ("login", "node1", "node2"):  # where a login finds a site's modules
        put = 'echo "module() { :; }" > /etc/profile.d/modules.sh'
        assert cluster("exec", node, "--", "sh", "-c", put).returncode == 0
    login_node(far, cluster)


@pytest.mark.soak  # tests/lab/job submits the same jobs
@pytest.mark.slurm
def test_cluster_page_runs_jobs_of_two_nodes(folder, standin):
    lines = commands(CLUSTER_PAGE)
    lines = lines[lines.index(BY_HAND) :]
    shell(take(lines, BY_HAND), folder, "--base", standin)
    assert "rsync" in shell(take(lines, "imgkit save mn5"), folder)
    shell(take(lines, "imgkit verify mn5.tar"), folder)
    shell(take(lines, "imgkit sif mn5.tar"), folder)
    convert = take(lines, "imgkit sif mn5.tar --submit")
    assert "mn5.tar" in shell(convert, folder, "--dry-run")
    assert "--nodes=2" in shell(take(lines, "imgkit run mn5"), folder)
    cluster = Cluster(state=Path(f"/tmp/imgkit-start-cluster-{os.getpid()}"))
    env = {"XDG_STATE_HOME": str(folder / "state"), "BASH_FUNC_module%%": "() { :; }"}

    def typed(line):
        args = line.replace(" -- ", f" {' '.join(ON_CPU)} -- ").removeprefix("imgkit ").split()
        if args[0] == "run":
            args.insert(1, "--detach")
        result = expect_success(cluster("exec", "login", "--cwd", folder, "--", *IMGKIT, *args, env=env))
        return result.stdout.strip()

    cluster.up(2, "--cpus", "80")
    try:
        job = typed(take(lines, "imgkit run mn5"))
        log = folder / f"mn5-{job}.out"
        until(lambda: not cluster("squeue", "--noheader", f"--jobs={job}").stdout.strip())
        assert "all_reduce of ones: 4" in log.read_text()
        assert "--" in shell(
            take(lines, "imgkit run mn5").replace("imgkit run", "imgkit run --dry-run"), folder
        )
        job = typed(take(lines, "imgkit run mn5"))
        assert job in typed(take(lines, "imgkit status").replace("4711", job))
        take(lines, "imgkit logs")  # it follows until Ctrl-C: tests/lab/job
        typed(take(lines, "imgkit cancel").replace("4711", job))
        until(lambda: not cluster("squeue", "--noheader", f"--jobs={job}").stdout.strip())
        assert lines == []
    finally:
        cluster.down()


PROJECT = {
    "configurator.py": """\
import sys

for argument in sys.argv[1:]:
    if argument.startswith("--"):
        name, _, value = argument[2:].partition("=")
        globals()[name] = type(globals()[name])(value)
    else:
        exec(open(argument).read())
""",
    "config/small.py": "steps = 40\n",
    "requirements.txt": "torch==2.1.0\nnumpy>=1\n",
    "data/words/input.txt": "the quick brown fox jumps over the lazy dog\n" * 9,
    "train.py": """\
import os

import torch
import torch.distributed as dist

out_dir = "out"
steps = 2000
exec(open("configurator.py").read())
text = open("data/words/input.txt").read()
letters = torch.tensor([ord(letter) for letter in text])
dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(128, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(steps):
    loss = torch.nn.functional.cross_entropy(model(letters[:-1]), letters[1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    os.makedirs(out_dir, exist_ok=True)
    torch.save(model.module.state_dict(), os.path.join(out_dir, "model.pt"))
    print(f"trained {steps} steps in {os.getcwd()}", flush=True)
dist.barrier()
dist.destroy_process_group()
""",
}
"""A project that is used as nanoGPT is: relative paths, and files that are executed."""

EPOCHS = """\
import argparse

import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
dist.init_process_group()
dist.barrier()
if dist.get_rank() == 0:
    print(f"{parser.parse_args().epochs} epochs on {dist.get_world_size()} ranks", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slurm
@pytest.mark.sshd
@pytest.mark.programs("rsync")
def test_start_page_takes_a_program_to_two_nodes(folder, standin):
    """The addresses of repository and cluster are replaced, as the page tells its reader to do."""
    lines = commands(CLUSTER_PAGE)
    lines = lines[: lines.index(BY_HAND)]
    by_hand = ("imgkit build", "imgkit save", "imgkit sif", "ci/")
    story = [line for line in commands("README.md") if not line.startswith(by_hand)][:4]
    assert story[:2] == [line for line in lines if line.startswith(("imgkit remote", "imgkit init"))]
    assert [line.startswith("imgkit fetch") for line in lines].index(True) < 8  # from clone to results
    site_folder = Path(f"/tmp/imgkit-page-{os.getpid()}")
    cluster = Cluster(state=site_folder / "c")
    for name, text in PROJECT.items():
        (folder / "far" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "far" / name).write_text(text)
    shell(
        "git init -q && git add . && git -c user.name=me -c user.email=me@here commit -qm one", folder / "far"
    )
    with ExitStack() as stack:
        far = stack.enter_context(far_host(site_folder))
        start_site(stack, far, cluster)
        shell(take(lines, "git clone").replace("https://github.com/me/letters.git", "far letters"), folder)
        clone = folder / take(lines, "cd ").removeprefix("cd ")

        def typed(line, *flags):
            args = shlex.split(line)[1:]
            split = args.index("--") if "--" in args else len(args)
            argv = (*args[:split], *flags, *args[split:])
            result = far.imgkit(*argv, folder=clone)
            # gloo of torch 2.13 seldom ends a program that is done by SIGABRT, as it ends itself.
            if result.returncode and "terminate called without an active exception" in result.stdout:
                result = far.imgkit(*argv, folder=clone)
            assert result.returncode == 0, result.stdout + result.stderr
            return result.stdout + result.stderr

        def run_line(line=""):
            """Run `line`, or the next run of the page, and return its output and its job."""
            line = line or take(lines, "imgkit run")
            base = () if "letters.sif" in line else ("--base", standin)
            text = typed(line, *base, *ON_CPU)
            job = re.search(r"(\d+@mn5) completed", text)
            assert job, text
            return text, job[1]

        typed(
            re.sub(r"me@\S+", f"far:{site_folder}/store", take(lines, "imgkit remote add mn5")),
            "--transfer",
            "far",
        )
        typed(take(lines, "imgkit init"))
        assert (clone / "train.py").read_text() == PROJECT["train.py"]
        page = (ROOT / CLUSTER_PAGE).read_text(encoding="utf-8")
        recipe_lines = page.split("```yaml\n")[1].split("```")[0].replace("tqdm>=4", "numpy>=1")
        assert set(recipe_lines.splitlines()) <= set((clone / "letters.yaml").read_text().splitlines())
        assert "all_reduce of ones: 4" in run_line()[0]
        text, job = run_line()
        assert "trained 40 steps in /workspace\n" in text
        typed(take(lines, "imgkit fetch").replace("4711@mn5", job))
        assert [*clone.glob("runs/*/workspace/out/model.pt")]
        # An edit is what the next run has, and builds nothing.
        edited = (clone / "train.py").read_text().replace("trained", "now trained")
        (clone / "train.py").write_text(edited)
        text = run_line()[0]
        assert "now trained 20 steps in /workspace\n" in text
        assert "to send: nothing; mn5 has the image" in text
        assert lines == []
        # The image by itself has no code, and another folder can be that of a command.
        assert "--pwd /srv" in typed("imgkit shell letters.sif --dry-run --workdir /srv")
        args = ("run", "letters.sif", "-A", "a", "--qos", "acc_debug", "--time", "5m")
        train = (*ON_CPU, "--", "dist-run", "train.py", "config/small.py", "--steps=10")
        env = {"XDG_STATE_HOME": str(folder / "state"), "BASH_FUNC_module%%": "() { :; }"}
        result = expect_success(
            cluster("exec", "login", "--cwd", clone, "--", *IMGKIT, *args, *train, env=env)
        )
        assert f"now trained 10 steps in {clone}\n" in result.stdout
        assert (clone / "out/model.pt").is_file()
        # The same image and code under Docker.
        (folder / "laptop.yaml").write_text("extends: cpu\n")
        line = f"imgkit run ./laptop.yaml --image letters:latest --code letters {' '.join(ON_CPU)}"
        trained = shell(f"{line} -- dist-run train.py config/small.py", folder)
        assert "trained 40 steps in /workspace\n" in trained
        assert [*folder.glob("runs/*/workspace/out/model.pt")]
        # README's last line has a program with options of its own.
        (clone / "train.py").write_text(EPOCHS)
        assert story[2] == "imgkit run -- dist-hello"
        assert "3 epochs on 4 ranks" in run_line(story[3])[0]
