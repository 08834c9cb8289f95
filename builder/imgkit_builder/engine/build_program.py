"""Builds with a program of the engine's own: ``docker buildx build`` or ``podman build``."""

from __future__ import annotations

import codecs
import contextlib
import importlib.resources
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from imgkit_builder.base.process import pumped
from imgkit_builder.engine import labels
from imgkit_builder.engine.builders import PODMAN, Choice, own_storage
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import broken
from imgkit_builder.engine.following import BuildFollower
from imgkit_entrypoints import json_text

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

CHUNK_BYTES = 1 << 20


def run(
    engine: Engine,
    context: BuildContext,
    dockerfile: str,
    watch: BuildFollower,
    *,
    builder: Choice,
    no_cache: bool,
) -> str:
    """Build `context` with the program of `builder`, and return the engine's name for the image.

    Notes
    -----
    The program gets the same tar as the engine's API, on its standard input. ``build_guard`` runs between the
    two: when this process is interrupted or killed, it ends the step and removes what podman leaves.

    Raises
    ------
    ToolFailed, UsageError : a step failed, with the recipe's line and the last output.
    """
    written = watch.log_path.with_name("image-id")
    token = f"imgkit-{secrets.token_hex(8)}"
    options = ["--iidfile", str(written), "--platform", context.manifest.platform]
    options += ["--file", labels.DOCKERFILE, *(["--no-cache"] if no_cache else []), *builder.options]
    told = watch.log_path.with_name("build.json")
    buildx = [*_BUILDX, "--metadata-file", str(told), *options, "-"]
    argv = _podman(options, token) if builder.name == "podman" else buildx
    env = own_storage() if builder.name == "podman" else _buildx_env(engine)
    chunks = _context_chunks(context, dockerfile, watch)
    with contextlib.closing(chunks):
        code = _guarded(argv, chunks, watch.text, token=token, containers=builder.containers, env=env)
    if code:
        raise watch.failed(code)
    try:
        if engine.names_manifests:
            # The other file has the configuration's digest, by which this engine finds no image.
            return str(json_text.load(told)["containerimage.digest"])
        return written.read_text(encoding="ascii").strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise watch.located(broken("build", "it ended before the image was finished")) from error


_BUILDX = ("docker", "buildx", "build", "--progress", "plain", "--load")


def _podman(options: list[str], token: str) -> list[str]:
    # Podman's own format: for Docker's, podman takes no step from its cache on a base without dates in its
    # history. The base is local by now.
    fixed = ("--layers", "--force-rm", "--pull=never", "--identity-label=false")
    return [*PODMAN, "build", *fixed, "--build-arg", f"BUILD_OF_IMGKIT={token}", *options, "-"]


def _buildx_env(engine: Engine) -> dict[str, str]:
    """Variables that make buildx use the BuildKit of this very engine, whichever builder the user chose.

    Another builder sees no local base. An attestation would turn the image into a list of two.
    """
    place = engine.endpoint
    env = {**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_BUILDER": place.context or "default"}
    if not place.context:
        env["DOCKER_HOST"] = place.host
        env.pop("DOCKER_CONTEXT", None)
    return env


def _context_chunks(
    context: BuildContext, dockerfile: str, watch: BuildFollower
) -> Generator[bytes, None, None]:
    """The tar of `context` with the text `dockerfile` as ``labels.DOCKERFILE``."""
    with context.open(watch.report) as tar:
        yield from _chunks(labels.with_dockerfile(tar, dockerfile))


def _guarded(
    argv: list[str],
    chunks: Iterator[bytes],
    take: Callable[[str], None],
    *,
    env: Mapping[str, str],
    token: str,
    containers: Path | None,
) -> int:
    """Feed `chunks` to the program `argv`, give its output to `take`, and return its exit code.

    ``build_guard`` ends all of it when this process is interrupted or killed.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with _guard(argv, token, containers, env) as guard:
        for data in pumped(guard, chunks):
            take(decoder.decode(data))
        return guard.wait()


@contextlib.contextmanager
def _guard(
    argv: list[str], token: str, containers: Path | None, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    source = importlib.resources.files(__package__).joinpath("build_guard.py").read_text(encoding="utf-8")
    ended, alive = os.pipe()
    with (
        os.fdopen(alive, "wb", buffering=0) as life,
        os.fdopen(ended, "rb", buffering=0),
        # A session of its own: Ctrl-C at the terminal reaches imgkit only, which then closes the pipe.
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", source, str(ended), token, str(containers or ""), "--", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=dict(env),
            pass_fds=(ended,),
            start_new_session=True,
        ) as guard,
    ):
        try:
            yield guard
        finally:
            life.close()
            for stream in (guard.stdin, guard.stdout):
                if stream is not None:
                    stream.close()
            guard.wait()


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
