"""The PBS script: what is asked of PBS, and that the user's words reach each node as they are."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_program
from job_builder import make_job, make_script, write_recipe
from job_records import queued_job

from imgkit_builder.jobs import checks, conversion
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import SubmitRequest
from imgkit_builder.jobs.systems.pbs import SYSTEM as pbs
from imgkit_builder.jobs.systems.pbs import PbsFlags
from imgkit_builder.recipe.targets import load_target
from imgkit_entrypoints.errors import UsageError

RECIPE = load_target("olivia-eap")
REQUEST = {"command": ("dist-run",), "time": "10m", "directory": Path("/my work"), "nodes": "2"}
STARTS = ("pals", "pbsdsh", "ssh")


def job(recipe: Any = RECIPE, *, pbs_start: Any = "pals", **options: Any) -> Job:
    return make_job(recipe, PbsFlags(pbs_start=pbs_start), **{**REQUEST, **options})


def text(recipe: Any = RECIPE, *, pbs_start: Any = "pals", **options: Any) -> str:
    return make_script(recipe, PbsFlags(pbs_start=pbs_start), **{**REQUEST, **options}).text


def extended_recipe(tmp_path: Path, *lines: str) -> Any:
    """A recipe that extends olivia-eap by lines below ``system``."""
    rows = ("extends: olivia-eap", "system:", *(f"  {line}" for line in lines), "")
    return load_target(write_recipe(tmp_path, "\n".join(rows)))


def submit_request(tmp_path: Path, line: str) -> SubmitRequest:
    """A request for a job on olivia-eap with a line below ``system``."""
    file = extended_recipe(tmp_path, line).file
    return SubmitRequest(system=str(file), time="10m", directory=Path("/my work"))


def run(
    script: str, folder: Path, nodefile: str = "x9\nx10\n", before: str = ""
) -> subprocess.CompletedProcess[str]:
    """`script` by bash where apptainer prints its words and the list of hosts, and the starts run theirs.

    `before` is what pbsdsh and ssh do first.
    """
    programs = {
        "apptainer": 'printf \'%s\\0\' "$@" "$IMGKIT_NODES"',
        "mpiexec": 'printf \'%s\\0\' "$@" "$IMGKIT_NODES"',
        # As OpenPBS does: 0 in any case, and the task's output passes it by.
        "pbsdsh": before + 'shift 4; env -u IMGKIT_NODES "$@" >&3; echo "pbsdsh: task 0x0 exit status $?"',
        "ssh": before + 'shift 3; exec env -u IMGKIT_NODES "$@"',
    }
    for name, body in programs.items():
        write_program(folder / name, body, "bash")
    (folder / "nodefile").write_text(nodefile)
    path = f"{folder}:{os.environ['PATH']}"
    # A login shell sets PATH anew.
    (folder / ".profile").write_text(f"PATH='{path}'\n")
    env = {"PATH": path, "HOME": str(folder), "PBS_NODEFILE": str(folder / "nodefile"), "PBS_JOBID": "7.s"}
    argv = ["bash", "-c", f"exec 3>&1\n{script}"]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


NASTY = ("it's", '"; rm -rf /', "$(x)", "`y`", "*", "", "a\\", "\f", "é\u2028", "} ; {")


@pytest.mark.parametrize("start", STARTS)
def test_arguments_and_lists_reach_every_host(tmp_path, start):
    script = text(command=("dist-run", *NASTY), pbs_start=start, directory=tmp_path)
    result = run(script, tmp_path, nodefile="x9\nx9\nx10\n" if start == "pbsdsh" else "x9\nx10\n")
    hosts = 1 if start == "pals" else 2
    assert (result.stderr, result.returncode) == ("", 0)
    assert result.stdout.count("\0".join(("dist-run", *NASTY, "x9,x10", ""))) == hosts


@pytest.mark.parametrize("start", ["pbsdsh", "ssh"])
def test_worst_exit_code_is_the_job_s(tmp_path, start):
    script = text(pbs_start=start, directory=tmp_path)
    script = script.replace("exec apptainer", "exec sh -c 'exit $(( PBS_NODENUM * 3 ))'")
    script = script.replace("/bin/bash -lc", 'env PBS_NODENUM="$rank" /bin/bash -lc')
    assert run(script, tmp_path).returncode == 3


def test_task_that_was_not_started_is_told(tmp_path):
    script = text(pbs_start="pbsdsh", directory=tmp_path)
    result = run(script, tmp_path, before="echo spawn failed; exit; ")
    assert result.returncode == 1
    assert "did not report how the command on x10 ended: spawn failed" in result.stderr


@pytest.mark.parametrize("start", ["pbsdsh", "ssh"])
@pytest.mark.parametrize("deaf", [False, True], ids=["asked to end", "killed"])
def test_host_that_is_lost_does_not_keep_the_job(tmp_path, start, deaf):
    script = text(pbs_start=start, directory=tmp_path, command=("sleep", "600"))
    assert "SECONDS + 30))" in script
    script = script.replace("SECONDS + 30))", "SECONDS + 1))").replace("SECONDS + 5))", "SECONDS + 1))")
    # A fake start that never returns from the second host, as pbsdsh and ssh do when it loses its power.
    ignores = "trap '' TERM; " if deaf else ""
    lost = f'if [[ $rank == 1 ]]; then exec -a lost bash -c "{ignores}while true; do sleep 0.1; done"; fi; '
    script = script.replace("exec apptainer", "exit 3; exec apptainer")
    command = "pbsdsh -v -n" if start == "pbsdsh" else "ssh -o BatchMode"
    script = script.replace(f"    {command}", f"    export rank; {command}")
    result = run(script, tmp_path, before=lost)
    assert result.returncode == 3, "the code of the host that failed"
    assert result.stderr == f"imgkit: {start} does not return from x10: ended\n"


def test_script_asks_for_the_network_option_that_mpiexec_has(tmp_path):
    script = text(directory=tmp_path)
    assert "--disable" not in run(script, tmp_path).stdout
    (tmp_path / "own").mkdir()
    script = script.replace("mpiexec --help", "echo --disable_rdzv_get")
    argv = run(script, tmp_path / "own").stdout.split("\0")
    assert argv[:7] == ["-n", "2", "--ppn", "1", "--cpu-bind", "none", "--disable_rdzv_get"]


def test_hosts_on_one_node_are_refused(tmp_path):
    result = run(text(directory=tmp_path), tmp_path, nodefile="x9\nx9\n")
    assert result.returncode == 2
    assert result.stderr == "imgkit: 2 chunks, and PBS put them on x9: -l place=scatter is missing\n"


def test_own_libraries_are_bound_and_searched_first(tmp_path):
    recipe = extended_recipe(tmp_path, "runtime: {host_libs: [/opt/nccl/lib, /opt/ofi/lib]}")
    script = text(recipe).replace(" \\\n   ", "")
    assert "--bind /opt/nccl/lib:/opt/nccl/lib:ro --bind /opt/ofi/lib:/opt/ofi/lib:ro" in script
    inherited = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    lines = "libraries=/opt/nccl/lib:/opt/ofi/lib\n"
    lines += f"""export APPTAINERENV_LD_LIBRARY_PATH="$libraries"'{inherited}'\n"""
    assert lines in script
    host = text(recipe, runtime="host")
    assert f'export LD_LIBRARY_PATH="/opt/nccl/lib:/opt/ofi/lib{inherited}"\n' in host
    libs = "runtime: {host_libs: [/opt/nccl/lib, /opt/ofi/lib]}"
    recipe = extended_recipe(tmp_path, "scheduler: slurm", libs)
    assert lines in text(recipe)


def test_libraries_by_rule_are_bound_out_of_the_way(tmp_path):
    libs = "runtime: {host_libs: [/cluster/nccl/lib, /opt/ofi/lib], cuda_compat: auto}"
    recipe = extended_recipe(tmp_path, libs, "fabric: {host_libs: auto}")
    script = text(recipe).replace(" \\\n   ", "")
    bound = re.findall(r"--bind (\S+:/run/imgkit/\S+)", script)
    assert bound == [
        "/usr:/run/imgkit/host/usr:ro",
        "/opt:/run/imgkit/host/opt:ro",
        "/cluster/nccl/lib:/run/imgkit/host/cluster/nccl/lib:ro",
    ]
    assert "LD_LIBRARY_PATH" not in script
    assert "export IMGKIT_HOST_LIBS=auto:/cluster/nccl/lib:/opt/ofi/lib\n" in script
    assert "export IMGKIT_CUDA_COMPAT=auto\n" in script
    argv = text(recipe, runtime="docker").split()
    assert "/usr:/run/imgkit/host/usr:ro" in argv
    assert "IMGKIT_HOST_LIBS=auto:/cluster/nccl/lib:/opt/ofi/lib" in argv
    host = text(recipe, runtime="host")
    assert "IMGKIT_HOST_LIBS" not in host
    assert 'export LD_LIBRARY_PATH="/cluster/nccl/lib:/opt/ofi/lib' in host


def test_missing_environment_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no virtual environment"):
        checks.before_submission(job(directory=tmp_path, runtime="host", image="my env"))


def test_conversion_runs_where_the_recipe_says(tmp_path):
    request = submit_request(tmp_path, "queue: {sif: [-q, short, -l, 'select=1:ncpus=8']}")
    script = conversion.prepare_conversion("/a b.tar", request).script.text
    directives = [line for line in script.splitlines() if line.startswith("#PBS")]
    assert directives == [
        *("#PBS -S /bin/bash", "#PBS -j oe", "#PBS -N mine-sif", "#PBS -q short"),
        *("#PBS -l walltime=00:10:00", "#PBS -l select=1:ncpus=8"),
    ]
    assert "\ncd '/my work'\n" in script
    assert script.endswith("exec imgkit sif '/a b.tar' -o '/my work/a b.sif'\n")


def test_conversion_without_a_place_is_refused():
    request = SubmitRequest(system="olivia-eap", time="10m")
    with pytest.raises(UsageError) as caught:
        conversion.prepare_conversion("/a.tar", request)
    assert (caught.value.where or "").startswith("systems/olivia-eap.yaml:")
    assert "imgkit sif /a.tar" in (caught.value.hint or "")


def test_spare_serves_the_preflight_alone():
    (warning,) = job(nodes="2+1").warnings
    assert "a spare only replaces a node that the preflight finds bad" in warning
    assert "select=3:" in text(nodes="2+1")


def test_time_before_the_end_is_not_used():
    assert any("--stop-before is not used" in warning for warning in job(stop_before_s=60).warnings)


@pytest.mark.parametrize("folder", ["lib", "/a:/b", "/a,b", "/a b", "/$(x)/lib", "/`x`"])
def test_library_folder_that_no_bind_takes_is_refused(tmp_path, folder):
    with pytest.raises(UsageError, match="not a folder on the nodes"):
        extended_recipe(tmp_path, f"runtime: {{host_libs: ['{folder}']}}")


def test_output_and_end_are_those_of_pbs():
    record = queued_job(id="15422.redoak-login2", system="pbs", name="ddp")
    assert pbs.log_source(record)[-1] == "/w/ddp.o15422"
    assert pbs.cancel_command(record) == ("qdel", "15422.redoak-login2")
