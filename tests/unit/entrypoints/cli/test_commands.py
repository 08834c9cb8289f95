"""The commands as processes, without torch; what they refuse is in ``refusals``."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from imgkit_entrypoints.cli import options
from imgkit_entrypoints.cli.commands import COMMANDS, shim_text

DRY = ("--dry-run", "--json")


def command(*args: str, env: dict[str, str] | None = None, cwd: Path | None = None):
    return subprocess.run(
        [sys.executable, "-I", "-m", "imgkit_entrypoints", *args],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **(env or {})},
        cwd=cwd,
        check=False,
    )


def plan_of(*line: str, **env: str) -> dict[str, Any]:
    """The plan that a dry run of the command prints as JSON."""
    result = command(line[0], *DRY, *line[1:], env=env)
    assert result.returncode == 0, result.stderr
    plan: dict[str, Any] = json.loads(result.stdout)
    return plan


def python_with(folder: Path, *line: str, **options: Any):
    """Run a command with a folder in front of Python's path."""
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    code += "from imgkit_entrypoints.cli.main import main; main()"
    argv = [sys.executable, "-c", code, str(folder), *line]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **options)


def test_options_come_in_any_order():
    first = plan_of("dist-train", "--steps", "7", "--nproc", "2", "--lr", "0.1", "--device", "cpu")
    assert first == plan_of("dist-train", "--device", "cpu", "--nproc", "2", "--steps", "7", "--lr", "0.1")
    assert first["argv"][-4:] == ["--steps", "7", "--lr", "0.1"]


def test_switches_have_variables_too():
    env = {"IMGKIT_DRY_RUN": "1", "IMGKIT_NPROC": "3"}
    assert json.loads(command("dist-hello", "--json", env=env).stdout)["nproc"] == 3
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert (
        plan_of("dist-hello", **ranks, OMPI_COMM_WORLD_LOCAL_SIZE="1", IMGKIT_DIRECT="1")["mode"] == "direct"
    )


@pytest.mark.parametrize(
    ("args", "value", "is_on"),
    [((), "", False), ((), "0", False), ((), "1", True), (("--preflight",), "", True)],
)
def test_preflight_takes_no_word_after_it(args, value, is_on):
    parser = options.launch_parser(COMMANDS[0], {"IMGKIT_PREFLIGHT": value})
    parsed, rest = parser.parse_known_args([*args, "full", "train.py"])
    assert options.read_options(parsed, COMMANDS[0], ()).preflight is is_on
    assert rest == ["full", "train.py"]


def test_dry_run_names_the_source_of_each_value():
    env = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NODEID": "1"}
    args = ("--dry-run", "--nproc", "2", "--port", "29500")
    result = command("dist-hello", *args, env={**env, "SLURM_JOB_ID": "7"})
    assert result.returncode == 0, result.stderr
    rows = [line.split(None, 2) for line in result.stdout.splitlines()]
    assert ["nnodes", "2", "SLURM_STEP_NUM_NODES"] in rows
    assert ["node_rank", "1", "SLURM_NODEID"] in rows
    assert ["hosts", "n1,n2", "SLURM_STEP_NODELIST"] in rows
    assert ["nproc", "2", "--nproc"] in rows
    assert "torchrun" in result.stdout.splitlines()[-1]


def test_dry_run_names_every_variable_of_the_json():
    plan = plan_of("dist-hello")
    first = {line.partition(" ")[0] for line in command("dist-hello", "--dry-run").stdout.splitlines()}
    assert {*plan["env"], *plan["unset"]} <= first


def test_dry_run_of_the_doctor_starts_no_check():
    assert command("dist-doctor", "--dry-run").stdout.splitlines()[-1].endswith("apps.doctor")


@pytest.mark.parametrize(
    ("flags", "value", "nproc"),
    [((), "3", "3"), (("--nproc", "2"), "3", "2"), (("--nproc", "2"), "many", "2")],
)
def test_variables_stand_in_for_flags(flags, value, nproc):
    plan = plan_of("dist-hello", *flags, IMGKIT_NPROC=value)
    assert plan["argv"][plan["argv"].index("--nproc-per-node") + 1] == nproc


def test_dist_run_leaves_the_scripts_arguments_alone():
    plan = plan_of("dist-run", "--nproc", "2", "train.py", "--nproc", "x y", "--dry-run")
    assert plan["argv"][-4:] == ["train.py", "--nproc", "x y", "--dry-run"]
    assert plan_of("dist-run", "-m", "pkg.train", "--lr", "1")["argv"][-4:] == [
        "-m",
        "pkg.train",
        "--lr",
        "1",
    ]


def test_pi_needs_no_gpu(tmp_path):
    (tmp_path / "opt/imgkit").mkdir(parents=True)
    (tmp_path / "opt/imgkit/system.json").write_text('{"schema": 1, "node": {"gpus": 4}}')
    plan = plan_of("dist-pi", IMGKIT_ROOT=str(tmp_path))
    assert (plan["env"]["IMGKIT_DEVICE"], plan["nproc"]) == ("cpu", 1)


def test_dry_run_imports_no_torch(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    result = python_with(tmp_path, "dist-train", *DRY)
    assert result.returncode == 0, result.stderr


def test_stop_file_keeps_single_ranks_from_starting_but_not_the_plan(tmp_path):
    for folder in ("torch", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run/stop").touch()
    rank = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    env = {f"OMPI_COMM_WORLD_{name}": "1" if "SIZE" in name else "0" for name in rank}
    env |= {"PATH": "/usr/bin:/bin", "IMGKIT_DIRECT": "1", "IMGKIT_RUN_DIR": str(tmp_path / "run")}
    refused = python_with(tmp_path, "dist-run", "x.py", env=env)
    assert refused.returncode == 2
    assert f"rm {tmp_path}/run/stop" in refused.stderr
    planned = python_with(tmp_path, "dist-run", *DRY, "x.py", env=env)
    assert json.loads(planned.stdout)["mode"] == "direct"


@pytest.mark.parametrize("words", [("dist-hello",), ("dist-run", "--dry-run", "x.py")])
def test_deleted_working_directory_is_named_before_any_start(tmp_path, words):
    line = 'rmdir "$PWD"; exec "$@"'
    python = (sys.executable, "-I", "-m", "imgkit_entrypoints")
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        ["sh", "-c", line, "sh", *python, *words], cwd=tmp_path / "gone", capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{words[0]}: {tmp_path}/gone: the working directory was deleted, or cannot be reached: "
        "No such file or directory\n"
        "  -> cd to a folder that exists; if it is there again under the same name: cd .\n"
    )


@pytest.mark.parametrize("words", ["dist-env", "dist-env --json", "dist-run --help"])
@pytest.mark.parametrize("output", ["> /dev/full", ">&-"])
def test_result_that_cannot_be_printed_ends_with_one(words, output):
    line = f"{sys.executable} -I -m imgkit_entrypoints {words} {output}"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"imgkit: standard output is closed or full \(.+\): output is lost\n", done.stderr)


def test_hidden_torch_is_told(tmp_path):
    (tmp_path / "torch").mkdir()
    warnings = plan_of("dist-run", "x.py", PYTHONPATH=str(tmp_path))["warnings"]
    assert any("another torch" in text for text in warnings)


def test_shell_lines_can_be_evaluated():
    result = command("dist-env", "--shell", env={"IMGKIT_NCCL_VERSION": "2.20.5"})
    assert result.returncode == 0
    assert all(line.startswith("export ") for line in result.stdout.splitlines())


def test_name_with_a_command_is_not_executed_by_a_shell(slingshot, tmp_path):
    """The image brings the variable, and nccl.conf gives it another value: so it is exported."""
    name, marker = f"A;touch {tmp_path}/executed;B", tmp_path / "executed"
    manifest = {"platform": "linux/amd64", "base": {"env": {name: "1"}}}
    (tmp_path / "opt/imgkit/manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text(f"{name}=2\nNCCL_DEBUG=INFO\n")
    done = command("dist-env", "--shell", env={**slingshot, name: "1"})
    subprocess.run(["sh", "-c", done.stdout], check=True)
    assert not marker.exists()
    assert f"imgkit: warning: {name!r} is not a variable name, so it is not in these lines\n" in done.stderr


def test_row_that_names_a_command_is_refused(tmp_path):
    row = {"id": "site", "message": "x", "when": ["arch != none"], "effect": "set", "env": {"A;B": "1"}}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    done = command("dist-env", "--shell", env={"IMGKIT_KNOWN_ISSUES": str(tmp_path / "rows.json")})
    assert (done.returncode, done.stdout) == (2, "")
    assert "rows[0].env: 'A;B' is not a variable name" in done.stderr


@pytest.fixture
def slingshot(tmp_path: Path) -> dict[str, str]:
    """Environment of a container that names a plug-in for other fabrics, on a node with a Slingshot NIC."""
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    (tmp_path / "opt/imgkit").mkdir(parents=True)
    manifest = {"platform": "linux/amd64", "base": {"env": {"NCCL_NET_PLUGIN": "spcx", "A_SECRET": "x"}}}
    (tmp_path / "opt/imgkit/manifest.json").write_text(json.dumps(manifest))
    return {"NCCL_NET_PLUGIN": "spcx", "IMGKIT_ROOT": str(tmp_path), "IMGKIT_NCCL_VERSION": "2.29.2"}


def test_shell_lines_unset_what_the_image_must_not_bring(slingshot):
    result = command("dist-env", "--shell", "--nnodes", "2", "--node-rank", "0", "--head", "h", env=slingshot)
    assert "unset NCCL_NET_PLUGIN\n" in result.stdout
    assert "export NCCL_NET='AWS Libfabric'\n" in result.stdout


def test_dist_env_names_the_image_and_not_its_variables(slingshot):
    text = command("dist-env", env=slingshot).stdout
    assert "note NCCL_NET_PLUGIN=spcx: from the image, not used: " in text
    report = json.loads(command("dist-env", "--json", env=slingshot).stdout)
    (decision,) = (item for item in report["fabric"]["decisions"] if item["variable"] == "NCCL_NET_PLUGIN")
    assert decision["origin"] == "image"
    assert "image_env" not in report["host"]
    assert "A_SECRET" not in json.dumps(report)


def test_dry_run_names_a_plugin_without_file(slingshot):
    plan = plan_of("dist-run", "x.py", **{**slingshot, "NCCL_NET_PLUGIN": "own"})
    (text,) = (text for text in plan["warnings"] if "NCCL_NET_PLUGIN" in text)
    assert text.startswith("NCCL_NET_PLUGIN='own' (set by the user) cannot be opened, there is no own or ")
    assert "NCCL_NET_PLUGIN" not in plan["unset"]


def test_help_shows_both_groups_of_options():
    text = command("dist-train", "--help").stdout
    assert "--nproc" in text
    assert "--steps" in text


def test_files_in_the_current_folder_do_not_matter(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    assert command("dist-env", "--json", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}).returncode == 0


def test_every_command_has_a_shim_of_its_name():
    for spec in COMMANDS:
        assert shim_text(spec).endswith(f'exec python3 -I -m imgkit_entrypoints {spec.name} "$@"\n')


def test_torchrun_s_spellings_are_understood():
    old = ("--nproc_per_node=2", "--node_rank=1", "--master_addr=node1", "--master_port=7000")
    plan = plan_of("dist-hello", "--nnodes=2", *old)
    placement = plan["placement"]
    # torchrun has the port that is given, the roll call the next.
    assert (placement["node_rank"], placement["head"], placement["port"]) == (1, "node1", 7001)
    assert plan["nproc"] == 2


def test_dist_env_takes_the_launch_s_options():
    flags = ("--nnodes", "2", "--node-rank", "1", "--head", "node1")
    report = json.loads(command("dist-env", "--json", *flags).stdout)
    assert (report["schema"], report["host"]["cpus"] >= 1) == (1, True)
    assert (report["placement"]["nnodes"], report["placement"]["head"]) == (2, "node1")
    assert plan_of("dist-env", *flags)["placement"]["node_rank"] == 1


def test_absent_file_of_a_variable_is_in_the_plan():
    warnings = plan_of("dist-run", "x.py", NCCL_TOPO_FILE="/gone.xml")["warnings"]
    (text,) = [text for text in warnings if "NCCL_TOPO_FILE" in text]
    assert "there is no such file" in text
    assert "--bind /gone.xml" in text


TWO_NODES = ("--nnodes=2", "--node-rank=0", "--head=127.0.0.1", "--device=cpu", "--rollcall-timeout=1")


@pytest.fixture
def started(tmp_path: Path):
    """Starts node 1 of 2, for which the other node never calls."""
    (tmp_path / "stub/torch").mkdir(parents=True)
    (tmp_path / "stub/torch/__init__.py").touch()

    def start(*args: str, env: dict[str, str] | None = None, stdin: str = "", usual_port: bool = False):
        with socket.create_server(("", 0)) as listener:  # tests beside this one take the usual port
            port = listener.getsockname()[1]
        port_args = [] if usual_port else ["--port", str(port - 1)]
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **(env or {})}
        line = ("dist-hello", *TWO_NODES, *port_args, *args)
        return python_with(tmp_path / "stub", *line, input=stdin, env=env)

    return start


def test_start_without_a_secret_says_once_that_it_is_open(started):
    result = started()
    assert result.stderr.count("no secret is set: any program") == 1
    assert "--secret-file FILE\n" in result.stderr
    assert "did not join" in result.stderr
    assert "no secret is set" not in started("--nnodes", "1", *DRY).stderr


def test_start_by_hand_without_a_secret_names_a_random_port(started):
    stderr = started(usual_port=True).stderr
    assert re.search(
        r"--secret-file FILE, or at least the same random port to all nodes: --port \d+\n", stderr
    )


def test_start_that_requires_a_secret_is_refused_without(started):
    for args, env in ((("--require-secret",), {}), ((), {"IMGKIT_REQUIRE_SECRET": "1"})):
        result = started(*args, env=env)
        assert result.returncode == 5
        assert "--require-secret: no secret is set" in result.stderr
        assert "roll call" not in result.stderr


def test_start_with_a_secret_is_not_open_and_shows_no_value(started, tmp_path):
    marker = "0f" * 32
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(marker)
    for args, env, stdin in (
        (("--secret-file", str(file)), {}, ""),
        ((), {"IMGKIT_SECRET_FILE": str(file)}, ""),
        (("--secret-file", "-"), {}, f"{marker}\n"),
    ):
        result = started("--require-secret", *args, env=env, stdin=stdin)
        assert "did not join" in result.stderr
        assert "no secret is set" not in result.stderr
        assert marker not in result.stderr + result.stdout
    plan = started("--secret-file", str(file), *DRY).stdout
    assert json.loads(plan)["secret"] == str(file)
    assert marker not in plan


def test_home_on_a_network_disk_gets_a_secret(started, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("1 2 0:1 / / rw - nfs4 filer:/home rw\n")
    result = started(env={"IMGKIT_ROOT": str(tmp_path)})
    assert "did not join" in result.stderr
    assert "no secret is set" not in result.stderr
    assert (tmp_path / ".config/imgkit/secret").stat().st_size == 32


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("dist-train --on-nan cry", "'cry'"),
        ("dist-bench --dtype int8", "'int8'"),
        ("dist-bench --iters 16 sixteen", "'sixteen'"),
    ],
)
def test_value_that_is_no_choice_is_refused(line, value):
    """No case of ``refusals``: versions of argparse list the choices in different forms."""
    result = command(*line.split())
    assert result.returncode == 2
    assert f": invalid choice: {value} (choose from " in result.stderr


def test_workers_start_without_what_the_launcher_of_their_node_has_set():
    variables = {"PMIX_RANK": "0", "LD_PRELOAD": "/absent/libxalt_init.so"}
    plan = plan_of("dist-run", "train.py", **variables)
    assert set(variables) <= set(plan["unset"])
    assert plan["notes"][0].startswith("workers start without PMIX_* (1), LD_PRELOAD")
    kept = {**variables, "IMGKIT_KEEP_ENV": "LD_PRELOAD"}
    assert not set(variables) & set(plan_of("dist-run", "--keep-env", "PMIX_*", "train.py", **kept)["unset"])


def test_compiled_code_lies_in_a_private_folder_of_the_node(tmp_path):
    plan = plan_of("dist-run", "train.py", TMPDIR=str(tmp_path), CUDA_CACHE_PATH="/mine")
    assert plan["env"]["TRITON_CACHE_DIR"].startswith(f"{tmp_path}/imgkit-cache-")
    assert "CUDA_CACHE_PATH" not in plan["env"]
    assert list(tmp_path.iterdir()) == [], "a dry run makes nothing"


def test_program_that_logs_to_an_unreachable_service_is_offline(tmp_path):
    # Nothing listens on port 1 of this machine.
    env = {"WANDB_API_KEY": "x", "WANDB_BASE_URL": "http://127.0.0.1:1", "IMGKIT_RUN_DIR": str(tmp_path)}
    plan = plan_of("dist-run", "train.py", **env)
    assert (plan["env"]["WANDB_MODE"], plan["env"]["WANDB_DIR"]) == ("offline", str(tmp_path))
    text = "this node cannot reach http://127.0.0.1:1: WANDB_MODE=offline; later: wandb sync"
    assert text in plan["notes"]
    assert "WANDB_MODE" not in plan_of("dist-hello", **env)["env"], "it logs nothing"
