"""Run short-lived containers, which are always removed, even if imgkit is killed.

For each container, a small second process (the guard) runs beside imgkit. If imgkit dies, the guard removes
the container.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from imgkit_builder.archive import tar_read
from imgkit_builder.base.process import Finished
from imgkit_builder.engine import address
from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translate_errors
from imgkit_entrypoints.terminal import strip_styles

NOT_FOUND = 127
"""The exit code of a shell for a missing program. The engine has no such code, because it refuses to start
the container."""

# The source of the guard. It waits for the end of its input. If imgkit has removed the container, it writes
# something to that input first. If the input ends without data, imgkit was killed, and the guard removes the
# container. It tries twice, because the engine may still be creating the container.
_GUARD_SOURCE = """
import sys
if not sys.stdin.buffer.read():
    sys.path += sys.argv[2:]
    import time
    from imgkit_builder.engine.address import find_endpoint
    from imgkit_builder.engine.connection import make_client
    for wait_s in (0, 2):
        time.sleep(wait_s)
        try:
            make_client(find_endpoint()).remove_container(sys.argv[1], force=True, v=True)
            break
        except Exception:
            pass
"""


@contextlib.contextmanager
def temporary_container(
    engine: Engine,
    image: str,
    argv: Sequence[str] = ("true",),
    *,
    purpose: str,
    platform: str,
    mounted: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Create a container from `image`, yield its name, and remove it at the end of the block.

    The container has no network, and is not started. It is removed even if imgkit is killed.

    Parameters
    ----------
    image : the engine's name for the image, `ImageInfo.ref`.
    argv : the command that runs if the container is started. It replaces the entry point of the image.
    purpose : a word for the name of the container, such as ``read``.
    platform : the platform of the image, such as ``linux/amd64``.
    mounted : folders of the engine's machine -> their read-only paths in the container.
    """
    # The name is chosen here and not by the engine. So the container can be removed even if the engine's
    # response to "create" is lost.
    name = f"imgkit-{purpose}-{secrets.token_hex(6)}"
    is_created = False
    with _start_guard(name) as report_removal:
        try:
            with translate_errors(f"create a container of {image}", name=image):
                engine.api.create_container(
                    image,
                    entrypoint=list(argv[:1]),
                    command=list(argv[1:]),
                    name=name,
                    labels={"imgkit.purpose": purpose},
                    # Only an engine with containerd's store keeps an image for several platforms.
                    platform=platform if engine.has_containerd_store else None,
                    host_config=_make_host_config(engine, mounted or {}),
                )
            is_created = True
            yield name
        finally:
            remove(engine, name)
            # If "create" was interrupted, the engine may still be creating the container. Then the guard
            # removes it.
            if is_created:
                report_removal()


def _make_host_config(engine: Engine, mounted: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a container without a network.

    `mounted` has folders of the engine's machine, each with its read-only path in the container.
    """
    import docker.types

    mounts = []
    for folder, target in mounted.items():
        mounts.append(docker.types.Mount(target, folder, type="bind", read_only=True))
    return engine.api.create_host_config(
        network_mode="none",
        # With the engine's default driver, the output might not be readable later.
        log_config=docker.types.LogConfig(type="json-file"),
        mounts=mounts,
    )


def read_file(engine: Engine, name: str, path: str, *, most_bytes: int) -> bytes | None:
    """Return the content of the file `path` in the container `name`.

    If there is no such file, or if it has more than `most_bytes`, return None.
    """
    import docker.errors

    with translate_errors(f"read {path}"):
        # The engine sends a file of a container as a tar.
        try:
            chunks, _ = engine.api.get_archive(name, path)
        except docker.errors.NotFound:
            return None
        return tar_read.read_first_file(iter(chunks), name=path, most_bytes=most_bytes)


def remove(engine: Engine, name: str) -> None:
    """Remove the container `name`, even if it is running. A missing container is no error."""
    import docker.errors

    with translate_errors(f"remove the container {name}"):
        try:
            engine.api.remove_container(name, force=True, v=True)
        except docker.errors.APIError as error:
            # 404: the container was never created. 409: the engine is already removing it.
            if error.status_code not in (404, 409):
                raise


def run(engine: Engine, image: str, argv: Sequence[str], *, platform: str) -> Finished:
    """Run `argv` in a container of `image`, wait for its end, and return its exit code and output.

    If the image does not contain the program, the exit code is 127, the same as in a shell. The output is
    then the message of the engine.
    """
    with temporary_container(engine, image, argv, purpose="run", platform=platform) as name:
        with translate_errors(f"start {argv[0]} in {image}", name=image):
            missing_program_message = _start(engine, name)
        if missing_program_message:
            return Finished(argv=tuple(argv), returncode=NOT_FOUND, output=missing_program_message)
        with translate_errors(f"run {argv[0]} in {image}"), engine.without_timeout() as api:
            exit_code = int(api.wait(name)["StatusCode"])
            output: bytes = api.logs(name, stdout=True, stderr=True)
    return Finished(
        argv=tuple(argv), returncode=exit_code, output=strip_styles(output.decode("utf-8", "replace"))
    )


def _start(engine: Engine, name: str) -> str:
    """Start the container `name`.

    Return ``""``, or the engine's message if the image does not contain the program to start.
    """
    import docker.errors

    try:
        engine.api.start(name)
    except docker.errors.APIError as error:
        message = str(error.explanation)
        if not re.search("executable file not found|no such file or directory", message):
            raise
        # The text before "exec:" is about containerd and runc, which does not help the user.
        _, separator, reason = message.partition("exec:")
        if separator:
            return separator + reason
        return message
    return ""


@contextlib.contextmanager
def _start_guard(name: str) -> Iterator[Callable[[], None]]:
    """Start a guard, a process that removes the container `name` if imgkit is killed.

    Yield a function that tells the guard that the container has been removed. The guard then does nothing.
    """
    # Python's option -I leaves out PYTHONPATH and the current folder. So pass on all folders from which the
    # guard may have to import imgkit. The current folder is an empty text here, and is not passed on.
    import_folders = [folder for folder in sys.path if folder]
    # The guard runs in its own session, so that Ctrl-C in the terminal does not end it before imgkit has
    # cleaned up.
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _GUARD_SOURCE, name, *import_folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as guard:
        assert guard.stdin is not None  # noqa: S101 - for the type checker: stdin=PIPE
        stdin = guard.stdin

        def report_removal() -> None:
            stdin.write(b"removed")

        # The guard waits for the end of its input. `Popen` flushes and closes the input after this block, and
        # the kernel closes it if imgkit is killed. If it is empty, the guard removes the container.
        yield report_removal


_SHM_SIZE = "8g"
"""The limit for shared memory. 8 GiB is enough for NCCL and data loaders of eight GPUs. Memory that is not
used is not allocated."""


def shell_argv(
    image: str, *, gpus: bool, share_host: bool, endpoint: Endpoint, workdir: str = ""
) -> list[str]:
    """Return the command that opens bash in `image`, in `workdir` or the image's own working directory.

    If `share_host` is true, the container shares IPC with the machine, and thereby its shared memory.
    Otherwise it has no network, and `_SHM_SIZE` of shared memory. NCCL and data loader workers need shared
    memory, and Docker's default of 64 MB is too small.
    """
    argv = [*_engine_program(endpoint), "run"]
    if share_host:
        argv.append("--ipc=host")
    else:
        argv += ["--network", "none", f"--shm-size={_SHM_SIZE}"]
    # RDMA needs unlimited locked memory. This limit and the one for stacks, 64 MiB, are NVIDIA's advice for
    # its PyTorch containers. The limit for open files is set because Docker 29 lowers it to 1,024.
    for limit in ("memlock=-1", "stack=67108864", "nofile=16384"):
        argv += ["--ulimit", limit]
    if workdir:
        argv += ["--workdir", workdir]
    # A terminal for bash. The container is removed when bash ends.
    argv += ["-it", "--rm"]
    if gpus:
        argv += ["--gpus", "all"]
    return [*argv, image, "bash"]


def _engine_program(endpoint: Endpoint) -> list[str]:
    """Return the program that talks to an engine, with the options that select the engine at `endpoint`."""
    if shutil.which("podman") and not shutil.which("docker"):
        return ["podman", "--url", endpoint.host]
    # Like imgkit, docker uses the variables and contexts from which the endpoint was found.
    if endpoint.source or endpoint.host == address.DEFAULT_HOST:
        return ["docker"]
    return ["docker", "--host", endpoint.host]
