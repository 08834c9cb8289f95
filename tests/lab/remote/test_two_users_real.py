"""Two accounts of one cluster run one image at the same time; neither sees what is the other's."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import (
    TOKEN,
    Cluster,
    afterwards,
    expect_failure,
    expect_success,
    ordinary_user,
    output,
    public_folder,
    run,
    slurm_marks,
    split_line,
)
from remotekit import FarHost, far_host, far_marks, login_node

BASE = "imgkit.local/standin:24.03-notorch"
RECIPE = f"""\
image:
  base: {BASE}
  platform: amd64
system:
  scheduler: slurm
  runtime: {{kind: singularity, command: singularity}}
  node: {{gpus: 0, cpus: 1}}
"""
WORK = 'dist-env > /dev/null; id -un; echo "$SECRET" > "$IMGKIT_RUN_DIR/of $(id -un)"; sleep 2'

pytestmark = [*slurm_marks, *far_marks, pytest.mark.soak, pytest.mark.xdist_group("far-users")]


@dataclass(frozen=True, kw_only=True)
class Person:
    """A home here, and an account of the cluster."""

    far: FarHost
    account: str
    folder: Path
    cluster: Cluster

    def imgkit(self, *args, **env):
        return self.far.imgkit(*args, folder=self.folder, env=env)

    def run(self, *args, **env):
        """Run the recipe of this person's folder."""
        return self.imgkit(f"run --on far --base {BASE} --time 5m", *split_line(*args), **env)

    def run_in_account(self, *args):
        """Run a command in this person's account."""
        return self.cluster("exec login -- runuser -u", self.account, "--", *args)


@pytest.fixture(scope="module")
def people(standin_notorch):
    folder = public_folder("people")
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o1777)
    cluster = Cluster(state=folder / "c")
    name = f"people{os.getpid()}"
    with ExitStack() as stack:
        stack.enter_context(afterwards('rm -rf "$1"', folder))
        stack.callback(run, "docker", "rmi", "--force", f"{name}:latest")
        accounts = [stack.enter_context(ordinary_user()) for _ in range(2)]
        for account in accounts:
            output("usermod", "--password", "*", account)  # a locked account cannot log in
        stack.callback(cluster.down)
        cluster.up(2)
        persons = []
        for number, account in enumerate(accounts):
            far = stack.enter_context(far_host(folder / str(number)))
            login_node(far, cluster, account)
            person = Person(far=far, account=account, folder=far.folder / "here", cluster=cluster)
            person.folder.mkdir()
            (person.folder / f"{name}.yaml").write_text(RECIPE)
            add(person, folder / "shared" / account)
            persons.append(person)
        yield persons[0], persons[1]


def add(person, folder):
    (recipe,) = person.folder.glob("*.yaml")
    expect_success(
        person.imgkit("remote add far", f"far:{folder}", "--replace", "--recipe", f"./{recipe.name}")
    )


def store(person):
    (row,) = json.loads(person.imgkit("remote list --json").stdout)["remotes"]
    return Path(row["folder"])


def at_once(people, *args):
    with ThreadPoolExecutor() as pool:
        secrets = (f"{TOKEN}-of-{person.account}" for person in people)
        return list(pool.map(lambda person, secret: person.run(*args, SECRET=secret), people, secrets))


def test_both_run_one_image_at_once(people):
    (recipe,) = people[0].folder.glob("*.yaml")
    # Without a cached build, two builds at once can give two images.
    expect_success(people[0].imgkit(f"build ./{recipe.name} --base {BASE}"))
    results = at_once(people, "--env SECRET -- sh -c", WORK)
    for person, stranger, result in zip(people, reversed(people), results, strict=True):
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"{person.account}\n"
        job = json.loads(person.imgkit("runs --json").stdout)["runs"][0]["id"]
        assert person.imgkit("fetch", job).returncode == 0
        (result_file,) = person.folder.glob("runs/*/of *")
        assert result_file.name == f"of {person.account}"
        assert result_file.read_text() == f"{TOKEN}-of-{person.account}\n"
        owners = {path.owner() for path in (store(person), *store(person).rglob("*"))}
        assert owners == {person.account}
        hidden = stranger.run_in_account("find", store(person), "-mindepth", "1")
        assert hidden.returncode != 0
        assert hidden.stdout == ""
        script = stranger.run_in_account("scontrol", "write", "batch_script", job.partition("@")[0], "-")
        assert script.stdout == ""
        assert "Invalid user id" in script.stderr
    names = [
        sorted(path.parent.name for path in (store(person) / "images").rglob("*.sif")) for person in people
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 1
    seen = people[0].cluster("squeue --states=all --format=%all").stdout
    assert TOKEN not in seen


def test_wide_umask_opens_no_folder(people):
    person = people[0]
    first, folder = store(person), store(person).parent / "open"
    output("install", "-d", "-m", "0755", "-o", person.account, folder)
    try:
        add(person, folder)
        assert person.run("-- true").returncode == 0
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.is_dir()} == {0o700}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    finally:
        add(person, first)


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_folder_of_another_user_is_refused(people, mode):
    person, stranger = people
    first, folder = store(person), store(person).parent / f"taken-{mode:o}"
    output("install", "-d", "-m", f"{mode:o}", "-o", stranger.account, folder)
    try:
        add(person, folder)
        expect_failure(
            person.run("-- true"),
            2,
            f"{folder} belongs to {stranger.account}",
            f"imgkit remote add far far:{folder}/YOU --replace",
        )
        assert [*folder.iterdir()] == []
        assert person.imgkit("doctor --on far").returncode == 1
    finally:
        add(person, first)
