"""What schedulers print when they take a job, also odd answers, and the records by which jobs are followed.

The schedulers' programs here are fakes: they take anything, and print the file ``answer``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from file_tree import FakeProgram

from imgkit_builder.jobs import quoting, records
from imgkit_builder.jobs.dependencies import with_scheduler_ids
from imgkit_entrypoints.errors import UsageError

PROGRAMS = ("sbatch", "squeue", "scancel", "qsub", "qstat", "runai", "kubectl")
FAKE = """\
[ ! -p /dev/stdin ] || cat > /dev/null
echo "$0 $*" >> calls
cat answer
"""
JOBS = {
    "slurm": ("mn5", "-A", "a", "--qos", "acc_debug"),
    "pbs": ("olivia-eap", "-q", "q"),
    "kubeflow": ("rcp", "--format", "pytorchjob", "--image", "x:1", "-q", "me"),
    "runai": ("rcp", "--format", "runai-v1", "--image", "x:1", "-q", "me"),
}


@pytest.fixture
def call(call: Any, home: Path, fake_program: FakeProgram) -> Any:
    """``call("run", "--detach", ...)`` in a folder with images and fake schedulers."""
    for name in PROGRAMS:
        fake_program(name, FAKE)
    for recipe in ("mn5", "olivia-eap"):
        Path(f"{recipe}.sif").mkdir()  # a sandbox: imgkit does not look inside
    return call


def submitted(call: Any, system: str, answer: bytes, *args: str) -> tuple[object, str, str]:
    Path("answer").write_bytes(answer)
    time = () if "rcp" in JOBS[system] else ("--time", "10m")
    result: tuple[object, str, str] = call("run", "--detach", *JOBS[system], *time, *args, "--", "dist-hello")
    return result


@pytest.mark.parametrize(
    ("system", "answer", "expected"),
    [
        ("slurm", b"4711\n", ("4711", "")),
        ("slurm", b"Welcome to the site\n\n4711;two\n", ("4711", "two")),
        ("pbs", b"a notice\n15422.redoak-login2\n", ("15422.redoak-login2", "")),
        ("pbs", b"12[].redoak\n", ("12[].redoak", "")),
        ("kubeflow", b"pytorchjob.kubeflow.org/rcp created\n", ("pytorchjob.rcp", "")),
        ("runai", b"\xff rubbish\n", ("rcp", "")),  # the job's name is its id
    ],
)
def test_id_in_the_answer_is_kept(call, system, answer, expected):
    code, out, err = submitted(call, system, answer)
    assert (code, out) == (0, f"{expected[0]}\n"), err
    record = records.find_record(expected[0])
    assert (record.job.id, record.job.cluster, record.answer) == (*expected, None)


ODD = (
    b"",
    b"\n",
    b"4711\n4712\n",
    b"4711\nThank you\n",
    b"Goodbye\n",
    b"../../x\n",
    b"4711;../x\n",
    b"-x\n",
    b"47 11\n",
    b"\xff\xfe4711\n",
    b"47\x0011\n",
    b"4" * 200,
    b"a" * 5_000_000,
    b"4711 " * 2_000_000,
)


@pytest.mark.parametrize("system", ["slurm", "pbs", "kubeflow"])
def test_answer_without_an_id_loses_no_job(call, system, tmp_path):
    for number, answer in enumerate(ODD if system == "slurm" else ODD[:7], 1):
        code, out, err = submitted(call, system, answer)
        assert (code, out) == (4, ""), (answer[:40], err)
        assert "the job is submitted, but its id is unknown: " in err
        assert len(err) < 2000
        assert len(list(Path("state/imgkit/jobs").iterdir())) == number
    assert not (tmp_path.parent / "x.json").exists()
    assert not list(tmp_path.rglob("x.json"))


def test_job_without_an_id_is_listed_and_nothing_is_done_with_it(call):
    code, _, err = submitted(call, "slurm", b"4711\nThank you\n")
    assert "slurm printed '4711\\nThank you'" in err
    assert "squeue --me shows the job mn5 with its id" in err
    handle = next(line.split()[1].rstrip(":") for line in err.splitlines() if "unknown-" in line)
    rows = json.loads(call("runs", "--json")[1])["runs"]
    assert [(row["id"], row["state"]) for row in rows] == [(handle, "unknown")]
    Path("calls").unlink()
    for verb in ("status", "logs", "cancel", "fetch"):
        code, out, err = call(verb, handle)
        assert (code, out) == (4, ""), verb
        assert "its id is unknown" in err
    assert not Path("calls").exists()  # no scheduler was asked


def test_error_of_a_job_without_an_id_is_json(call):
    code, out, _ = submitted(call, "slurm", b"", "--json")
    assert code == 4
    assert "slurm printed nothing" in json.loads(out)["error"]["what"]


@pytest.mark.parametrize(
    "job_id", ["../x", "x/y", "-x", "a" * 300, "7@../x", "7@", "", "*", "7\x00", "7\n", "7;x", "a..b"]
)
def test_text_that_is_no_id_has_no_record(call, job_id):
    assert not quoting.is_job_id(job_id)
    code, _, err = call("status", "--", job_id) if job_id else call("cancel", "")
    assert code == 2
    assert "imgkit has no record of a job" in err


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../x"},
        {"id": "-x"},
        {"cluster": "a b"},
        {"remote": "../x"},
        {"name": "../../etc"},
        {"answer": 5},
    ],
)
def test_record_with_odd_values_is_refused(call, change):
    submitted(call, "slurm", b"4711\n")
    file = Path("state/imgkit/jobs/4711.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    code, _, err = call("cancel", "4711")
    assert (code, "no record of a job" in err) == (2, True)
    assert json.loads(call("runs", "--json")[1])["runs"] == []


@pytest.mark.parametrize(
    ("option", "result"),
    [
        ("--dependency=afterok:4711@mn5", "--dependency=afterok:4711"),
        ("--dependency=afterok:1@mn5:2_3@mn5,after:4@mn5+5", "--dependency=afterok:1:2_3,after:4+5"),
        ("-dafterany:4711@mn5", "-dafterany:4711"),
        ("depend=afterok:12[].pbs-1@mn5", "depend=afterok:12[].pbs-1"),
        ("--dependency=singleton", "--dependency=singleton"),
        ("--mail-user=1@mn5", "--mail-user=1@mn5"),
    ],
)
def test_ids_of_the_remote_become_those_of_its_scheduler(option, result):
    assert with_scheduler_ids((option, "--nice"), "mn5") == (result, "--nice")


@pytest.mark.parametrize(
    ("remote", "destination"), [("olivia", "olivia"), ("", "the scheduler of this machine")]
)
def test_id_of_another_remote_is_refused(remote, destination):
    with pytest.raises(UsageError) as caught:
        with_scheduler_ids(("--dependency=afterok:4711@mn5",), remote)
    assert str(caught.value) == (
        f"--option: 4711@mn5 is a job on mn5, but the new job goes to {destination}\n"
        "  -> wait for it first: imgkit wait 4711@mn5"
    )
