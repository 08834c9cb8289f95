"""Builds, tests, pushes and interrupted runs on a real engine; gated by the marker ``docker``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from pathlib import Path

import labkit
import pytest
from labkit import IMGKIT, docker, expect_failure, expect_success, imgkit, imgkit_json, run, until

from imgkit_builder import engine as engines
from imgkit_builder.base.progress import Silent
from imgkit_builder.engine import image_source
from imgkit_builder.engine.building import _label_instruction
from imgkit_builder.workflow import build as workflow
from imgkit_builder.workflow import build_record
from imgkit_builder.workflow.build_request import BuildRequest
from imgkit_entrypoints.errors import UsageError

pytestmark = pytest.mark.docker

PREFIX = f"imgkit-test-build-{os.getpid()}"


def running(marker):
    """Containers, stopped ones too, whose command holds `marker`: others may use the same engine."""
    lines = docker("ps --all --no-trunc --format", "{{.ID}} {{.Command}}").splitlines()
    return [line.split()[0] for line in lines if marker in line]


@pytest.fixture
def write(home):
    """``write("name", "RUN text")``: a recipe file; images of its name are removed at the end."""
    names: list[str] = []

    def make(name, *commands, base="registry.invalid/base:1", extra=""):
        steps = "".join(f"    - {json.dumps(step)}\n" for step in commands)
        text = f"description: test\nimage:\n  base: {base}\n{extra}" + (
            f"  run:\n{steps}" if commands else ""
        )
        file = home / f"{PREFIX}-{name}.yaml"
        file.write_text(text)
        names.append(file.stem)
        return file

    yield make
    for name in names:
        run("docker", "rmi", "--force", f"{name}:latest")


@pytest.fixture
def private_base(standin_notorch):
    """A base for one test: Docker's cache takes the newest image of a step, also that of another test."""
    name = f"{PREFIX}-base:1"
    text = f"FROM {standin_notorch}\nLABEL only={PREFIX}\n"
    docker("build --quiet --tag", name, "-", stdin=text)
    yield name
    docker("rmi --force", name)


INSTALLED = """
import hashlib, json, pathlib, zlib, imgkit_entrypoints
files = sorted(path for path in pathlib.Path(imgkit_entrypoints.__path__[0]).rglob("*") if path.is_file())
digests = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
packed = sum(len(zlib.compress(path.read_bytes(), 6)) for path in files)
print(json.dumps({"digests": digests, "packed": packed}))
"""


def installed(image):
    """The entry points in `image`: digests of all files, byte code too, and their size in a registry."""
    output = docker("run --rm --entrypoint python3", image, "-IBc", INSTALLED)
    return dict(json.loads(output.splitlines()[-1]))


def build(file, base, *options):
    return imgkit_json("build", file, "--base", base, *options)


def test_edit_during_a_build_belongs_to_the_image(write, standin_notorch, home, monkeypatch):
    note = home / "note.txt"
    note.write_text("before\n")
    file = write("edited", extra="  copy: [{source: note.txt, target: /opt/}]\n")
    request = BuildRequest(base=standin_notorch, no_test=True)
    before = workflow.plan(file, request).input_sha256
    probe = engines.probe

    def probe_during_edit(*args):
        note.write_text("after\n")
        return probe(*args)

    monkeypatch.setattr(engines, "probe", probe_during_edit)
    built = workflow.build(file, request)
    assert build_record.built_image_id(before) == ""
    assert build_record.built_image_id(workflow.plan(file, request).input_sha256) == built.id


def test_build_is_tested_labelled_and_repeatable(write, private_base, home):
    file = write("small", "echo hello > /hello")
    first = build(file, private_base)
    assert first["standin"] is True
    assert {check["verdict"] for check in first["checks"]} <= {"ok", "skip"}
    assert {check["name"] for check in first["checks"]} >= {"arch", "python", "pip", "manifest", "dist-env"}
    labels = first["labels"]
    assert labels["org.opencontainers.image.title"] == file.stem
    assert labels["org.opencontainers.image.base.name"] == private_base
    # A base that saw no registry is known by its id.
    assert labels["org.opencontainers.image.base.digest"] == first["base"]["id"]
    assert labels["imgkit.recipe"] == file.stem
    assert {"imgkit.recipe.sha256", "imgkit.version", "imgkit.context.sha256", "imgkit.standin"} <= set(
        labels
    )
    assert {f"org.opencontainers.image.{name}" for name in ("version", "created", "revision")} <= set(labels)
    log = Path(first["log"])
    assert "Successfully built" in log.read_text()
    assert (log.parent / "Dockerfile").read_text().count("LABEL") >= 1

    time.sleep(1.1)  # the label `created` counts seconds
    again = build(file, private_base)
    assert (again["id"], again["up_to_date"]) == (first["id"], True)
    before = installed(first["id"])
    fresh = build(file, private_base, "--no-cache", "--no-test")
    assert (fresh["id"] != first["id"], fresh["up_to_date"]) == (True, False)
    # What an edit of the entry points sends to a registry and to a remote: the files that changed.
    assert installed(fresh["id"]) == before
    assert before["packed"] < 1.5e6
    assert sum(name.endswith(".pyc") for name in before["digests"]) > 100

    facts = "\n".join(engines.image_facts(f"{file.stem}:latest").lines())
    assert facts.startswith("STAND-IN")
    baked = docker("run --rm --entrypoint cat", f"{file.stem}:latest", "/opt/imgkit/manifest.json")
    assert json.loads(baked)["base"]["probe"]["python"]
    assert json.loads(baked)["base"]["digest"] == ""


def test_torch_of_the_base_is_checked(write, standin):
    built = build(write("torch"), standin)
    (torch,) = (check for check in built["checks"] if check["name"] == "torch")
    assert torch["verdict"] == "ok"
    assert torch["found"][0].isdigit()


def test_new_pip_conflict_keeps_old_tag(write, standin_notorch):
    good = build(write("conflict"), standin_notorch)
    metadata = "Metadata-Version: 2.1\\nName: broken\\nVersion: 1\\nRequires-Dist: absent-package\\n"
    step = (
        "d=$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')/broken-1.dist-info; "
        f"mkdir -p $d && printf '{metadata}' > $d/METADATA"
    )
    expect_failure(
        imgkit("build", write("conflict", step), "--base", standin_notorch),
        1,
        "new conflicts: broken 1 requires absent-package",
    )
    assert docker("inspect --format {{.Id}}", f"{PREFIX}-conflict:latest") == good["id"]


def test_failing_step_names_line_and_log(write, standin_notorch):
    marker = f"mark-{uuid.uuid4()}"
    file = write("fails", "echo fine", f"echo why-it-failed >&2; exit 7 # {marker}")
    expect_failure(
        imgkit("build", file, "--base", standin_notorch),
        4,
        f"{file.name}:6: step ",
        "\n     why-it-failed\n",
        "returned a non-zero code: 7",
    )
    assert not running(marker)
    assert run("docker", "inspect", f"{file.stem}:latest").returncode == 1


@pytest.mark.parametrize("builder", ["classic", pytest.param("buildx", marks=pytest.mark.buildx)])
def test_log_of_a_build_shows_what_check_shows(write, home, standin_notorch, builder):
    url, stars = "https://ana:hunter2pw@pip.invalid/simple", "https://*************@pip.invalid/simple"
    env = f"  env: {{MY_INDEX: '{url}'}}\n"
    file = write(f"leaks-{builder}", f"echo index {url} $MY_INDEX; DB_PASS=hunter2pw exit 3", extra=env)
    result = expect_failure(
        imgkit("build", file, "--base", standin_notorch, "--builder", builder, "--no-cache", "-v"), 4
    )
    assert [line.strip() for line in result.stderr.splitlines()].count(f"index {stars} {stars}") >= 1
    texts = [path.read_text() for path in (home / "state").rglob("*") if path.is_file()]
    assert any(f"index {stars}" in text for text in texts)
    for text in (imgkit("check", file).stderr, result.stdout + result.stderr, *texts):
        assert "hunter2pw" not in text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_build_leaves_no_container(write, standin_notorch, number):
    marker = f"mark-{uuid.uuid4()}"
    file = write(f"ends-{number.value}", f"sleep 300 # {marker}")
    process = subprocess.Popen(
        [*IMGKIT, "build", str(file), "--base", standin_notorch],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell that starts a program in the background may have it ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until(lambda: running(marker), describe=lambda: "the step never began")
        process.send_signal(number)
        process.wait(timeout=120)
        assert process.returncode in (130, -number)
        until(lambda: not running(marker), describe=lambda: "the build's container is still there")
    finally:
        process.kill()
    assert run("docker", "inspect", f"{file.stem}:latest").returncode == 1


@pytest.mark.parametrize("purpose", ["export", "run"])
def test_killed_helper_container_is_removed(home, standin_notorch, purpose):
    marker = f"mark-{uuid.uuid4()}"
    program = f"""
import os, signal, threading
from imgkit_builder.engine import connect
from imgkit_builder.engine.containers import temporary_container, run
HERE = "linux/amd64"
def die():
    print("now", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
with connect() as engine:
    if {purpose!r} == "export":
        argv = ["true", {marker!r}]
        with temporary_container(engine, {standin_notorch!r}, argv, purpose="export", platform=HERE):
            die()
    threading.Timer(2, die).start()
    run(engine, {standin_notorch!r}, ["sh", "-c", "sleep 300 # {marker}"], platform=HERE)
"""
    process = run(sys.executable, "-c", program)
    assert (process.returncode, process.stdout) == (-signal.SIGKILL, "now\n"), process.stderr
    until(lambda: not running(marker), describe=lambda: "the container is still there")


def test_standin_must_be_named(write, standin_notorch):
    expect_failure(imgkit("build", write("standin", base=standin_notorch)), 2, f"--base {standin_notorch}")


def test_other_architecture_is_refused_early(write, standin_notorch, home):
    file = write("arch", "true", extra="  platform: linux/arm64\n")
    expect_failure(
        imgkit("build", file, "--base", standin_notorch), 2, "is linux/amd64, the build is for linux/arm64"
    )
    assert not (home / "state" / "imgkit" / "builds").exists()


def test_unreachable_registry_is_said(write):
    file = write("far")
    expect_failure(imgkit("build", file), 4, f"{file.name}:3: pull registry.invalid/base:1")


@pytest.mark.qemu
def test_arm64_is_built_and_tested_by_emulator(write, standin_arm64_notorch):
    file = write("arm", extra="  platform: linux/arm64\n")
    built = build(file, standin_arm64_notorch)
    assert built["platform"] == "linux/arm64"
    assert ("arch", "aarch64") in {(check["name"], check["found"]) for check in built["checks"]}


def test_odd_label_values_survive(write, standin_notorch):
    value = 'a "b" $HOME \\n ${x} é = end\\'
    text = f"FROM {standin_notorch}\n" + _label_instruction({"k": value})
    image_id = docker("build --quiet --tag", f"{PREFIX}-label", "-", stdin=text, env={"DOCKER_BUILDKIT": "0"})
    try:
        labels = json.loads(docker("inspect --format", "{{json .Config.Labels}}", image_id))
    finally:
        docker("rmi", f"{PREFIX}-label")
    assert labels["k"] == value


def test_stream_of_a_real_save_is_whole(home, standin_notorch):
    with engines.connect() as engine, engines.save_stream(engine, standin_notorch) as chunks:
        path = home / "x.tar"
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
    with tarfile.open(path) as tar:
        member = tar.extractfile("manifest.json")
        (only,) = json.load(member)
    assert only["RepoTags"] == [standin_notorch]


@pytest.fixture
def registry(home):
    """``127.0.0.1:PORT`` of a registry of our own."""
    with labkit.registry(home) as address:
        yield address


def test_push_and_pull_give_the_same_digest(registry, home):
    (home / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    local, ref = f"{PREFIX}-tiny:latest", f"{registry}/group/tiny:1"
    docker("build --quiet --tag", local, str(home))
    try:
        digest = imgkit_json("push", local, ref)["digest"]
        docker("rmi", ref)
        with engines.connect() as engine:
            pulled = image_source.pull_image(engine, f"{registry}/group/tiny@{digest}", None, Silent())
            assert pulled.digest.endswith(digest)
            with pytest.raises(UsageError, match="no such image"):
                image_source.pull_image(engine, f"{registry}/group/tiny:absent", None, Silent())
            with pytest.raises(UsageError, match="has none for linux/arm64"):
                image_source.pull_image(engine, ref, "linux/arm64", Silent())
    finally:
        for name in (local, ref, f"{registry}/group/tiny@{digest}"):
            run("docker", "rmi", "--force", name)


def test_fake_amd_image_starts_on_cpus_alone(write, standin_notorch):
    """A fake: the stand-in with ROCm's variable and folder. No AMD software exists here."""
    base = f"{PREFIX}-fake-amd:1"
    dockerfile = f"FROM {standin_notorch}\nENV ROCM_PATH=/opt/rocm\nRUN mkdir -p /opt/rocm\n"
    docker("build --quiet --tag", base, "-", stdin=dockerfile)
    try:
        file = write("amd", base=base)
        built = imgkit("build", file, "--base", base, "--no-test")
        assert f"warning: {base}, which sets ROCM_PATH, is an image for AMD GPUs" in built.stderr
        start = ("docker", "run", "--rm", "--entrypoint", "dist-hello", f"{file.stem}:latest")
        expect_failure(
            run(*start),
            5,
            "/opt/rocm: the image is made for AMD GPUs",
            "to run on CPUs: --device cpu",
        )
        expect_success(run(*start, "--device", "cpu", "--dry-run"))
    finally:
        run("docker", "rmi", "--force", f"{PREFIX}-amd:latest", base)
