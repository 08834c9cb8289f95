"""``imgkit run --on`` over a real sshd to a real Slurm: build, send, submit, follow, come back, fetch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_image
from hub_server import TOKEN as HUB_TOKEN
from hub_server import serve_hub
from labkit import (
    IMGKIT,
    TOKEN,
    Cluster,
    expect_failure,
    expect_success,
    output,
    run,
    slurm_marks,
    soak,
    split_line,
    until,
)
from remotekit import FarSite, far_host, far_marks

BASE = "imgkit.local/standin:24.03-notorch"
RECIPE = f"""\
image:
  base: {BASE}
  platform: amd64
system:
  title: the virtual cluster
  scheduler: slurm
  runtime: {{kind: singularity, command: singularity}}
  node: {{gpus: 0, cpus: 2}}
"""
MEASURED = [
    *("sh", "-c"),
    """hostname; printf '{"step": %s, "loss": 2.5}\\n' 1 2 3 > "$IMGKIT_RUN_DIR/metrics.jsonl\"""",
]
SLOW = 'for i in $(seq 500); do echo "line $i"; sleep 0.5; done'  # longer than a test on a busy machine

pytestmark = [*slurm_marks, *far_marks, pytest.mark.xdist_group("far-run")]


@dataclass(frozen=True, kw_only=True)
class Site(FarSite):
    """A site whose store has a blank in its name."""

    sif: Path

    def run(self, *args, **env):
        """Run the image of the .sif, which is on both sides."""
        return self.imgkit(f"run {self.sif.name} --on far --time 5m", *split_line(*args), **env)

    def start(self, *args, **options):
        """Start what `run` runs, in a session of its own."""
        return subprocess.Popen(
            [*IMGKIT, *f"run {self.sif.name} --on far --time 5m".split(), *split_line(*args)],
            cwd=self.folder,
            env={**os.environ, **self.far.env},
            text=True,
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def from_recipe(self, *args, **env):
        return self.imgkit(f"run --on far --time 5m --base {BASE}", *split_line(*args), **env)

    def running(self, job):
        return bool(self.cluster("squeue --noheader", f"--jobs={job}").stdout.strip())


@pytest.fixture(scope="module")
def site(standin_notorch):
    folder = Path(f"/tmp/imgkit-run-{os.getpid()}")
    cluster = Cluster(state=folder / "c")
    with far_host(folder) as far:
        name = f"line{os.getpid()}"  # the image's name: tests run side by side
        here, store = folder / "here", folder / "my store"
        new_site = Site(far=far, cluster=cluster, folder=here, store=store, sif=here / f"{name}.sif")
        cluster.up(2)
        try:
            new_site.add_remote(RECIPE, name)
            show = 'echo "$(hostname) has [$1]"'
            result = expect_success(new_site.from_recipe("--nodes 2 -- sh -c", show, "x", "a  b'c"))
            (new_site.folder / "first.out").write_text(result.stdout)
            (new_site.folder / "first.err").write_text(result.stderr)
            yield new_site
        finally:
            far.disconnect()
            cluster.down()
            run("docker", "rmi", "--force", f"{name}:latest")


def handle(result):
    match = re.search(r"job (\d+@far);", result.stderr)
    assert match, result.stderr
    return match[1]


def number_of(result):
    return handle(result).partition("@")[0]


def test_one_command_builds_sends_submits_and_follows(site):
    messages = (site.folder / "first.err").read_text()
    job_output = (site.folder / "first.out").read_text()
    assert sorted(job_output.splitlines()) == ["node1 has [a  b'c]", "node2 has [a  b'c]"]
    assert "imgkit: to send: " in messages
    assert re.search(r"(\d+@far) completed; imgkit fetch \1\n", messages)
    (stored,) = (site.store / "images").glob("*/image.sif")
    assert stored.read_bytes() == site.sif.read_bytes()
    assert re.fullmatch(r"[0-9a-f]{64}-[0-9a-f]{12}", stored.parent.name)


RATES = (
    '[ "$SLURM_NODEID" = 0 ] || exit 0; cd "$IMGKIT_RUN_DIR"; rate=$((20 + 80 * SLURM_NNODES)); '
    """for n in 1 2 3; do printf '{"step": %s, "samples_per_s": %s}\\n' $n $rate; done > metrics.jsonl"""
)


def test_scaling_reads_the_runs_of_a_remote(site):
    argv = ("scaling", site.sif.name, "--on", "far", "--time", "5m", "--nodes", "1,2", "--json")
    result = expect_success(site.imgkit(*argv, "--", "sh", "-c", RATES))
    report = json.loads(result.stdout)
    assert [size["figures"]["efficiency"] for size in report["sizes"]] == [1, pytest.approx(0.9)]
    assert all(re.fullmatch(r"\d+@far", size["job"]) for size in report["sizes"])
    folder = site.folder / report["folder"]
    assert (folder / "2-nodes/metrics.jsonl").exists()
    assert "to send: nothing" in result.stderr


def test_run_without_a_change_sends_nothing(site):
    before = len(site.far.calls())
    result = expect_success(site.run("--detach -- true"))
    assert re.fullmatch(r"\d+@far\n", result.stdout)
    assert "imgkit: to send: nothing; far has the image" in result.stderr
    assert len(site.far.calls()) - before == 2  # look, submit


NO_ENGINE = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


def test_unchanged_recipe_needs_no_engine(site):
    another_machine = {**NO_ENGINE, "XDG_CACHE_HOME": f"{site.folder}/no"}
    for env in (NO_ENGINE, another_machine):
        result = expect_success(site.from_recipe("--detach -- true", **env))
        assert "imgkit: to send: nothing; far has the image" in result.stderr


def sent_MB(stderr):
    match = re.search(r"imgkit: sent: ([0-9.]+) (bytes|kB|MB) of ", stderr)
    assert match, stderr
    return float(match[1]) * {"bytes": 1e-6, "kB": 1e-3, "MB": 1}[match[2]]


def test_edit_sends_the_changed_blocks(site):
    recipe = next(site.folder.glob("line*.yaml"))
    before = site.sif.read_bytes()
    (site.folder / "note.txt").write_text("the edit\n")
    recipe.write_text(
        RECIPE.replace("system:", "  copy: [{source: note.txt, target: /workspace/}]\nsystem:", 1)
    )
    try:
        result = site.from_recipe("-- cat /workspace/note.txt")
        assert (result.returncode, result.stdout) == (0, "the edit\n"), result.stderr
        assert f"; far has most of {site.sif.name}\n" in result.stderr
        assert sent_MB(result.stderr) < 3
        again = site.from_recipe("--detach -- true", **NO_ENGINE)
        assert "to send: nothing; far has the image" in again.stderr
        # What a build by hand has made last is what the next run sends.
        assert site.imgkit("build", f"./{recipe.name}", "--base", BASE, "--no-cache").returncode == 0
        rebuilt = site.from_recipe("--detach -- true")
        assert "imgkit: to send: image: " in rebuilt.stderr
    finally:
        recipe.write_text(RECIPE)
        site.sif.write_bytes(before)
    # The newest, and the one before it.
    assert len([*(site.store / "images").glob("*/image.sif")]) == 2


@contextmanager
def project(site, name):
    """A recipe in a folder of its own; both go at the end, as does the image."""
    folder = site.folder / f"project {name}"
    folder.mkdir()
    recipe = folder / f"{name}{os.getpid()}.yaml"
    recipe.write_text(RECIPE)
    try:
        yield recipe
    finally:
        run("docker", "rmi", "--force", f"{recipe.stem}:latest")
        shutil.rmtree(folder)


def run_project(site, recipe, *args, **env):
    line = f"run ./{recipe.name} --on far --time 5m --base {BASE}"
    return site.far.imgkit(line, *split_line(*args), folder=recipe.parent, env=env)


def write_step(recipe, command):
    recipe.write_text(RECIPE.replace("system:", f"  run: [{json.dumps(command)}]\nsystem:", 1))


def test_first_run_of_another_project_sends_little(site):
    with project(site, "other") as recipe:
        write_step(recipe, "echo other > /opt/other")
        result = run_project(site, recipe, "--", "cat", "/opt/other")
        assert (result.returncode, result.stdout) == (0, "other\n"), result.stderr
        size = recipe.with_suffix(".sif").stat().st_size
        assert sent_MB(result.stderr) < 0.05 * size / 1e6


def test_third_image_of_a_project_replaces_the_first(site):
    notes = []
    with project(site, "three") as recipe:
        for count in range(3):
            write_step(recipe, f"echo {count} > /opt/count")
            result = run_project(site, recipe, "--", "cat", "/opt/count")
            assert (result.returncode, result.stdout) == (0, f"{count}\n"), result.stderr
            notes.append(re.findall(r"imgkit: removed (three\d+)-[0-9a-f]{4}\.sif, ", result.stderr))
        assert notes == [[], [], [recipe.stem]]


def test_edit_and_commit_of_the_folder_change_no_image(site):
    with project(site, "git") as recipe:
        folder = recipe.parent
        commit = ("git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam")
        inspect = ("docker", "image", "inspect", "--format", "{{.Id}}", f"{recipe.stem}:latest")
        output("git", "-C", folder, "init", "-q")
        (folder / "train.py").write_text("1\n")
        output("git", "-C", folder, "add", ".")
        output(*commit, "first")
        assert run_project(site, recipe, "--detach", "--", "true").returncode == 0
        image_id = output(*inspect)
        (folder / "train.py").write_text("2\n")
        edited = run_project(site, recipe, "--detach", "--", "true", **NO_ENGINE)
        assert "to send: nothing" in edited.stderr
        output(*commit, "second")
        assert site.far.imgkit("build", f"./{recipe.name}", "--base", BASE, folder=folder).returncode == 0
        assert output(*inspect) == image_id


def test_waiting_job_keeps_its_image(site):
    result = expect_success(site.run("--detach --option=--hold -- true"))
    number = result.stdout.partition("@")[0]
    image = site.store / (site.store / "jobs" / number).read_text().splitlines()[2]

    def unused():
        result = site.imgkit("remote gc far --json")
        return [row["path"] for row in json.loads(result.stdout)["unused"]]

    try:
        for path in (image, image.parent, *(site.store / "jobs").iterdir(), *(site.store / "runs").iterdir()):
            os.utime(path, (1e9, 1e9))
        assert f"images/{image.parent.name}" not in unused()
        assert site.imgkit("cancel", number).returncode == 0
        until(lambda: not site.running(number))
        assert f"images/{image.parent.name}" in unused()
    finally:
        image.touch()


def test_array_waits_for_a_job_by_its_id_of_imgkit(site):
    first = expect_success(site.run("--detach --option=--hold -- true")).stdout.strip()
    number = first.removesuffix("@far")
    options = (f"--option=--dependency=afterok:{first}", "--option=--array=0-1")
    result = expect_success(site.run(*options, "--", "sh", "-c", 'echo "task $SLURM_ARRAY_TASK_ID"'))
    array = result.stdout.strip().removesuffix("@far")
    assert "imgkit: an array is not followed: " in result.stderr
    dependency = site.cluster("squeue --noheader", f"--jobs={array}", "--format=%E").stdout
    assert f"afterok:{number}" in dependency
    site.cluster("scontrol release", number)
    followed = site.imgkit("logs", f"{array}_1@far")
    assert (followed.returncode, "task 1\n" in followed.stdout) == (0, True), followed.stderr


def test_new_folder_runs_without_a_flag(site):
    before = set(site.folder.iterdir())
    expect_success(site.imgkit("init --on far --time 5m --nodes 2"))
    try:
        toml = site.folder / "imgkit.toml"
        # The stand-in has no torch; and the image is the one that is there.
        text = re.sub("^recipe.*", f'recipe = "{site.sif.name}"', toml.read_text(), flags=re.MULTILINE)
        command = f"command = {json.dumps(MEASURED)}"
        toml.write_text(re.sub("^command.*", lambda _: command, text, flags=re.MULTILINE))
        result = expect_success(site.imgkit("run"))
        assert sorted(result.stdout.split()) == ["node1", "node2"]
        again = expect_success(site.imgkit("run --nodes 1 --detach"))
        second = again.stdout.strip()
        until(lambda: site.imgkit("status").returncode == 0 and listed(site)[second]["state"] == "succeeded")
        check_list(site, handle(result), second)
    finally:
        for path in set(site.folder.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def listed(site):
    rows = json.loads(site.imgkit("runs --json").stdout)["runs"]
    return {row["id"]: row for row in rows}


def check_list(site, first, second):
    """Two runs are listed with what they ran, and with their numbers once they are fetched."""
    rows = listed(site)
    assert list(rows)[:2] == [second, first]
    assert [rows[first][key] for key in ("state", "loss", "command")] == ["succeeded", None, MEASURED]
    document = json.loads(site.imgkit("show", site.sif, "--json").stdout)
    assert rows[first]["image"] == document["record"]["image_id"]
    for job in (first, second):
        assert site.imgkit("fetch", job).returncode == 0
    assert "2.5" in site.imgkit("runs").stdout


@pytest.fixture
def code(site):
    """A folder of code in git, with names that a shell would take apart."""
    folder = site.folder / "my code"
    (folder / 'it\'s "b"').mkdir(parents=True)
    (folder / "train.py").write_text("print('first')\n")
    (folder / 'it\'s "b"/c d.txt').write_text("c\n")
    (folder / "away").symlink_to("/nowhere/else")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "noise.log").write_text("noise\n")
    (folder / "table").write_bytes(os.urandom(300_000))
    for args in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm1"),
    ):
        output("git", "-C", folder, *args)
    yield folder
    shutil.rmtree(folder)


def test_edited_line_of_code_is_what_the_job_runs(site, code):
    list_all = 'python3 train.py && cat "it\'s \\"b\\""/* && wc -c < table && ls && readlink away'
    write = "cd it* && echo more >> 'c d.txt' && mkdir out && echo 1 > out/result"
    command = ("--", "sh", "-c", f"dist-env > /dev/null && {list_all} && {write}")
    result = expect_success(site.run("--code", code, *command))
    first = result.stdout.splitlines()
    assert first[:3] == ["first", "c", "300000"]
    assert first[-1] == "/nowhere/else"
    assert "noise.log" not in first
    (code / "train.py").write_text("print('secnd')\n")  # as long as before
    result = site.run("--code", code, *command)
    assert result.stdout.splitlines() == ["secnd", *first[1:]]
    assert re.search(r"sent: code: 1 file, \d+ bytes", result.stderr), result.stderr
    record = json.loads(site.imgkit("status", handle(result), "--json").stdout)["code"]
    assert record["git"].endswith("-dirty")
    assert record["uncommitted"]
    number = number_of(result)
    note = (site.store / "jobs" / number).read_text()
    assert f"code/{record['sha256']}" in note.splitlines()
    (run_folder,) = site.store.glob(f"runs/*-{number}")
    assert json.loads((run_folder / "code.json").read_text()) == {"schema": 1, **record}
    changed = 'it\'s "b"/c d.txt'
    assert (run_folder / "workspace" / changed).read_text() == "c\nmore\n"
    assert (run_folder / 'workspace/it\'s "b"/out/result').is_file()
    sent = site.store / "code" / record["sha256"] / "workspace"
    assert (sent / changed).read_text() == "c\n"
    again = site.run("--code", code, "--detach", "--", "true")
    assert "to send: nothing of the code; far has that of " in again.stderr
    (code / "train.py").write_text("print('third')\n")
    before = len(site.far.calls())
    expect_success(site.run("--code", code, "--detach", "--", "true"))
    assert len(site.far.calls()) - before == 4  # look, send, publish, submit


def test_data_is_sent_once_and_read_beside_the_code(site, code):
    toml, numbers = site.folder / "imgkit.toml", site.folder / "my data/numbers"
    numbers.mkdir(parents=True)
    (numbers / "first").write_text("1\n")
    toml.write_text('data = ["my data/numbers"]\n')
    command = (
        "--",
        "sh",
        "-c",
        'cat "my data/numbers/first"; (echo 2 > "my data/numbers/first") 2> /dev/null || echo closed',
    )
    try:
        result = expect_success(site.run("--code", code, *command))
        assert result.stdout.splitlines() == ["1", "closed"]
        assert "sent: data: 1 file, 2 bytes" in result.stderr
        (folder,) = site.store.glob("data/[0-9a-f]*")
        note = (site.store / "jobs" / number_of(result)).read_text()
        assert f"data/{folder.name}" in note.splitlines()
        assert "sent: data" not in expect_success(site.run("--code", code, *command)).stderr
    finally:
        toml.unlink()
        shutil.rmtree(numbers.parent)


@pytest.fixture
def hub(site):
    """A hub with a model and a data set, which only this machine reaches: the jobs have no address of it."""
    with serve_hub() as server:
        server.add("me/tiny", {"config.json": b"{}", "sub/weights.bin": os.urandom(300_000)})
        server.add("datasets/me/letters", {"train.csv": b"text,label\na,1\nb,2\n"})
        yield server
    shutil.rmtree(site.folder / "hf", ignore_errors=True)


def hub_env(site, hub):
    return {"HF_ENDPOINT": hub.address, "HF_HOME": f"{site.folder}/hf", "HF_TOKEN": HUB_TOKEN}


def test_model_of_the_hub_is_sent_once_with_its_links(site, hub, tmp_path):
    commit = next(iter(hub.repos["me/tiny"].commits))
    (tmp_path / "look").write_text(
        'echo "$HF_HOME $HF_HUB_CACHE $HF_HUB_OFFLINE"\n'
        "cat $HF_HUB_CACHE/models--me--tiny/refs/main && echo\n"
        "cat $HF_HUB_CACHE/models--me--tiny/snapshots/*/sub/weights.bin | wc -c\n"
        "tail -n 1 hf/data/me/letters/train.csv\n"
        "cat $HF_HUB_CACHE/datasets--me--letters/snapshots/*/train.csv | wc -l\n"
        'touch $HF_HOME/"$(hostname)" && touch hf/hub/models--me--tiny/x 2> /dev/null || echo closed\n'
    )
    (site.folder / "imgkit.toml").write_text(
        f'data = ["hf://me/tiny@{commit[:7]}", "hf://datasets/me/letters"]\n'
    )
    command = ("--code", tmp_path, "--nodes", "2", "--", "sh", "./look")
    try:
        result = expect_success(site.run(*command, **hub_env(site, hub)))
        rows = ["/workspace/hf /workspace/hf/hub 1", commit, "300000", "b,2", "3", "closed"]
        assert sorted(result.stdout.splitlines()) == sorted(2 * rows)
        (weights,) = site.store.glob("data/*/snapshots/*/sub/weights.bin")
        assert str(weights.readlink()).startswith("../../../blobs/")
        asked = len(hub.requests)
        again = expect_success(site.run(*command, **hub_env(site, hub)))
        assert "sent: data" not in again.stderr
        assert len(hub.requests) == asked
        assert run("grep", "-rlF", HUB_TOKEN, site.store).stdout == ""
    finally:
        for name in ("imgkit.toml", "hf.lock"):
            (site.folder / name).unlink()


LOAD = """
import os
from datasets import load_dataset
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("me/tiny")
rows = load_dataset("hf/data/me/letters")["train"].num_rows
print(os.environ["RANK"], sum(p.numel() for p in model.parameters()), rows)
"""
SAVE = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=16)
GPT2LMHeadModel(config).save_pretrained(sys.argv[1])
"""


@pytest.mark.soak
def test_transformers_and_datasets_load_by_name_without_internet(site, hub):
    with project(site, "hub") as recipe:
        step = "pip:\n    - packages: [transformers==5.23.0, datasets==5.2.0]\nsystem:"
        recipe.write_text(RECIPE.replace("-notorch", "").replace("system:", f"  {step}", 1))
        folder = recipe.parent
        (folder / "load.py").write_text(LOAD)
        (folder / "imgkit.toml").write_text(
            f'recipe = "./{recipe.name}"\nremote = "far"\ncode = "."\nnodes = 2\ntime = "5m"\n'
            'data = ["hf://me/tiny", "hf://datasets/me/letters"]\ncommand = ["dist-run", "load.py"]\n'
        )
        base = ("--base", BASE.removesuffix("-notorch"))
        expect_success(site.far.imgkit("build", f"./{recipe.name}", *base, folder=folder))
        saved = folder / "saved"
        saved.mkdir()
        mount = ("-v", f"{saved}:/saved")
        output("docker", "run", "--rm", *mount, f"{recipe.stem}:latest", "python3", "-c", SAVE, "/saved")
        hub.add("me/tiny", {path.name: path.read_bytes() for path in saved.iterdir()})
        shutil.rmtree(saved)
        result = expect_success(site.far.imgkit("run", *base, folder=folder, env=hub_env(site, hub)))
        rows = [line.split()[-3:] for line in result.stdout.splitlines() if line.endswith(" 2")]
        assert sorted(rows) == [["0", rows[0][1], "2"], ["1", rows[0][1], "2"]], result.stdout


STEP = (
    "step=$(($(cat step 2> /dev/null || echo 0) + 1)); echo $step > step; dist-env > /dev/null; "
    'mkdir -p "$IMGKIT_RUN_DIR/wandb/offline-run-1" && date > "$IMGKIT_RUN_DIR/wandb/offline-run-1/x.wandb"; '
    'echo "step $step: $(python3 train.py)"; [ $step != 1 ] || exec sleep 600'
)


def test_stopped_run_goes_on_with_the_edited_code(site, code):
    first = expect_success(site.run("--code", code, "--detach", "--", "sh", "-c", STEP)).stdout.strip()
    number = first.partition("@")[0]
    until(lambda: [*site.store.glob(f"runs/*-{number}/workspace/step")])
    (run_folder,) = site.store.glob(f"runs/*-{number}")
    running = site.imgkit("resume", first)
    assert (running.returncode, running.stderr.splitlines()[0]) == (
        2,
        f"imgkit: ID: the run goes on: {first} is running",
    )
    assert site.imgkit("cancel", first).returncode == 0
    until(lambda: not site.running(number))
    assert f"{first} was cancelled; imgkit resume {first}; " in site.imgkit("status", first).stdout
    (code / "train.py").write_text("print('secnd')\n")
    resumed = expect_success(site.imgkit("resume", first, "--time", "6m"))
    assert resumed.stdout == "step 2: secnd\n"
    assert [*site.store.glob(f"runs/*-{number_of(resumed)}")] == []
    fetched = expect_success(site.imgkit("fetch", handle(resumed)))
    sync_line = f"wandb sync runs/{run_folder.name}/wandb/offline-run-*"
    assert fetched.stdout.splitlines()[-1] == sync_line
    assert [path.name for path in (site.folder / "runs" / run_folder.name / "workspace").iterdir()] == [
        "step"
    ]
    ended = site.imgkit("resume", first)
    assert "completed: the program has ended well by itself" in ended.stderr
    check_conflict(site, code, first, run_folder)


def check_conflict(site, code, job, run_folder):
    """A file that the run and the user have changed is refused, unless the run's code stays."""
    resume = ("resume", job, "--", "sh", "-c", "echo run >> train.py; exit 3")
    failed = expect_failure(site.imgkit(*resume), 1, "failed with exit code 3; imgkit resume ")
    assert f"imgkit resume {handle(failed)}; " in failed.stderr
    (code / "train.py").write_text("print('third')\n")
    refused = site.imgkit("resume", job)
    where = f"{run_folder}/workspace"
    assert refused.stderr.splitlines()[-2:] == [
        f"imgkit: {where}: the run has changed what today's code has in another version: train.py",
        f"  -> to go on with the run's code: imgkit resume {job} --same-code",
    ]
    same = expect_success(site.imgkit("resume", job, "--same-code", "--", "cat", "train.py"))
    assert same.stdout == "print('secnd')\nrun\n"


MAKE_FILES = """\
import os, pathlib
os.makedirs("o u t")
os.chdir("o u t")
for number in range(20_000):
    pathlib.Path(f"f {number}").touch()
print(open("../train.py").read())
"""


def test_run_with_many_files_is_fetched_and_goes_on(site, code):
    (code / "make files.py").write_text(MAKE_FILES)
    first = handle(expect_success(site.run("--code", code, "--", "python3", "make files.py")))
    fetched = expect_success(site.imgkit("fetch"))
    assert f"imgkit: job {first}, the last one" in fetched.stderr
    folder = Path(fetched.stdout.partition("  ")[0])
    assert sum(1 for _ in (site.folder / folder / "workspace/o u t").iterdir()) == 20_000
    (code / "train.py").write_text("print('secnd')\n")
    command = ("sh", "-c", 'cd "o u t" && ls | wc -l && python3 ../train.py')
    resumed = expect_success(site.imgkit("resume", first, "--", *command))
    assert resumed.stdout.splitlines() == ["20000", "secnd"]


def test_code_lies_over_that_of_the_image(site, code):
    recipe = next(site.folder.glob("line*.yaml"))
    (site.folder / "train.py").write_text("print('of the image')\n")
    copied = (
        "  copy: [{source: train.py, target: /workspace/}, {source: first.out, target: /workspace/}]\nsystem:"
    )
    recipe.write_text(RECIPE.replace("system:", copied, 1))
    command = ("--", "sh", "-c", "dist-env > /dev/null && python3 /workspace/train.py && ls /workspace")
    try:
        result = expect_success(site.from_recipe("--code", code, *command))
        assert result.stdout.splitlines() == ["first", "away", 'it\'s "b"', "table", "train.py"]
        assert result.stderr.count(f"{recipe.name}:4: the image has code in /workspace/; the job runs") == 1
    finally:
        recipe.write_text(RECIPE)


def test_failed_job_fails_the_command(site):
    result = expect_failure(site.run("-- sh -c", "echo told; exit 3"), 1)
    assert result.stdout.startswith("told\n")
    assert re.search(r"(\d+@far) failed with exit code 3; imgkit resume \1; imgkit fetch \1\n", result.stderr)


def test_interrupt_leaves_the_job_and_says_how_to_come_back(site):
    with site.start("-- sh -c", SLOW) as started:
        assert started.stdout.readline() == "line 1\n"
        os.killpg(started.pid, signal.SIGINT)
        _, messages = started.communicate(timeout=60)
    assert started.returncode == 130
    job = re.search(r"job (\d+@far);", messages)
    assert job
    assert f"the job continues; imgkit logs|status|cancel|fetch {job[1]}" in messages
    assert "Traceback" not in messages
    number = job[1].partition("@")[0]
    assert site.running(number)

    status = site.imgkit("status", job[1])
    assert "RUNNING" in status.stdout
    assert f"imgkit: on far: squeue --noheader --jobs={number}" in status.stderr
    listed = site.imgkit("status")
    assert re.search(rf"^{re.escape(job[1])} .* running ", listed.stdout, re.MULTILINE), listed.stdout
    line = shlex.join(map(str, (*IMGKIT, "shell", "--job", job[1])))
    typed = 'echo "in $IMGKIT_RUN_DIR"; exit 7\n'
    entered = run("script", "-qec", line, "/dev/null", env=site.far.env, folder=site.folder, stdin=typed)
    assert f"in {site.store}/runs/" in entered.stdout, entered.stdout
    assert entered.returncode == 7
    assert site.imgkit("cancel", number).returncode == 0  # one remote only: its name can be left out
    until(lambda: not site.running(number))
    logs = expect_failure(site.imgkit("logs", job[1]), 1)
    assert logs.stdout.startswith("line 1\nline 2\n")


def test_waiting_job_says_why(site):
    file = site.folder / "held.err"
    with file.open("wb") as messages:
        started = site.start("--option=--hold -- echo ran", stderr=messages)
    reason = re.compile(r"imgkit: waiting: JobHeldUser; scontrol release (\d+) lets it start\n")
    try:
        until(lambda: reason.search(file.read_text()), describe=file.read_text)
        site.cluster("scontrol release", reason.findall(file.read_text())[0])
        assert started.communicate(timeout=120)[0] == "ran\n"
    finally:
        started.kill()
    assert started.returncode == 0
    assert len(reason.findall(file.read_text())) == 1


def test_nothing_is_left_on_the_login_node(site):
    site.run("-- true")
    until(lambda: not [row for row in site.cluster.ps("args", "login") if row.startswith(("tail", "cat"))])


def test_lost_connection_is_made_again_without_a_lost_line(site):
    counted = 'for i in $(seq 12); do echo "line $i"; sleep 0.5; done'
    output_file = site.folder / "told"
    with (
        output_file.open("wb") as output,
        site.start("-- sh -c", counted, stdout=output) as started,
    ):
        until(lambda: "line 2" in output_file.read_text())
        site.far.kill_master()
        _, messages = started.communicate(timeout=120)
    assert started.returncode == 0, messages
    assert output_file.read_text().splitlines() == [f"line {number}" for number in range(1, 13)]
    assert "the connection was lost, and imgkit connects again" in messages


def test_fetch_brings_what_is_new(site):
    make = (
        'cd "$IMGKIT_RUN_DIR"; mkdir -p checkpoints/step-1 "a b"; echo state > checkpoints/step-1/w;'
        ' echo 1 > "a b/c";'
        " echo 2 > metrics.jsonl; echo s > .imgkit-secret.abc; ln -s /etc/passwd link; echo done"
    )
    result = site.run("-- sh -c", make)
    job = handle(result)
    expect_success(site.imgkit("fetch", job))
    (folder,) = site.folder.glob(f"runs/*-{job.partition('@')[0]}")
    log = f"{folder.name}.out"
    assert list_files(folder) == ["a b/c", log, "metrics.jsonl"]
    assert (folder / log).read_text() == "done\n"
    assert "0 of 3 files were new" in site.imgkit("fetch", job).stdout
    (folder / "metrics.jsonl").write_text("changed here")
    assert "1 of 3 files were new" in site.imgkit("fetch", job).stdout
    assert site.imgkit("fetch", job, "--checkpoints").returncode == 0
    assert list_files(folder) == sorted(["a b/c", log, "metrics.jsonl", "checkpoints/step-1/w"])


FIND = "type -aP python3 python3.10 python3.11 python3.12 python3.13 || true"
HIDE = """\
fake=$1; number=0; shift
for folder; do
    number=$((number + 1)); above=/run/hidden/$number; mkdir -p "$above/upper" "$above/work"
    mount -t overlay -o "lowerdir=$folder,upperdir=$above/upper,workdir=$above/work" overlay "$folder"
    rm -f "$folder"/python*
    if [ -n "$fake" ]; then printf %s "$fake" > "$folder/python3"; chmod 755 "$folder/python3"; fi
    mount -o remount,bind,ro "$folder" # a profile with pyenv would make its links again
done
"""
FAKE_OF_PYTHON_36 = """\
#!/bin/sh
echo "$*" >> /run/called
case $* in *version_info*) echo 0 3.6 ;; *) echo "this fake of Python 3.6 runs no program" >&2; exit 1 ;; esac
"""


@pytest.fixture(
    params=["", pytest.param(FAKE_OF_PYTHON_36, marks=pytest.mark.soak)], ids=["none", "fake of 3.6"]
)
def python(site, request):
    """What the login node has as python3. Real Pythons are hidden on that node alone."""

    def login(*args):
        result = expect_success(site.cluster("exec login --clean-env --", *args))
        return result.stdout

    def programs():
        result = run(
            site.far.folder / "bin/ssh", "far", f"bash -lc {shlex.quote(FIND)}; bash -c {shlex.quote(FIND)}"
        )
        return [Path(row) for row in result.stdout.splitlines()]

    folders = {path.parent.resolve() for path in programs()}
    login("sh", "-ec", HIDE, "sh", request.param, *folders)
    try:
        assert {path.name for path in programs()} == ({"python3"} if request.param else set())
        yield request.param
    finally:
        login("sh", "-c", 'umount -l "$@"; rm -rf /run/hidden /run/called', "sh", *folders)


def test_login_node_without_a_usable_python_runs_jobs(site, python):
    for path in (site.store / "images").iterdir():
        shutil.rmtree(path)
    result = expect_success(
        site.run("-- sh -c", "dist-env > /dev/null; echo 1 > $IMGKIT_RUN_DIR/metrics; echo told")
    )
    assert result.stdout == "told\n"
    assert site.imgkit("logs", handle(result)).stdout == "told\n"
    assert site.imgkit("fetch", handle(result)).returncode == 0
    number = number_of(result)
    assert [path.read_text() for path in site.folder.glob(f"runs/*-{number}/metrics")] == ["1\n"]
    assert site.cluster("exec login -- test -e /run/called").returncode == 1


def list_files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_no_text_holds_the_value_of_a_variable(site):
    result = site.run("--env TOKEN -- sh -c", 'echo "${#TOKEN} letters"', TOKEN=TOKEN)
    assert result.stdout == f"{len(TOKEN)} letters\n"
    number = number_of(result)
    script = site.cluster("scontrol write batch_script", number, "-").stdout
    records = "".join(path.read_text() for path in site.far.folder.glob("state/**/*.json"))
    assert "TOKEN" in script
    assert not any(TOKEN in text for text in (script, records, result.stderr, *site.far.calls()))


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (
            ("--option=--no-such-option", "--", "true"),
            4,
            "sbatch on far failed with exit code 254",
        ),
        (("--on", "fra", "--", "true"), 2, "did you mean far?"),
        (("--env", "NOT_SET", "--", "true"), 2, "NOT_SET is not set here"),
        (("--image", "x.sif", "--", "true"), 2, "'x.sif' is not a path on the remote"),
        (("--image", "/x.sif", "--", "true"), 2, "--image cannot be combined with"),
        (("--",), 2, "no command given"),
    ],
    ids=lambda part: part[0] if isinstance(part, tuple) else "",
)
def test_refused_run_says_why(site, args, code, message):
    result = site.run(*args)
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "args", [("rcp",), ("cpu", "--runtime", "singularity"), ("lambda", "--hosts", "a,b")]
)
def test_system_without_a_queue_is_refused(site, args):
    expect_failure(
        site.imgkit("run", *args, "--on", "far", "--", "dist-hello"),
        2,
        "has no queue that takes a .sif over ssh",
    )


@pytest.mark.parametrize("form", ["archive", *soak("folder")])
def test_archive_becomes_a_sif_here_and_runs_there(site, form):
    name = f"arc-{form}"
    tiny_image.write(site.folder / f"{name}.tar", f"{name}:1")
    if form == "folder":
        with tarfile.open(site.folder / f"{name}.tar") as tar:
            tar.extractall(site.folder / name, filter="data")
    args = (f"{name}.tar" if form == "archive" else name, "--on", "far", "--time", "5m")
    first = expect_success(site.imgkit("run", *args, "--detach", "--", "true"))
    assert f"imgkit: to send: image: {name}.sif, " in first.stderr
    result = site.imgkit("run", *args, "--", "cat", "/etc/name")
    assert (result.returncode, result.stdout.splitlines()[-1:]) == (0, [f"{name}:1"]), result.stderr
    assert "imgkit: to send: nothing; far has the image" in result.stderr
    planned = site.imgkit("run", *args, "--dry-run", "-v", "--", "true")
    assert (planned.returncode, name in planned.stderr) == (0, True), planned.stderr


def test_file_that_is_no_archive_is_refused(site):
    (site.folder / "no.tar").write_bytes(b"x" * 1024)
    expect_failure(site.imgkit("run no.tar --on far --time 5m -- true"), 1, "no.tar")
    assert not (site.folder / "no.sif").exists()


def test_remote_without_the_scheduler_is_refused(site):
    name = f"pbs{os.getpid()}"
    (site.folder / f"{name}.yaml").write_text(RECIPE.replace("scheduler: slurm", "scheduler: pbs"))
    result = site.imgkit("run", f"./{name}.yaml", "--on", "far", "--base", BASE, "--", "true")
    run("docker", "rmi", "--force", f"{name}:latest")
    assert result.returncode == 2, result.stderr
    assert "far has no qsub" in result.stderr
    assert not (site.folder / f"{name}.sif").exists()
