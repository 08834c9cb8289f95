"""A request on a recipe's system: its values, memory, limits and warnings; refusals are in cli/refusals."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest
from job_builder import make_job, make_script, write_recipe

from imgkit_builder.jobs import checks, quoting
from imgkit_builder.jobs.memory import Memory, parse_size, size_text
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.systems.pods import PodFlags
from imgkit_builder.recipe.targets import load_target
from imgkit_entrypoints.errors import UsageError

GOLDEN = Path(__file__).parents[3] / "golden/recipes"
OWN = """\
image: {base: "python:3.12-slim"}
system:
  scheduler: slurm
  node: {gpus: 4, cpus: 96, cpus_per_gpu: 24, gres: "gpu:h100"}
  partitions:
    big: {gpus: 8, cpus: 128, options: [--constraint=big]}
    cpu: {gpus: 0, options: [--constraint=cpu]}
    a100: {gres: "gpu:a100"}
  queue: {name: gpu, options: [--exclusive, --network=x]}
"""


def directives(recipe: Path, queue: str) -> list[str]:
    """Options of the job's script that Slurm gets by the recipe, without those of every job."""
    script = make_script(recipe, queue=queue, nodes="2").text
    names = re.compile("#SBATCH (--(?:gres|cpus-per-task|exclusive|network|constraint).*)")
    return names.findall(script)


def test_partition_has_its_own_gpus_and_options(tmp_path):
    recipe = write_recipe(tmp_path, OWN)
    site = ["--exclusive", "--network=x"]
    assert directives(recipe, "gpu") == ["--gres=gpu:h100:4", "--cpus-per-task=96", *site]
    assert directives(recipe, "a100") == ["--gres=gpu:a100:4", "--cpus-per-task=96", *site]
    # 8 GPUs would bring 192 CPUs.
    big = ["--gres=gpu:h100:8", "--cpus-per-task=128", *site, "--constraint=big"]
    assert directives(recipe, "big") == big
    # The system's options are for its nodes with GPUs.
    assert directives(recipe, "cpu") == ["--cpus-per-task=96", "--constraint=cpu"]


def test_processes_get_no_more_cpus_than_a_node_has():
    assert make_job(gpus=0, nproc=20).allocation.cpus == 20
    assert make_job(gpus=0, nproc=200).allocation.cpus == 80


def test_network_option_of_the_user_reaches_srun():
    options = ("--network=x", "--exclusive")
    script = make_script(interactive=True, options=options).text
    allocation, _, start = script.partition("exec srun ")
    assert "--network=x --exclusive" in allocation
    assert "--network=x" in start
    assert "--exclusive" not in start


def test_queue_that_is_not_listed_is_doubted(tmp_path):
    recipe = write_recipe(tmp_path, OWN)
    (warning,) = make_job(recipe, queue="viz").warnings
    lists = "lists only a100, big, cpu, gpu; the job is written for the nodes of system.node"
    assert warning == f"--queue viz: mine {lists}"
    assert make_job(recipe, queue="cpu").warnings == make_job(recipe, queue="").warnings == ()
    assert make_job("mn5", queue="acc").warnings == ()  # the system lists no queue


def test_limit_of_a_shipped_system_is_named_with_its_line():
    with pytest.raises(UsageError, match="1 GPUs come with 16 CPUs") as caught:
        make_job(GOLDEN / "snellius.yaml", queue="gpu_h100", gpus=1, cpus=18)
    assert str(caught.value.where).startswith("systems/snellius.yaml:")


def test_limit_of_a_qos_counts_before_that_of_its_queue(tmp_path):
    recipe = write_recipe(tmp_path, "image: {base: 'python:3.12-slim'}\nsystem: leonardo\n")
    assert make_job(recipe, qos="boost_qos_lprod", time="48h").allocation.qos == "boost_qos_lprod"
    recipe = write_recipe(tmp_path, "extends: mn5\nsystem: {queue: {limits: {acc_debug: '02:00:00'}}}\n")
    assert make_job(recipe, time="2h").allocation.time == "02:00:00"
    assert (
        make_job(recipe, time="3h", qos="acc_other").allocation.time == "03:00:00"
    )  # an unknown limit is none


def test_flag_without_meaning_is_a_warning():
    pods = PodFlags(pvcs=("home:/w",), format="runai-v2")
    rcp = make_job("rcp", pods, image="r.example/x:1", nodes="2", account="a1")
    assert rcp.warnings == ("--account is not used: EPFL RCP (runai) has no such flag",)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("hostname",), "hostname starts once per node; `dist-run hostname ...`"),
        (("python3", "train.py", "--lr", "1"), "python3 starts once per node; `dist-run train.py ...`"),
        (("/usr/bin/python3.12", "my train.py"), "`dist-run 'my train.py' ...`"),
        (("python3",), "`dist-run python3 ...`"),
    ],
)
def test_program_that_starts_once_per_node_is_doubted(command, hint):
    (warning,) = make_job(command=command).warnings
    assert hint in warning


def test_shell_that_starts_dist_run_is_not_doubted():
    assert make_job(command=("sh", "-c", "exec dist-run train.py --out=$IMGKIT_RUN_DIR")).warnings == ()


def test_part_of_a_node_on_several_is_doubted():
    assert "2 nodes with 1 of 4 GPUs" in make_job(nodes="2", gpus=1).warnings[0]
    assert make_job(nodes="1", gpus=1).warnings == ()
    assert make_job(nodes="2", gpus=0).warnings == ()


def test_job_without_gpus_tells_the_launcher():
    assert make_job(gpus=0, nproc=20).settings == {"IMGKIT_DEVICE": "cpu", "IMGKIT_NPROC": "20"}
    assert make_job(nodes="2+1").settings == {"IMGKIT_NNODES": "2+1"}
    assert make_job(preflight=True).settings == {"IMGKIT_PREFLIGHT": "1"}
    assert make_job(nodes="2+1", max_failures=0).settings == {
        "IMGKIT_NNODES": "2+1",
        "IMGKIT_MAX_FAILURES": "0",
    }


@pytest.mark.parametrize(
    ("nodes", "failures", "outlives"),
    [("2", None, False), ("2", 3, False), ("2+1", None, True), ("2+1", 0, False)],
)
def test_only_a_run_with_nodes_to_spare_outlives_one(nodes, failures, outlives):
    assert make_job(nodes=nodes, max_failures=failures).outlives_nodes is outlives


RUNTIME = "extends: {}\nsystem:\n  runtime:\n"
PODMAN = "    kind: docker\n    command: podman-hpc\n"


def test_podman_under_slurm_gets_the_variables_of_the_step(tmp_path):
    recipe = write_recipe(tmp_path, RUNTIME.format("mn5") + PODMAN + "    options: [--gpu, --ipc=private]\n")
    text = make_script(recipe, nodes="2").text.replace(" \\\n    ", " ")
    start = next(line for line in text.splitlines() if "podman-hpc" in line)
    options = "--rm --nv --gpu --ipc=private --network=host --cgroups=disabled --pull=never"
    assert f"podman-hpc run {options}" in start
    assert "--env 'SLURM*' --env 'IMGKIT_*' --env CUDA_VISIBLE_DEVICES" in start
    assert "--ipc=host" not in start
    assert "nofile" not in start  # Podman keeps the limits of the node
    assert "--gpu " not in make_script(recipe, gpus=0).text


@pytest.mark.parametrize("base", ["olivia-eap", "lambda", "cpu"])
def test_container_that_gets_the_variables_by_name_is_kept(tmp_path, base):
    recipe = write_recipe(tmp_path, RUNTIME.format(base) + PODMAN)
    assert make_job(recipe).container.runtime == "docker"


def test_other_runtime_replaces_a_refused_one(tmp_path):
    recipe = write_recipe(tmp_path, RUNTIME.format("mn5") + PODMAN.replace("podman-hpc", "docker"))
    assert make_job(recipe, runtime="singularity").container.runtime == "singularity"
    recipe = write_recipe(tmp_path, RUNTIME.format("mn5") + "    options: [--cleanenv]\n")
    assert make_job(recipe, runtime="host").container.runtime == "host"


def test_clean_environment_is_kept_where_no_setting_is_lost(tmp_path):
    runtime = "    kind: singularity\n    command: s\n    options: [--cleanenv]\n"
    assert make_job(write_recipe(tmp_path, RUNTIME.format("cpu") + runtime)).settings == {}


def test_settings_of_a_shell_keep_no_variable_out_of_the_container():
    mn5 = make_job("mn5")
    lines = (*runtime_of(mn5).exports(mn5), "env")
    cleaning = {"APPTAINER_CLEANENV": "1", "SINGULARITY_CONTAINALL": "1", "APPTAINER_NV": "1"}
    result = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={**os.environ, **cleaning},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {name for name in cleaning if f"\n{name}=" in f"\n{result.stdout}"} == {"APPTAINER_NV"}
    on_host = make_job("mn5", runtime="host")
    assert "unset" not in "".join(runtime_of(on_host).exports(on_host))


def test_job_tells_its_gpus_where_the_image_states_none(tmp_path):
    text = "image: {base: a:1}\nsystem: {scheduler: slurm, runtime: {options: [--nv]}}\n"
    recipe = write_recipe(tmp_path, text)
    assert make_job(recipe, gpus=2).settings["IMGKIT_GPUS"] == "2"
    assert "IMGKIT_GPUS" not in make_job(recipe).settings
    assert "IMGKIT_GPUS" not in make_job("mn5").settings
    assert make_job("mn5", runtime="host").settings["IMGKIT_GPUS"] == "4"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:10:00", 600),
        ("10:00", 600),
        ("1-02:00:00", 93600),
        ("90m", 5400),
        ("2h", 7200),
        ("100:00:00", 360000),
    ],
)
def test_time_is_read_as_schedulers_do(text, seconds):
    assert quoting.parse_time_limit(text, where="--time") == seconds
    assert quoting.parse_time_limit(quoting.format_time_limit(seconds), where="--time") == seconds


def test_short_job_is_not_asked_to_save():
    assert make_job(time="9m").allocation.stop_before_s == 0
    assert make_job(time="10m").allocation.stop_before_s == 120
    assert make_job(time="2m", stop_before_s=60).allocation.stop_before_s == 60


def test_arguments_that_only_name_a_secret_are_kept():
    options = ("--tokenizer", "gpt2", "--max-tokens", "4096", "--token-file", "t", "SECRET_FILE=/run/x")
    command = ("dist-run", "--require-secret", "train.py", *options, "--api-key", "$WANDB_API_KEY")
    assert make_job(command=command, nodes="2", require_secret=True).command == command
    assert make_job(env=("TOKENIZERS_PARALLELISM=false", "HF_TOKEN_PATH=/home/me/token")).container.env
    assert make_job("mn5", env=("HF_TOKEN", "A=b", "HF_TOKEN")).container.names == ("HF_TOKEN",)


@pytest.mark.parametrize("recipe", ["mn5", "cpu", "lambda"])
def test_submission_without_the_variable_or_with_an_open_file_is_refused(recipe, tmp_path, monkeypatch):
    with_token = make_job(recipe, env=("HF_TOKEN",), directory=tmp_path)
    with pytest.raises(UsageError, match="HF_TOKEN is not set here"):
        checks.before_submission(with_token)
    monkeypatch.setenv("HF_TOKEN", "a\nb")
    with pytest.raises(UsageError, match="holds a line break"):
        checks.before_submission(with_token)
    (tmp_path / "tokens").write_text("HF_TOKEN=x")
    (tmp_path / "tokens").chmod(0o644)
    with pytest.raises(UsageError, match="other users have access") as caught:
        checks.before_submission(make_job(recipe, env_file=Path("tokens"), directory=tmp_path))
    assert str(caught.value.hint) == f"chmod 600 {tmp_path}/tokens"


ROCM = 'image: {base: "rocm/pytorch:rocm6.4"}\n'


@pytest.mark.parametrize("base", ["mn5", "rcp"])
def test_job_on_amd_runs_on_cpus_by_choice(tmp_path, base):
    recipe = write_recipe(tmp_path, f"extends: {base}\n{ROCM}")
    options = {} if base == "mn5" else {"image": "rocm/x:1"}
    assert make_job(recipe, gpus=0, **options).settings["IMGKIT_DEVICE"] == "cpu"
    for device in (("--device", "cpu"), ("--device=cpu",)):
        command = ("dist-train", *device)
        assert make_job(recipe, command=command, **options).command == command


def test_image_of_the_base_s_variables_is_refused(tmp_path):
    target = dataclasses.replace(load_target("mn5"), base="mine:1", base_env=("PATH", "ROCM_PATH"))
    with pytest.raises(UsageError, match="mine:1, which sets ROCM_PATH, is an image for AMD GPUs"):
        make_job(target)
    sif = dataclasses.replace(target, system=load_target("cpu").system, file=tmp_path / "x.sif")
    with pytest.raises(UsageError, match="which sets ROCM_PATH"):
        make_job(sif, image=str(sif.file))


def test_other_image_replaces_the_recipe_s(tmp_path):
    recipe = write_recipe(tmp_path, f"extends: rcp\n{ROCM}")
    assert make_job(recipe, image="r.example/cuda:1").container.image == "r.example/cuda:1"
    assert make_job(image="rocm/site.sif").container.image == "/w/rocm/site.sif"


MEMORY_SITE = """\
image: {base: "python:3.12-slim"}
system:
  scheduler: %s
  runtime: %s
  node: {gpus: 4, memory_GB: 512, default_memory_GB: 32, memory_per_gpu_GB: 120}
"""
PARTITIONS = """\
  partitions:
    shared: {memory_per_gpu_GB: 60}
    whole: {default_memory_GB: 500}
    cpu: {gpus: 0}
    fixed: {default_memory_GB: 0}
"""
SINGULARITY = "{options: [--nv]}"
DOCKER = "{kind: docker, command: docker, options: [--gpus=all]}"


@pytest.mark.parametrize(
    ("text", "size_MiB", "normalized"),
    [
        ("110G", 112_640, "110G"),
        ("440GB", 450_560, "440G"),
        ("64gb", 65_536, "64G"),
        ("1TiB", 1_048_576, "1024G"),
        ("512M", 512, "512M"),
        ("1536m", 1536, "1536M"),
    ],
)
def test_size_counts_in_powers_of_1024(text, size_MiB, normalized):
    assert parse_size(text, where="--mem") == size_MiB
    assert size_text(size_MiB) == normalized


@pytest.mark.parametrize(
    "text", ["", "110", "0G", "-1G", "1.5T", "110 G", "G", "110GG", "1e3G", "110K", "1G\n"]
)
def test_other_text_is_no_size(text):
    with pytest.raises(UsageError, match="is not a size of memory") as caught:
        parse_size(text, where="--mem")
    assert (caught.value.where, caught.value.hint) == ("--mem", "write 110G, 440GB or 512M")


@pytest.mark.parametrize(
    ("options", "directive"),
    [
        ({}, "--mem-per-gpu=120G"),
        ({"gpus": 0}, "--mem=32G"),
        ({"mem": "100GB"}, "--mem=100G"),
        ({"mem_per_gpu": "1024M"}, "--mem-per-gpu=1G"),
        ({"queue": "shared"}, "--mem-per-gpu=60G"),
        ({"queue": "whole"}, "--mem=500G"),
        ({"queue": "cpu"}, "--mem=32G"),
        ({"queue": "fixed"}, ""),
        ({"options": ("--mem-per-cpu=8G",)}, "--mem-per-cpu=8G"),
    ],
)
def test_partition_and_request_decide_on_memory(tmp_path, options, directive):
    recipe = write_recipe(tmp_path, MEMORY_SITE % ("slurm", SINGULARITY) + PARTITIONS)
    lines = make_script(recipe, **options).text.splitlines()
    assert [line for line in lines if "--mem" in line and line.startswith("#SBATCH")] == (
        [f"#SBATCH {directive}"] if directive else []
    )
    is_of_imgkit = bool(directive) and "options" not in options
    assert (f"export IMGKIT_MEM='{directive.replace('=', ' ')}'" in lines) == is_of_imgkit


def test_chunk_of_pbs_has_the_memory_of_its_gpus(tmp_path):
    recipe = write_recipe(tmp_path, MEMORY_SITE % ("pbs", SINGULARITY))
    assert "select=1:ngpus=2:mem=240gb:mpiprocs=1" in make_script(recipe, gpus=2).text


@pytest.mark.parametrize(("runtime", "is_limited"), [(DOCKER, True), (SINGULARITY, False)])
@pytest.mark.parametrize("scheduler", ["standalone", "mpi"])
def test_only_docker_limits_memory_without_a_scheduler(tmp_path, scheduler, runtime, is_limited):
    recipe = write_recipe(tmp_path, MEMORY_SITE % (scheduler, runtime))
    own = make_job(recipe, mem="64G")
    assert own.allocation.memory == (Memory(size_MiB=64 << 10) if is_limited else None)
    assert ("--memory=64g" in make_script(recipe, mem="64G").text) == is_limited
    warning = f"--mem is not used: mine ({scheduler}) has no such flag"
    assert (warning in own.warnings) == (not is_limited)
