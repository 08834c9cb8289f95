"""Variables that modules of the site set: in mounts, libraries and variables of a system's file."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from file_tree import write_program
from job_builder import make_job, make_script, write_recipe

from imgkit_builder.jobs.quoting import quote, quote_with_site_variables
from imgkit_builder.recipe import targets
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import SystemFacts

NCCL = "NCCL/2.30.4-GCCcore-14.3.0-CUDA-13.0.0"
ROOTS = ("EBROOTLIBFABRIC", "EBROOTNCCL", "EBROOTAWSMINOFIMINNCCL")
DOCUMENTED_ENV = {
    "FI_PROVIDER": "cxi",
    "FI_CXI_RX_MATCH_MODE": "hybrid",
    "NCCL_PROTO": "^LL128",
    "HF_HOME": "{folder}/hf_cache",
    "HF_HUB_CACHE": "{folder}/hf_cache/hub",
    "HF_DATASETS_CACHE": "{folder}/hf_cache/datasets",
    "TORCH_HOME": "{folder}/hf_cache/torch",
}
"""Variables of the container in Sigma2's script for Olivia, without those of its own torchrun command."""
RECORD = "import json, os, sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"
TOOLS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "apptainer": f'exec {sys.executable} -c "{RECORD}" "${{0%/*}}/record.json" "$@"',
}
"""Stand-ins: srun starts the command on one node, and apptainer records its own."""


@dataclass(frozen=True)
class Node:
    """A folder with the tools of a node."""

    folder: Path

    def run(
        self, system: str, loaded: Mapping[str, Mapping[str, str]], *binds: str, gpus: int | None = None
    ) -> tuple[int, str]:
        """Run a batch script, where each module of `loaded` sets its variables; return code and errors."""
        text = f"image: {{base: 'ubuntu:24.04', platform: arm64}}\nsystem: {system}\n"
        command = ("dist-run", "train.py")
        recipe = write_recipe(self.folder, text)
        script = make_script(recipe, directory=self.folder, command=command, binds=binds, gpus=gpus).text
        for name, tool in TOOLS.items():
            write_program(self.folder / name, tool)
        cases = ""
        for name, variables in loaded.items():
            exports = "".join(f" export {key}={quote(value)};" for key, value in variables.items())
            cases += f"{shlex.quote(name)}) :;{exports};"
        env = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_CPUS_PER_TASK": "1",
            "BASH_FUNC_module%%": f'() {{ case $2 in {cases} *) echo "no module $2" >&2; return 1;; esac\n}}',
        }
        result = subprocess.run(
            ["bash"], input=script, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        return result.returncode, result.stderr

    @property
    def record(self) -> Path:
        return self.folder / "record.json"

    def started(self) -> tuple[list[str], dict[str, str]]:
        """Return what apptainer was started with: its arguments and its environment."""
        argv, env = json.loads(self.record.read_text())
        return argv, env


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def roots(folder: Path) -> dict[str, str]:
    """Make the folders of the modules, with a blank in one's name."""
    names = dict(zip(ROOTS, ("libfabric", "NCCL 2.30.4", "aws-ofi-nccl"), strict=True))
    for name in names.values():
        for part in ("lib", "include"):
            (folder / name / part).mkdir(parents=True)
    return {variable: str(folder / name) for variable, name in names.items()}


def mounts(argv: list[str]) -> list[str]:
    return [argv[number + 1] for number, argument in enumerate(argv) if argument == "--bind"]


def test_olivia_starts_what_sigma2_documents(node):
    variables = roots(node.folder)
    code, errors = node.run("olivia", {"NRIS/GPU": {}, NCCL: variables})
    assert code == 0, errors
    argv, env = node.started()
    libfabric, nccl, plugin = (variables[name] for name in ROOTS)
    assert argv[:3] == ["--quiet", "exec", "--nv"]
    assert argv[-3:] == [str(node.folder / "mine.sif"), "dist-run", "train.py"]
    mounted = {mount.partition(":")[0] for mount in mounts(argv)}
    documented = {f"{libfabric}/lib", f"{libfabric}/include", nccl, f"{plugin}/lib", "/usr/lib64"}
    assert documented <= mounted
    first = [f"{libfabric}/lib", f"{nccl}/lib", f"{plugin}/lib", "/usr/lib64"]
    inherited = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"  # replaced in the container
    assert env["APPTAINERENV_LD_LIBRARY_PATH"] == ":".join(first) + inherited
    facts = targets.load_target(node.folder / "mine.yaml").system.on_node({**env, "PWD": str(node.folder)})
    expected = {name: value.format(folder=node.folder) for name, value in DOCUMENTED_ENV.items()}
    assert {name: facts.env.get(name) for name in expected} == expected


@pytest.mark.parametrize(("gpus", "visible"), [(None, "0,1,2,3"), (2, "0,1")])
def test_only_task_of_a_node_sees_its_gpus(node, gpus, visible):
    """Slurm of the Jülich Supercomputing Centre shows it one GPU, unless srun inherits the variable."""
    code, errors = node.run("jupiter", {}, gpus=gpus)
    assert code == 0, errors
    argv, env = node.started()
    assert env["CUDA_VISIBLE_DEVICES"] == visible
    assert argv[-4:] == ["env", f"CUDA_VISIBLE_DEVICES={visible}", "dist-run", "train.py"]


@pytest.mark.parametrize("missing", ROOTS)
def test_job_without_the_module_ends_by_the_name_of_its_variable(node, missing):
    variables = roots(node.folder)
    del variables[missing]
    code, errors = node.run("olivia", {"NRIS/GPU": {}, NCCL: variables})
    assert code != 0
    assert f"{missing}: imgkit: no module has set it on this node" in errors
    assert not node.record.exists()


def test_value_of_a_module_is_one_word_and_no_command(node):
    variables = roots(node.folder)
    hostile = node.folder / "a $(touch stolen) `touch stolen`"
    (hostile / "data").mkdir(parents=True)
    loaded = {"NRIS/GPU": {}, NCCL: {**variables, "DATA": str(hostile)}}
    code, errors = node.run("olivia", loaded, "${DATA}/data:/data:ro")
    assert code == 0, errors
    assert f"{hostile}/data:/data:ro" in mounts(node.started()[0])
    assert not (node.folder / "stolen").exists()


def test_variables_that_the_user_names_are_none_of_the_host():
    env = ("PYTHONPATH=/pkgs/site-packages", "PMIX_MCA_gds=hash", "EPOCHS=3")
    assert make_job("olivia", env=env).settings["IMGKIT_KEEP_ENV"] == "PYTHONPATH,PMIX_MCA_gds"


@pytest.mark.parametrize("text", ["$5", "$(id)", "`id`", "${X:-y}", '"; id; "', "\\"])
def test_text_around_a_variable_stays_text(text):
    text_in_shell = quote(quote_with_site_variables(f"$ROOT/{text}"))
    result = subprocess.run(
        ["bash", "-c", f"printf %s {text_in_shell}"],
        env={"ROOT": "/a b"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == f"/a b/{text}"


@pytest.mark.parametrize(
    "section",
    [
        "runtime: {binds: ['/a$(id):/b']}",
        "runtime: {binds: ['$ROOT/a$:/b']}",
        "runtime: {binds: ['${ROOT:-/x}/a']}",
        "runtime: {host_libs: ['$ROOT/$(id)']}",
        "runtime: {host_libs: ['lib/$ROOT']}",
        "env: {HF_HOME: '$5/x'}",
    ],
)
def test_only_names_of_variables_are_allowed(tmp_path, section):
    recipe = write_recipe(tmp_path, f"image: {{base: 'ubuntu:24.04'}}\nsystem: {{{section}}}\n")
    with pytest.raises(UsageError, match=r"mine\.yaml:2"):
        targets.load_target(recipe)


def test_node_replaces_variables_of_system_env():
    facts = SystemFacts(env={"HF_HOME": "$SCRATCH/hf", "TORCH_HOME": "$IMGKIT_JOB_DIR/th", "A": "plain"})
    env = {"SCRATCH": "/scratch/me", "PWD": "/job"}
    assert facts.on_node(env).env == {"HF_HOME": "/scratch/me/hf", "TORCH_HOME": "/job/th", "A": "plain"}
    assert facts.on_node({"HF_HOME": "/mine", "PWD": "/job"}).env["TORCH_HOME"] == "/job/th"
    with pytest.raises(UsageError, match=r"HF_HOME=\$SCRATCH/hf, but \$SCRATCH is not set on this node"):
        facts.on_node({"PWD": "/job"})
