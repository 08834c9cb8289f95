"""A request on a recipe's system: limits, required fields, and flags that the system does not have."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import checks, quoting, systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.systems.pods import PodFlags
from imgkit_builder.recipe.targets import find
from imgkit_entrypoints.errors import UsageError

MN5 = JobRequest.of(command=("dist-bench",), account="a1", qos="acc_debug", time="10m", directory=Path("/w"))


def job(recipe: str | Path = "mn5", *, pvcs: tuple[str, ...] = (), **given: Any) -> Job:
    own = PodFlags(pvcs=pvcs, client="3.0")
    return resolve(find(recipe), MN5.changed(system_flags=(own,) if pvcs else (), **given))


def refused(recipe: str | Path = "mn5", **given: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        job(recipe, **given)
    return caught.value


GOLDEN = Path(__file__).parents[3] / "golden/recipes"
PARTS = """\
image: {base: "python:3.12-slim"}
system:
  extends: snellius
  partitions: {gpu_mig: {gpus: 8}}
"""


def parts(tmp_path: Path) -> Path:
    file = tmp_path / "parts.yaml"
    file.write_text(PARTS)
    return file


@pytest.mark.parametrize(
    ("queue", "gpus", "cpus"),
    [("gpu_a100", 4, 72), ("gpu_h100", 4, 64), ("gpu_mig", 8, None)],
)
def test_partition_decides_on_its_nodes(tmp_path: Path, queue: str, gpus: int, cpus: int | None) -> None:
    found = job(parts(tmp_path), queue=queue).allocation
    assert (found.gpus, found.cpus, found.queue) == (gpus, cpus, queue)


def test_limit_of_a_partition_is_named_with_its_line(tmp_path: Path) -> None:
    assert refused(parts(tmp_path), queue="gpu_mig", gpus=9).where == "parts.yaml:4"
    error = refused(GOLDEN / "snellius.yaml", queue="gpu_h100", gpus=1, cpus=18)
    assert "1 GPUs come with 16 CPUs" in error.what
    assert (error.where or "").startswith("systems/snellius.yaml:")


def test_several_partitions_at_once_are_refused(tmp_path: Path) -> None:
    error = refused(parts(tmp_path), queue="gpu_a100,gpu_mig")  # their nodes may differ
    assert error.what == "'gpu_a100,gpu_mig' cannot be used in a job"


@pytest.mark.parametrize(
    ("given", "what", "key"),
    [
        ({"gpus": 8}, "--gpus 8, but a node has 4", ("system", "node", "gpus")),
        ({"gpus": 2, "cpus": 80}, "2 GPUs come with 40 CPUs", ("system", "node", "cpus_per_gpu")),
        ({"gpus": 0, "cpus": 81}, "a node has 80", ("system", "node", "cpus")),
        ({"account": "", "time": ""}, "needs --account, --time", ("system", "queue", "required")),
    ],
)
def test_limit_is_named_with_its_line(given: dict[str, Any], what: str, key: tuple[str, ...]) -> None:
    error = refused(**given)
    assert what in error.what
    assert error.where == find("mn5").where(*key)
    assert error.where.startswith("systems/mn5.yaml:")


def test_queue_s_limit_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text('extends: mn5\nsystem:\n  queue:\n    limits:\n      acc_debug: "02:00:00"\n')
    assert job(file, time="2h").allocation.time == "02:00:00"
    assert job(file, time="3h", qos="acc_other").allocation.time == "03:00:00"  # an unknown limit is none
    error = refused(file, time="02:00:01")
    assert error.where == "mine.yaml:5"
    assert "acc_debug ends jobs after 02:00:00" in error.what


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], Path]:
    """Write a recipe for a system without one."""

    def recipe(system: str) -> Path:
        file = tmp_path / "own.yaml"
        file.write_text(f"image: {{base: 'python:3.12-slim'}}\nsystem: {system}\n")
        return file

    return recipe


@pytest.mark.parametrize(
    ("qos", "time", "says"),
    [
        ("", "25h", "boost_usr_prod ends jobs after 24:00:00"),
        ("boost_qos_dbg", "31m", "boost_qos_dbg ends jobs after 00:30:00"),
        ("boost_qos_lprod", "48h", ""),
        ("boost_qos_lprod", "97h", "boost_qos_lprod ends jobs after 96:00:00"),
    ],
)
def test_limit_of_a_qos_counts_before_that_of_its_queue(
    own: Callable[[str], Path], qos: str, time: str, says: str
) -> None:
    file = own("leonardo")
    if not says:
        assert job(file, account="a", qos=qos, time=time).allocation.qos == qos
        return
    error = refused(file, account="a", qos=qos, time=time)
    assert says in error.what
    assert "another queue (boost_" in (error.hint or "")


def test_missing_queue_names_the_known_ones(own: Callable[[str], Path]) -> None:
    assert (refused(own("snellius"), queue="").hint or "").endswith("; queues: gpu_a100, gpu_h100")


def test_flag_without_meaning_is_a_warning() -> None:
    given = {"image": "r.example/x:1", "qos": "", "time": "", "nodes": "2", "pvcs": ("home:/w",)}
    warning = "--account is not used: EPFL RCP (runai) has no such flag"
    assert job("rcp", **given).warnings == (warning,)


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("hostname",), "hostname starts once per node; `dist-run hostname ...`"),
        (("python3", "train.py", "--lr", "1"), "python3 starts once per node; `dist-run train.py ...`"),
        (("/usr/bin/python3.12", "my train.py"), "`dist-run 'my train.py' ...`"),
        (("python3",), "`dist-run python3 ...`"),
    ],
)
def test_program_that_starts_once_per_node_is_doubted(command: tuple[str, ...], hint: str) -> None:
    (warning,) = job(command=command).warnings
    assert hint in warning


def test_shell_that_starts_dist_run_is_not_doubted() -> None:
    assert job(command=("sh", "-c", "exec dist-run train.py --out=$IMGKIT_RUN_DIR")).warnings == ()


def test_part_of_a_node_on_several_is_doubted() -> None:
    assert "2 nodes with 1 of 4 GPUs" in job(nodes="2", gpus=1).warnings[0]
    assert job(nodes="1", gpus=1).warnings == ()
    assert job(nodes="2", gpus=0).warnings == ()


def test_job_without_gpus_tells_the_launcher() -> None:
    assert job(gpus=0, nproc=20).settings == {"IMGKIT_DEVICE": "cpu", "IMGKIT_NPROC": "20"}
    assert job(nodes="2+1").settings == {"IMGKIT_NNODES": "2+1"}
    assert job(preflight=True).settings == {"IMGKIT_PREFLIGHT": "1"}
    assert job(nodes="2+1", max_failures=0).settings == {"IMGKIT_NNODES": "2+1", "IMGKIT_MAX_FAILURES": "0"}


@pytest.mark.parametrize(
    ("nodes", "failures", "outlives"),
    [("2", None, False), ("2", 3, False), ("2+1", None, True), ("2+1", 0, False)],
)
def test_only_a_run_with_nodes_to_spare_outlives_one(
    nodes: str, failures: int | None, outlives: bool
) -> None:
    assert job(nodes=nodes, max_failures=failures).outlives_nodes is outlives


@pytest.mark.parametrize(("nodes", "hint"), [("2:4", "--nodes 4, or --nodes 4+1"), ("two", "--nodes 4, or")])
def test_other_number_of_nodes_is_refused_with_what_to_type(nodes: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        job(nodes=nodes)
    assert repr(nodes) in caught.value.what
    assert (caught.value.hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"name": "a b"}, "--name"),
        ({"name": "x\n#SBATCH --qos=y"}, "--name"),
        ({"account": "a\nb"}, "--account"),
        ({"account": "-x"}, "--account"),
        ({"qos": "a;b"}, "--qos"),
        ({"queue": "$(id)"}, "--queue"),
        ({"directory": Path('/a"b')}, "--directory"),
        ({"directory": Path("/a\nb")}, "--directory"),
        ({"directory": Path("/a:b")}, "--directory"),
        ({"time": "10"}, "--time"),
        ({"time": "00:00:00"}, "--time"),
        ({"time": "1:99:00"}, "--time"),
        ({"nodes": "0"}, "--nodes"),
        ({"nodes": "2:4"}, "--nodes"),
        ({"nodes": "two"}, "--nodes"),
        ({"nodes": "0+1"}, "--nodes"),
        ({"nodes": "2+"}, "--nodes"),
        ({"nodes": "1:2+1"}, "--nodes"),
        ({"max_failures": -1}, "--max-failures"),
        ({"gpus": -1}, "--gpus"),
        ({"cpus": 0}, "--cpus"),
        ({"nproc": 0}, "--nproc"),
        ({"env": ("1A=b",)}, "--env"),
        ({"env": ("A B",)}, "--env"),
        ({"env": ("WANDB_API_KEY=0123456789abcdef",)}, "--env"),
        ({"env": ("NOTE=hf_" + "a1" * 17,)}, "--env"),
        ({"env_file": Path("a,b")}, "--env-file"),
        ({"secret_file": Path("$HOME/secret")}, "--secret-file"),
        ({"env": ("A=b\nc",)}, "--env"),
        ({"binds": ("relative",)}, "--bind"),
        ({"binds": ("/a:/b,/c",)}, "--bind"),
        ({"image": "a\nb.sif"}, "--image"),
        ({"command": ("dist-benhc",)}, "COMMAND"),
        ({"command": ("dist-run", "a\nb")}, "COMMAND"),
        ({"command": ()}, "COMMAND"),
        ({"runtime": "docker"}, "--runtime"),
        ({"stop_before_s": -1}, "--stop-before"),
    ],
)
def test_bad_value_is_refused_by_its_flag(given: dict[str, Any], where: str) -> None:
    assert refused(**given).where == where


RUNTIME = "extends: {}\nsystem:\n  runtime:\n"
PODMAN = "    kind: docker\n    command: podman-hpc\n"
ELSEWHERE = {"qos": "", "account": ""}


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_docker_under_slurm_is_refused_where_podman_works(
    tmp_path: Path, flags: tuple[str, ...], call: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RUNTIME.format("mn5") + PODMAN.replace("podman-hpc", "docker"))
    words = ("run", str(file), *flags, "-A", "a1", "--qos", "acc_debug", "--time", "5m", "--nodes", "2")
    code, out, told = call(*words, "--", "dist-hello")
    assert (code, out) == (2, "")
    assert "mine.yaml:5: docker cannot be used on MareNostrum 5 ACC: containers of docker belong" in told
    assert "kind: docker and command: podman (or podman-hpc) in the recipe" in told
    assert job(file, runtime="singularity").container.runtime == "singularity"
    assert refused(runtime="docker").where == "--runtime"


def test_podman_under_slurm_gets_the_variables_of_the_step(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RUNTIME.format("mn5") + PODMAN + "    options: [--gpu, --ipc=private]\n")
    made = job(file, nodes="2")
    text = systems.named("slurm").script(made).text.replace(" \\\n    ", " ")
    start = next(line for line in text.splitlines() if "podman-hpc" in line)
    words = "podman-hpc run --rm --nv --gpu --ipc=private --network=host --cgroups=disabled --pull=never"
    assert words in start
    assert "--env 'SLURM*' --env 'IMGKIT_*' --env CUDA_VISIBLE_DEVICES" in start
    assert "--ipc=host" not in start
    assert "nofile" not in start  # Podman keeps the limits of the node
    assert "--gpu " not in systems.named("slurm").script(job(file, gpus=0)).text


def test_container_that_gets_the_variables_by_name_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for recipe in ("olivia-eap", "lambda", "cpu"):
        file.write_text(RUNTIME.format(recipe) + PODMAN)
        assert job(file, **ELSEWHERE).container.runtime == "docker"


@pytest.mark.parametrize("option", ["--cleanenv", "-e", "--containall", "--cleanenv=true", "-ce"])
def test_container_with_a_clean_environment_is_refused(tmp_path: Path, option: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RUNTIME.format("mn5") + f"    options: [--contain, {option}]\n")
    error = refused(file)
    assert (error.what.startswith(f"with {option}, the container"), error.where) == (True, "mine.yaml:4")
    assert job(file, runtime="host").container.runtime == "host"
    file.write_text(
        RUNTIME.format("cpu") + f"    kind: singularity\n    command: s\n    options: [{option}]\n"
    )
    assert job(file, **ELSEWHERE).settings == {}
    assert refused(file, nproc=2, **ELSEWHERE).where == "mine.yaml:6"  # IMGKIT_NPROC would be lost


def test_settings_of_a_shell_keep_no_variable_out_of_the_container() -> None:
    mn5 = job("mn5")
    lines = (*runtime_of(mn5).exports(mn5), "env")
    cleaning = {"APPTAINER_CLEANENV": "1", "SINGULARITY_CONTAINALL": "1", "APPTAINER_NV": "1"}
    found = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={**os.environ, **cleaning},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {name for name in cleaning if f"\n{name}=" in f"\n{found.stdout}"} == {"APPTAINER_NV"}
    on_host = job("mn5", runtime="host")
    assert "unset" not in "".join(runtime_of(on_host).exports(on_host))


def test_job_tells_its_gpus_where_the_image_states_none(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("image: {base: a:1}\nsystem: {scheduler: slurm, runtime: {options: [--nv]}}\n")
    elsewhere = {"account": "", "qos": ""}
    assert job(file, gpus=2, **elsewhere).settings["IMGKIT_GPUS"] == "2"
    assert "IMGKIT_GPUS" not in job(file, **elsewhere).settings
    assert "IMGKIT_GPUS" not in job("mn5").settings
    assert job("mn5", runtime="host").settings["IMGKIT_GPUS"] == "4"


def test_misspelt_command_is_corrected() -> None:
    assert "dist-bench" in (refused(command=("dist-benhc",)).hint or "")


def test_pods_need_an_image_from_a_registry() -> None:
    assert "imgkit push rcp" in (refused("rcp", account="", qos="", time="").hint or "")


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
def test_time_is_read_as_schedulers_do(text: str, seconds: int) -> None:
    assert quoting.seconds(text, where="--time") == seconds
    assert quoting.seconds(quoting.clock(seconds), where="--time") == seconds


def test_short_job_is_not_asked_to_save() -> None:
    assert job(time="9m").allocation.stop_before_s == 0
    assert job(time="10m").allocation.stop_before_s == 120
    assert job(time="2m", stop_before_s=60).allocation.stop_before_s == 60


def test_stop_at_or_before_the_start_names_both_times() -> None:
    error = refused(time="10m", stop_before_s=600)
    assert error.where == "--stop-before"
    assert ("600 s" in error.what, "00:10:00" in error.what) == (True, True)


def test_value_that_looks_like_a_secret_is_refused_and_not_repeated() -> None:
    for text in ("HF=hf_" + "a1" * 17, "WANDB_API_KEY=0123456789abcdef", "BAD-NAME=hf_" + "a1" * 17):
        error = refused(env=(text,))
        assert error.where == "--env"
        assert text.partition("=")[2] not in str(error)
    assert "--env WANDB_API_KEY alone" in str(refused(env=("WANDB_API_KEY=0123456789abcdef",)).hint)
    assert job(env=("TOKENIZERS_PARALLELISM=false", "HF_TOKEN_PATH=/home/me/token")).container.env


TOKEN = "hf_" + "a1" * 17


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"command": ("dist-run", "train.py", "--token", TOKEN)}, "COMMAND"),
        ({"command": ("dist-run", "train.py", "--password", "hunter2")}, "COMMAND"),
        ({"command": ("env", "WANDB_API_KEY=hunter2", "dist-train")}, "COMMAND"),
        ({"command": ("bash", "-c", "DB_PASS=hunter2 dist-train")}, "COMMAND"),
        ({"env": ("MYPASS=hunter2",)}, "--env"),
        ({"options": (f"--comment={TOKEN}",)}, "--option"),
        ({"options": ("--env", "MYPASS=hunter2"), "recipe": "cpu", **ELSEWHERE}, "--option"),
        ({"name": TOKEN}, "--name"),
        ({"image": "https://ana:hunter2@example.org/x.sif"}, "--image"),
        ({"pvcs": (f"{TOKEN}:/w",), "recipe": "rcp", "image": "r/x:1", **ELSEWHERE}, "--pvc"),
    ],
)
def test_secret_in_any_argument_of_a_job_is_refused(given: dict[str, Any], where: str) -> None:
    error = refused(given.pop("recipe", "mn5"), **given)
    assert error.where == where
    assert TOKEN not in str(error)
    assert "hunter2" not in str(error)
    assert "alone; or --env-file FILE" in str(error.hint)


def test_secret_in_the_recipe_s_options_of_a_job_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RUNTIME.format("cpu") + "    options: [--env, MYPASS=hunter2]\n")
    error = refused(file, **ELSEWHERE)
    assert (error.where, "hunter2" in str(error)) == ("mine.yaml:4", False)


def test_arguments_that_only_name_a_secret_are_kept() -> None:
    words = ("--tokenizer", "gpt2", "--max-tokens", "4096", "--token-file", "t", "SECRET_FILE=/run/x")
    command = ("dist-run", "--require-secret", "train.py", *words, "--api-key", "$WANDB_API_KEY")
    assert job(command=command, nodes="2", require_secret=True).command == command


def test_system_that_would_show_the_value_refuses_a_name() -> None:
    assert "--env-file FILE" in str(refused("olivia-eap", env=("HF_TOKEN",)).hint)
    assert job("mn5", env=("HF_TOKEN", "A=b", "HF_TOKEN")).container.names == ("HF_TOKEN",)


@pytest.mark.parametrize("recipe", ["mn5", "cpu", "lambda"])
def test_submission_without_the_variable_or_with_an_open_file_is_refused(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"directory": tmp_path, "qos": "acc_debug" if recipe == "mn5" else ""}
    with pytest.raises(UsageError, match="HF_TOKEN is not set here"):
        checks.before_submission(job(recipe, env=("HF_TOKEN",), **here))
    monkeypatch.setenv("HF_TOKEN", "a\nb")
    with pytest.raises(UsageError, match="holds a line break"):
        checks.before_submission(job(recipe, env=("HF_TOKEN",), **here))
    (tmp_path / "tokens").write_text("HF_TOKEN=x")
    (tmp_path / "tokens").chmod(0o644)
    with pytest.raises(UsageError, match="other users have access") as caught:
        checks.before_submission(job(recipe, env_file=Path("tokens"), **here))
    assert str(caught.value.hint) == f"chmod 600 {tmp_path}/tokens"


ROCM = 'extends: mn5\nimage: {base: "rocm/pytorch:rocm6.4"}\n'
MI250X = "extends: mn5\nsystem: {node: {gpu_model: AMD Instinct MI250X}}\n"


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        (ROCM, "rocm/pytorch:rocm6.4 is an image for AMD GPUs (ROCm)", "mine.yaml:2"),
        (MI250X, "AMD Instinct MI250X is a GPU of AMD", "mine.yaml:2"),
    ],
)
def test_job_on_amd_needs_the_choice_of_cpus(tmp_path: Path, text: str, what: str, line: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    error = refused(file)
    assert error.what == f"{what}: imgkit supports only work on CPUs with it"
    assert error.where == line
    assert "imgkit run --gpus 0" in str(error.hint)
    assert refused(file, gpus=1).what == error.what
    assert refused(file, command=("python", "train.py")).what == error.what
    assert job(file, gpus=0).settings["IMGKIT_DEVICE"] == "cpu"
    for words in (("--device", "cpu"), ("--device=cpu",)):
        assert job(file, command=("dist-train", *words)).command[-1] == words[-1]


def test_image_of_the_base_s_variables_is_refused(tmp_path: Path) -> None:
    target = dataclasses.replace(find("mn5"), base="mine:1", base_env=("PATH", "ROCM_PATH"))
    with pytest.raises(UsageError, match="mine:1, which sets ROCM_PATH, is an image for AMD GPUs"):
        resolve(target, MN5)
    sif = dataclasses.replace(target, system=find("cpu").system, file=tmp_path / "x.sif")
    with pytest.raises(UsageError, match="which sets ROCM_PATH"):
        resolve(sif, JobRequest.of(command=("dist-hello",), image=str(sif.file)))


def test_other_image_replaces_the_recipe_s(tmp_path: Path) -> None:
    given = {"account": "", "qos": "", "time": ""}
    assert "rocm/x:1 is an image for AMD" in refused("rcp", image="rocm/x:1", **given).what
    assert job("rcp", image="rocm/x:1", gpus=0, **given).allocation.gpus == 0
    file = tmp_path / "mine.yaml"
    file.write_text('extends: rcp\nimage: {base: "rocm/pytorch:rocm6.4"}\n')
    assert job(file, image="r.example/cuda:1", **given).container.image == "r.example/cuda:1"
    assert "rocm-6.4.sif is an image for AMD" in refused(image="site/rocm-6.4.sif").what
    assert job(image="rocm/site.sif").container.image == "/w/rocm/site.sif"


def test_recipe_without_gpus_still_needs_the_choice(tmp_path: Path) -> None:
    """The image's node agent refuses to start, and would do so in the job."""
    file = tmp_path / "mine.yaml"
    file.write_text(ROCM + "system: {node: {gpus: 0}}\n")
    assert "rocm/pytorch:rocm6.4 is an image for AMD GPUs" in refused(file).what
    assert job(file, gpus=0).settings["IMGKIT_DEVICE"] == "cpu"
