"""Releases of torch before 2.6, as NGC 24.03 has one: sharded state is refused by name, all else works.

pip installs each into a container of its own, whose image is removed at the end. Takes about 12 GB of the
engine's disk where torch comes with CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from labkit import docker, in_image, run

from . import test_programs_real, test_resume_real, test_run_real, test_state_real
from .test_run_real import many

pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.xdist_group("old-torch")]


@pytest.fixture(scope="module", params=["2.3.1", "2.5.1"])
def old(standin: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """An image of the stand-in with an older torch."""
    name = f"imgkit-test-torch-{request.param}-{os.getpid()}"
    install = 'exec python3 -m pip install -q --no-compile --root-user-action ignore "torch==$0" "numpy<2"'
    free = ("--env", "PIP_CONSTRAINT=")  # which holds the stand-in's own torch
    argv = ("docker", "run", "--name", name, *free, standin, "sh", "-c", install, request.param)
    try:
        result = run(*argv, timeout_s=1200)
        if result.returncode:
            pytest.skip(f"pip cannot install torch {request.param}: {result.stderr.strip()[-300:]}")
        docker("commit", name, name)
    finally:
        run("docker", "rm", "--force", name)
    try:
        yield name
    finally:
        docker("image", "rm", name)


REFUSED = """
from torch.distributed._composable.fsdp import fully_shard  # not public yet
from torch.distributed.device_mesh import init_device_mesh

def sharded(hybrid, of):
    names = {"mesh_dim_names": ("replicas", "shards")} if hybrid else {}
    mesh = init_device_mesh("cpu", (2, 1) if hybrid else (2,), **names)
    fully_shard(net := torch.nn.Linear(4, 4), mesh=mesh)
    with Run.start() as run:
        run.track(**{of: net if of == "model" else torch.optim.AdamW(net.parameters())})
        raise AssertionError("nothing was refused")

for hybrid in (False, True):
    for of in ("model", "optimizer"):
        assert start(2, lambda: sharded(hybrid, of), "run") == [2, 2]
"""


def test_old_torch_refuses_sharded_state_by_name(old, tmp_path):
    output = many(old, tmp_path, REFUSED)
    version = old.split("-")[3]
    for name in ("model", "optimizer"):
        assert output.count(f"run.track: {name} is sharded, and this is torch {version}") == 4, output
    assert "-> use an image with torch 2.6 or newer (NGC 25.01), or wrap the model in DDP" in output


ENDING = """
from imgkit_entrypoints.apps import ranks

def worker(turn, rank):
    store = dist.FileStore(f"store{turn}", 2) if turn % 2 else None
    more = {"store": store, "rank": rank, "world_size": 2} if store else {}
    with ranks.join_group(device=torch.device("cpu"), **more) as here:
        here.gather("x")
        if turn == 20:
            raise KeyError("mine")

def both(turn):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a rank that hangs
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", **address)
            ranks.run_worker(lambda: worker(turn, rank))
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

for turn in range(20):
    assert (codes := both(turn)) == [0, 0], (turn, codes)
assert both(20) == [1, 1]
"""


def test_worker_ends_right_after_an_exchange(old, tmp_path):
    output = many(old, tmp_path, ENDING)
    assert output.count("KeyError: 'mine'") == 2, output


@pytest.mark.parametrize(
    "test",
    [
        test_run_real.test_requests_to_stop_end_with_their_codes,
        test_run_real.test_misuse_is_refused_with_names,
        test_run_real.test_named_loops_resume_wherever_they_are_cut,
        test_run_real.test_damaged_checkpoints_are_skipped,
        test_run_real.test_other_number_of_ranks_takes_the_rest_of_the_samples,
        test_programs_real.test_program_resumes_bitwise,
        test_state_real.test_wrapped_model_resumes_bitwise_in_another_wrapper,
        test_state_real.test_every_wrapper_resumes_bitwise,
        test_state_real.test_each_rank_resumes_from_its_own_state,
        test_resume_real.test_node_that_does_not_see_the_folder_gets_the_state,
        test_resume_real.test_tied_weights_are_stored_once_and_exported,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_everything_else_works_with_old_torch(old, tmp_path, test):
    test(old, tmp_path)


@pytest.mark.parametrize("optimizer", [("sgd", "--momentum", "0.9"), ("adamw",)], ids=lambda args: args[0])
def test_dist_train_saves_and_exports_with_old_torch(old, tmp_path, optimizer):
    mounted = ("--volume", f"{tmp_path}:/runs", "--workdir", "/runs")
    app = ("python3", "-I", "-m", "imgkit_entrypoints", "dist-train")
    steps = ("--nproc", "2", "--steps", "4", "--run-dir", "own", "--optimizer", *optimizer)
    for args in (steps, steps, ("export", "own", "weights.safetensors")):
        result = in_image(old, *app, *args, options=mounted)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "tensors of step 4" in result.stdout


def test_killed_loop_resumes_bitwise_with_old_torch(old, tmp_path):
    test_run_real.test_killed_and_stopped_loop_resumes_bitwise(old, tmp_path, 3)
