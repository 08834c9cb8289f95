"""Texts as torch 2.13 and NCCL print them, and what is said about them."""

from __future__ import annotations

import pytest

from imgkit_entrypoints.launch.explain import find_explanations

SEEN = [
    ("OSError: [Errno 30] Read-only file system: 'out'", "the program writes into the image"),
    (
        "torch.DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 clients joined.",
        "only 1 of 2 nodes started torchrun",
    ),
    (
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max "
        "retries exceeded with url: /gpt2/resolve/main/config.json",
        "this node cannot reach huggingface.co",
    ),
    ("curl: (6) Could not resolve host: pypi.org", "this node cannot reach pypi.org"),
    (
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them",
        "this node cannot reach huggingface.co",
    ),
    (
        '  File "/torch/distributed/elastic/agent/server/api.py", line 638, in _assign_worker_ranks\n'
        "    role_infos = [\n"
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "another program changes the keys of torch's store",
    ),
    (
        "torch.distributed.DistNetworkError: The client socket has timed out after 5000ms while trying to "
        "connect to (10.0.0.1, 29500).",
        "does not answer at 10.0.0.1:29500",
    ),
    (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "holds torchrun's port",
    ),
    (
        "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/"
        "pair.h:311] Connect timeout [none]",
        "a firewall between the nodes",
    ),
    (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/debug_logger.cc:9] ERROR failed to connect, "
        "willRetry=1, retry=1, retryLimit=3, rank=1, size=2, local=[10.42.0.12]:46232, "
        "remote=[10.42.0.11]:20879$1, error=SO_ERROR: Connection timed out, remote=[10.42.0.11]:20879$1",
        "a firewall between the nodes",
    ),
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
        "waiting 20000ms for recv operation to complete",
        "a rank waited 20000 ms for another rank",
    ),
    (
        "[rank1]:[W1122 08:05:00.409975725 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on "
        "SocketImpl(fd=3, addr=[::]:40910, remote=[fdff::]:28199): Failed to recv, got 0 bytes. "
        "Connection was likely closed. Did the remote server shutdown or crash?",
        "another rank exited first",
    ),
    (
        "[rank0]:[W1122 08:04:44.268087772 socket.cpp:469] [c10d] waitForInput: poll for socket "
        "SocketImpl(fd=3, addr=[200::]:4639, remote=[fdff::]:59356) returned 0, likely a timeout",
        "another rank exited first",
    ),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "a GPU's memory is full"),
    ("RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error.", "is too small"),
    ("NCCL WARN Error: failed to extend /dev/shm/nccl-03v824 to 4194660 bytes", "too small for NCCL"),
    (
        "NCCL WARN unlink shared memory /dev/shm/nccl-d5rTd0 failed, error: No such file or directory",
        "when a user's last session on the node ends",
    ),
    ("  exitcode  : -9 (pid: 4242)", "memory ran out"),
    ("NCCL WARN Error: network AWS Libfabric not found.", "libfabric plugin"),
    ("No eligible providers were found", "efa exists on EC2 only"),
    ("NET/IB : Got completion with error 12, opcode 0", "an RDMA transfer timed out"),
    ("ibv_modify_qp failed with 22 Invalid argument", "because of a wrong GID"),
    ("Bootstrap : no socket interface found", "no network interface by the name in NCCL_SOCKET_IFNAME"),
    (
        "CUDA driver version is insufficient for CUDA runtime version",
        "does not support this GPU or its driver",
    ),
    ("terminate called without an active exception", "gloo threads that DDP holds outlived the interpreter"),
]


@pytest.mark.parametrize(("text", "cause"), SEEN)
def test_known_text_is_explained(text, cause):
    explanations = find_explanations(f"line before\n{text}\nline after\n")
    assert cause in explanations[0].cause
    assert explanations[0].text == text.strip().partition("\n")[0]
    assert explanations[0].remedy


def test_killed_process_is_told_the_memory_of_the_job():
    (explanation,) = find_explanations("  exitcode  : -9 (pid: 4242)", memory="--mem 440G")
    assert explanation.remedy == (
        "the job had --mem 440G; request more, or use fewer data workers; to check: dmesg | grep -i oom"
    )
    (explanation,) = find_explanations("  exitcode  : -9 (pid: 4242)")
    assert explanation.remedy.startswith("request more memory (imgkit run --mem SIZE), or use fewer ")


def test_unknown_text_stays_unexplained():
    assert find_explanations("ValueError: batch size must be positive") == ()


@pytest.mark.parametrize(
    ("texts", "cause"),
    [
        ([text for text, _ in SEEN[:4]] + ["Connection reset by peer"], "only 1 of 2 nodes started torchrun"),
        ([text for text, _ in SEEN if "recv" in text], "a rank waited 20000 ms"),
    ],
    ids=["rendezvous", "lost packets"],
)
def test_only_the_root_of_a_failure_is_told(texts, cause):
    (explanation,) = find_explanations("\n".join(texts))
    assert explanation.cause.partition(" for another rank ")[0] == cause


def test_closed_connection_is_explained_only_without_a_cause():
    reset, memory = "RuntimeError: [..] Connection closed by peer [127.0.0.1]:5000", "CUDA out of memory."
    (explanation,) = find_explanations(reset)
    assert "another rank exited first" in explanation.cause
    assert find_explanations(reset, has_cause=True) == ()
    for text, has_cause in ((f"{reset}\n{memory}", False), (f"{memory}\n{reset}", True)):
        (explanation,) = find_explanations(text, has_cause=has_cause)
        assert explanation.cause == "a GPU's memory is full"
