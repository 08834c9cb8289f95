"""Build an image: output becomes progress, a log, and an error that names the recipe's line.

The engine's API builds, or a program: ``docker buildx build`` or ``podman build``. The provenance labels
are the last instruction of the Dockerfile.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.resources
import os
import secrets
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imgkit_builder.base import files
from imgkit_builder.base.process import pump_pipes
from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine import containers
from imgkit_builder.engine.builders import CLASSIC, PODMAN, Choice, choose_fallback, local_podman_env
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import connection_lost_error, translate_errors
from imgkit_builder.engine.following import DOCKERFILE, BuildFollower, BuildKitFollower
from imgkit_builder.engine.image_source import add_tag
from imgkit_builder.engine.images import ImageInfo, check_name, find_image, inspect
from imgkit_builder.image.render import docker_quote
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import CONTEXT_LABEL, CREATED_LABEL, time_of_build
from imgkit_entrypoints import json_text, secret_patterns
from imgkit_entrypoints.errors import ImgkitError, ToolFailed

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

# How much a request to the engine's API sends at once.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A finished build."""

    image: ImageInfo
    tag: str
    log: Path
    """The engine's whole output; the Dockerfile is in the same folder."""
    up_to_date: bool
    """Whether the tag named this very image before the build."""


def build(
    engine: Engine,
    context: BuildContext,
    *,
    tag: str,
    report: Reporter,
    builder: Choice = CLASSIC,
    no_cache: bool = False,
    hide: Callable[[str], str] = secret_patterns.mask_secrets,
    accept: Callable[[ImageInfo], None] | None = None,
) -> Built:
    """Build `context`, and name the new image `tag`.

    The tag is set last, after all checks. A build that fails, is interrupted or is not accepted leaves the
    old image under its name.

    Parameters
    ----------
    builder : the builder, by default the classic one.
    no_cache : run all steps, even if the engine has their results.
    hide : replaces secrets by stars in the output and in the Dockerfile that is kept with the log.
    accept : is called with the new image, and may raise an error to refuse it.

    Raises
    ------
    ToolFailed : a step failed (with the recipe's line and the last output), or the engine went away.
    UsageError : the engine cannot read the Dockerfile or find the base.
    """
    check_name(tag)
    old = find_image(engine, tag)
    folder = _make_log_folder(context.manifest.recipe)
    created = time_of_build()
    if not no_cache:
        created = _creation_time(old, context)
    labels = manifests.labels(
        context.manifest, context_sha256=context.sha256, created=created, locked=context.is_locked
    )
    dockerfile = context.dockerfile.rstrip("\n") + "\n" + _label_instruction(labels)
    files.write_file(folder / "Dockerfile", hide(dockerfile))
    log = folder / "build.log"
    if builder.note:
        report.note(builder.note)
    platform = context.manifest.platform
    request = _BuildRequest(
        engine=engine,
        context=context,
        dockerfile=dockerfile,
        log=log,
        report=report,
        hide=hide,
        no_cache=no_cache,
    )
    try:
        ref = request.run(builder)
    except ImgkitError as error:
        fallback = choose_fallback(builder, error)
        if fallback is None:
            raise
        report.note(f"the engine refuses its classic builder, so buildx builds: {error.what}")
        ref = request.run(fallback)
    image = inspect(engine, ref)
    # The classic builder ignores the platform if the base under this name is for another one.
    if image.platform != platform:
        raise ToolFailed(
            f"the engine built {image.platform} instead of {platform}",
            hint=f"the base {context.manifest.base.name} has that architecture; log: {log}",
        )
    if accept:
        accept(image)
    add_tag(engine, ref, tag)
    is_same = old is not None and old.ref == image.ref
    return Built(image=inspect(engine, tag), tag=tag, log=log, up_to_date=is_same)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuildRequest:
    """A build that any of the builders can run."""

    engine: Engine
    context: BuildContext
    dockerfile: str
    log: Path
    report: Reporter
    hide: Callable[[str], str]
    no_cache: bool

    def run(self, builder: Choice) -> str:
        """Build with `builder`, and return the engine's name for the image.

        Raises
        ------
        ToolFailed, UsageError : a step failed, with the recipe's line and the last output.
        """
        make_follower = BuildKitFollower if builder.name == "buildx" else BuildFollower
        with self.log.open("w", encoding="utf-8") as stream:
            follower = make_follower(
                stream,
                self.dockerfile,
                base=self.context.manifest.base.name,
                log_path=self.log,
                report=self.report,
                hide=self.hide,
            )
            self.report.stage("send the context")
            with contextlib.closing(_context_chunks(self.context, self.dockerfile, self.report)) as chunks:
                if builder.name == "classic":
                    return self._run_classic(chunks, follower)
                return self._run_program(chunks, follower, builder)

    def _run_classic(self, chunks: Iterator[bytes], follower: BuildFollower) -> str:
        """Let the classic builder behind the engine's API build, and return the image id.

        Parameters
        ----------
        chunks : the tar of the context.
        follower : receives the engine's output, and explains its errors.

        Notes
        -----
        When the connection closes (Ctrl-C, kill -9), the engine cancels the step and, because of ``forcerm``,
        removes the step's container within a second (docker 20.10). If imgkit is still running, it also
        removes the container, because the engine may not have noticed.
        """
        stream: Any = chunks  # requests sends an iterator in pieces
        try:
            with translate_errors("build"):
                events = self.engine.api.build(
                    fileobj=stream,
                    custom_context=True,
                    dockerfile=DOCKERFILE,
                    decode=True,
                    rm=True,
                    forcerm=True,
                    pull=False,
                    nocache=self.no_cache,
                    platform=self.context.manifest.platform,
                    timeout=None,
                )
                with contextlib.closing(events):
                    for event in events:
                        follower.add_event(event)
            if not follower.image_id:
                # An engine that is stopped may close the stream without an error.
                raise connection_lost_error("build", "it ended before the image was finished")
        except BaseException as error:
            if follower.container:
                # Ignore a second error: the engine itself may have ended.
                with contextlib.suppress(ImgkitError):
                    containers.remove(self.engine, follower.container)
            if isinstance(error, ImgkitError):
                raise follower.add_location(error) from error
            raise
        return follower.image_id

    def _run_program(self, chunks: Iterator[bytes], follower: BuildFollower, builder: Choice) -> str:
        """Build with the program of `builder`, buildx or podman, and return the engine's name for the image.

        The program reads the tar `chunks` from its standard input. ``build_guard`` runs between it and this
        process: if this process is interrupted or killed, the guard ends the step and removes what podman
        leaves.
        """
        id_file = self.log.with_name("image-id")
        metadata = self.log.with_name("build.json")
        token = f"imgkit-{secrets.token_hex(8)}"
        if builder.name == "podman":
            # No --format docker: in that format, podman uses no cache on a base without dates in its history.
            # --pull=never, because the base is local by now.
            argv = [*PODMAN, "build", "--layers", "--force-rm", "--pull=never", "--identity-label=false"]
            argv += ["--build-arg", f"BUILD_OF_IMGKIT={token}"]
            env = local_podman_env()
        else:
            argv = ["docker", "buildx", "build", "--progress", "plain", "--load"]
            argv += ["--metadata-file", str(metadata)]
            env = _buildx_env(self.engine)
        argv += ["--iidfile", str(id_file), "--file", DOCKERFILE]
        argv += ["--platform", self.context.manifest.platform]
        if self.no_cache:
            argv.append("--no-cache")
        argv += [*builder.options, "-"]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with _guard(argv, token, builder.containers, env) as guard:
            for data in pump_pipes(guard, chunks):
                follower.add_text(decoder.decode(data))
            code = guard.wait()
        if code:
            raise follower.exit_error(code)
        try:
            if self.engine.names_manifests:
                # Such an engine knows an image by the digest of its manifest; the id file has another digest.
                return str(json_text.load(metadata)["containerimage.digest"])
            return id_file.read_text(encoding="ascii").strip()
        except (OSError, ValueError, KeyError, TypeError) as error:
            lost = connection_lost_error("build", "it ended before the image was finished")
            raise follower.add_location(lost) from error


def _make_log_folder(name: str) -> Path:
    """Make a folder for the log of this build: in the home folder, or in /tmp if that is read-only."""
    parent = files.state_dir() / "builds"
    with contextlib.suppress(OSError):
        parent.mkdir(parents=True, exist_ok=True)
    if not os.access(parent, os.W_OK | os.X_OK):
        parent = Path(tempfile.gettempdir())
    # The date sorts the folders, and `mkdtemp` adds a random text: several builds may begin in one second.
    prefix = f"{time.strftime('%Y%m%dT%H%M%S')}-{name}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def _creation_time(old: ImageInfo | None, context: BuildContext) -> str:
    """Return the time of creation for the new image's label, in RFC 3339.

    If the image `old` was built from the same context, it is the time of that image. So the label stays the
    same, all steps come from the cache, and the build gives the same image id. If ``SOURCE_DATE_EPOCH`` is
    set, it decides.
    """
    is_fixed = os.environ.get("SOURCE_DATE_EPOCH", "").isdigit()
    # Equal contexts mean an equal base: the context contains the manifest, which has the base's id.
    if old and not is_fixed and old.labels.get(CONTEXT_LABEL) == context.sha256:
        return old.labels.get(CREATED_LABEL) or time_of_build()
    return time_of_build()


def _label_instruction(labels: Mapping[str, str]) -> str:
    """Return one LABEL instruction for all labels.

    The SDK's argument ``labels=`` would make a step of each label, 65 ms each if one has changed (docker
    20.10).
    """
    pairs = [f"{_quote_label(key)}={_quote_label(value)}" for key, value in labels.items()]
    return f"LABEL {' '.join(pairs)}\n"


def _quote_label(text: str) -> str:
    return docker_quote(" ".join(text.splitlines()))


def _context_chunks(context: BuildContext, dockerfile: str, report: Reporter) -> Generator[bytes, None, None]:
    """Yield the tar of `context`, with one more Dockerfile as its first member, called `DOCKERFILE`.

    Its text is `dockerfile`, which has labels that only a build knows.
    """
    data = dockerfile.encode()
    member = tarfile.TarInfo(DOCKERFILE)
    member.size = len(data)
    member.mode = 0o644
    with context.open(report) as tar:
        yield member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
        chunk = tar.read(CHUNK_BYTES)
        while chunk:
            yield chunk
            chunk = tar.read(CHUNK_BYTES)


def _buildx_env(engine: Engine) -> dict[str, str]:
    """Return the variables with which buildx builds on this engine.

    The user may have chosen a builder elsewhere by ``docker buildx use``, which would not see the local base.
    Attestations, descriptions of the build that buildx adds, are switched off: with one, the result would be
    a list of two images.
    """
    endpoint = engine.endpoint
    env = {
        **os.environ,
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
        "BUILDX_BUILDER": endpoint.context or "default",
    }
    if not endpoint.context:
        env["DOCKER_HOST"] = endpoint.host
        env.pop("DOCKER_CONTEXT", None)
    return env


@contextlib.contextmanager
def _guard(
    argv: list[str], token: str, working_containers: Path | None, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `argv` under the program ``build_guard``, and yield the process of that program.

    The guard ends `argv` when the block ends, and also when this process is killed.

    Parameters
    ----------
    token : a text by which the guard knows podman's containers of this build.
    working_containers : the folder of podman's containers; None for buildx, which cleans up itself.
    env : the variables of `argv`.
    """
    source = importlib.resources.files(__package__).joinpath("build_guard.py").read_text(encoding="utf-8")
    # The guard waits for the end of this pipe. The kernel closes it if this process is killed.
    read_end, write_end = os.pipe()
    guarded = [str(read_end), token, str(working_containers or ""), "--", *argv]
    with (
        os.fdopen(write_end, "wb", buffering=0) as life,
        os.fdopen(read_end, "rb", buffering=0),
        # In a session of its own, so that Ctrl-C reaches imgkit alone, which then closes the pipe.
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", source, *guarded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=dict(env),
            pass_fds=(read_end,),
            start_new_session=True,
        ) as guard,
    ):
        try:
            yield guard
        finally:
            # Closed before the others: the guard then ends the program, which may be waiting for them.
            life.close()
            for stream in (guard.stdin, guard.stdout):
                if stream is not None:
                    stream.close()
            guard.wait()
