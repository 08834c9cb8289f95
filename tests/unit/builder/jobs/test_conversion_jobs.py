"""``imgkit sif --submit`` and ``imgkit build --submit`` with a fake sbatch; cli/refusals has the refusals."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from fake_schedulers import SLURM_FORGOT
from file_tree import FakeProgram
from job_builder import MANIFEST

import imgkit_builder as imgkit
from imgkit_builder.archive import sidecar
from imgkit_builder.archive.sidecar import SavedArchive, SavedImage, Sidecar
from imgkit_builder.jobs import conversion, records
from imgkit_builder.jobs.request import SubmitRequest
from imgkit_builder.recipe import targets
from imgkit_builder.sif.conversion import Options
from imgkit_builder.workflow.build_request import SifBuildRequest
from imgkit_entrypoints.errors import UsageError

REQUEST = SubmitRequest(account="a1", time="1h")
MN5 = SubmitRequest(system="mn5", account="a1", time="10m", directory=Path("/w"))
CLUSTER = """
image: {base: "scratch:1"}
system:
  scheduler: slurm
  runtime: {kind: pyxis, compression: zstd}
  queue: {name: gpu, required: [name], sif: [-p, cpu, --mem=8G]}
"""


@pytest.fixture
def archive(home: Path, fake_program: FakeProgram) -> Path:
    """An archive in the current folder that names mn5, and a fake sbatch, which keeps the script."""
    fake_program("sbatch", "cat > script; echo 7")
    file = home / "my image.tar"
    file.touch()
    image = SavedImage(id="sha256:1", tag="mine:1", platform="linux/amd64", diff_ids=(), labels={})
    saved = SavedArchive(name=file.name, size_bytes=0, sha256="0" * 64, compress="none")
    manifest = dataclasses.replace(MANIFEST, recipe="mine")
    system = targets.load_target("mn5").system
    with sidecar.replace_around(Sidecar(image=image, archive=saved, system=system, manifest=manifest), file):
        pass
    return file


def last_command(script: str) -> list[str]:
    """Return the command in the last line of a script."""
    return shlex.split(script.replace("\\\n", "").splitlines()[-1])


def test_archive_names_the_system_of_its_conversion(archive, call):
    argv = ("sif", archive.name, "--submit", "-A", "a1", "--time", "1h")
    code, script, err = call(*argv, "--dry-run")
    assert (code, err) == (0, "")
    assert "#SBATCH --qos=gp_debug\n" in script
    image = archive.with_suffix(".sif")
    assert last_command(script) == ["exec", "imgkit", "sif", str(archive), "-o", str(image)]
    assert call(*argv, "--detach")[:2] == (0, "7\n")
    assert (archive.parent / "script").read_text() == script
    assert records.find_record("7").job.name == "mine-sif"


def test_submitted_conversion_has_no_run_folder(archive, call, fake_program):
    job = imgkit.submit_conversion(imgkit.prepare_conversion(archive, REQUEST, Path("x.sif")))
    assert (job.id, job.record.job.shell_line) == ("7", "")
    fake_program("squeue", SLURM_FORGOT)
    fake_program("sacct", "echo '7  COMPLETED  0:0'")
    assert call("status", "7")[1].splitlines()[-1] == "7 completed"
    assert json.loads(call("status", "7", "--json")[1])["folder"] is None


def test_build_is_submitted_with_its_options(archive):
    request = dataclasses.replace(REQUEST, name="nightly")
    build = SifBuildRequest(build_args=("A=1", "B=2"), no_test=True, output=Path("out.sif"))
    job = imgkit.submit_conversion(imgkit.prepare_build("mn5", request, build))
    assert (job.id, job.record.job.name) == ("7", "nightly")
    command = "exec imgkit build mn5 --with apptainer --build-arg A=1 --build-arg B=2 --no-test -o out.sif"
    script = (archive.parent / "script").read_text().replace(f"{archive.parent}/", "")
    assert last_command(script) == command.split()


def test_options_of_a_conversion_reach_the_job(archive):
    options = Options(tmpdir=Path("t"), force=True, test=False, unpack_limit_bytes=2_500_000_000)
    prepared = conversion.prepare_conversion(archive, MN5, Path("x"), options, verbose=True)
    assert prepared.job.command[4:] == (
        *("/w/x", "--tmpdir", "t", "--force", "--no-test"),
        *("--format", "sif", "--unpack-limit", "2.5", "--verbose"),
    )


def test_typed_qos_replaces_that_of_the_system():
    request = imgkit.SubmitRequest(system="mn5", account="a1", time="10m", qos="gp_long")
    script = conversion.prepare_conversion("x.tar", request).script.text
    assert "#SBATCH --account=a1\n#SBATCH --qos=gp_long\n#SBATCH --exclusive\n" in script


def test_system_states_queue_and_compression(tmp_path):
    (tmp_path / "mine.yaml").write_text(CLUSTER)
    request = SubmitRequest(system=str(tmp_path / "mine.yaml"))
    prepared = conversion.prepare_conversion("x.tar", request)
    assert "#SBATCH --partition=cpu\n#SBATCH --mem=8G\n" in prepared.script.text
    assert prepared.job.command[-2:] == ("--compression", "zstd")
    assert prepared.job.warnings == ("mine starts images by pyxis, which takes no .sif: --format sqsh",)
    sqsh = conversion.prepare_conversion("x.tar", request, options=Options(format="sqsh"))
    assert (Path(sqsh.job.container.image).name, sqsh.job.warnings) == ("x.sqsh", ())


def test_missing_base_is_refused_before_the_queue(archive):
    prepared = imgkit.prepare_build("mn5", REQUEST, SifBuildRequest(base_from="none.tar"))
    with pytest.raises(UsageError) as caught:
        imgkit.submit_conversion(prepared)
    assert (caught.value.what, caught.value.where) == (f"no file {archive.parent}/none.tar", "--base-from")
    assert not (archive.parent / "script").exists()
