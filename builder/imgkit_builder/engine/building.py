"""Build an image, and convert the output to progress, a log, and an error with the recipe's line.

The build runs through the engine's API, or by a program: ``docker buildx build`` or ``podman build``. The
labels with the provenance are the last instruction of the Dockerfile.
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
from imgkit_builder.engine.builders import CLASSIC, PODMAN, ChosenBuilder, choose_fallback, local_podman_env
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import connection_lost_error, translate_errors
from imgkit_builder.engine.following import DOCKERFILE_NAME, BuildFollower, BuildKitFollower
from imgkit_builder.engine.image_source import add_tag
from imgkit_builder.engine.images import ImageInfo, check_name, find_image, inspect
from imgkit_builder.image.render import docker_quote
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import CONTEXT_LABEL, CREATED_LABEL, Manifest, time_of_build
from imgkit_entrypoints import json_text, secret_patterns
from imgkit_entrypoints.errors import ImgkitError, ToolFailed

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

# How many bytes are sent to the engine or the program at once.
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The result of a build."""

    image: ImageInfo
    tag: str
    log: Path
    """The complete output of the engine. The Dockerfile is in the same folder."""
    up_to_date: bool
    """Whether the tag already named this image before the build."""


def build(
    engine: Engine,
    context: BuildContext,
    *,
    tag: str,
    report: Reporter,
    builder: ChosenBuilder = CLASSIC,
    no_cache: bool = False,
    mask: Callable[[str], str] = secret_patterns.mask_secrets,
    accept: Callable[[ImageInfo], None] | None = None,
) -> Built:
    """Build `context`, and give the new image the name `tag`.

    The tag is set last, after all checks. If the build fails, is interrupted or is not accepted, the old
    image keeps the name.

    Parameters
    ----------
    builder : the builder. By default it is the classic one.
    no_cache : whether to run all steps, even if the engine has cached their results.
    mask : a function that replaces secrets by stars, in the output and in the Dockerfile that is kept with
        the log.
    accept : a function that is called with the new image. It may raise an error to refuse the image.

    Raises
    ------
    ToolFailed : a step failed, or the engine was lost. The error for a step has the recipe's line and the
        last output.
    UsageError : the engine cannot parse the Dockerfile or find the base.
    """
    check_name(tag)
    # The image that has the name now. Find it before the build, because the new image takes the name.
    previous_image = find_image(engine, tag)
    folder = _make_log_folder(context.manifest.recipe)
    created = time_of_build()
    if not no_cache:
        created = _choose_creation_time(previous_image, context)
    dockerfile = _render_labelled_dockerfile(context, created)
    files.write_file(folder / "Dockerfile", mask(dockerfile))
    log = folder / "build.log"
    if builder.note:
        report.note(builder.note)
    request = _BuildRequest(
        engine=engine,
        context=context,
        dockerfile=dockerfile,
        log=log,
        report=report,
        mask=mask,
        no_cache=no_cache,
    )
    ref = request.run_with_fallback(builder)
    image = inspect(engine, ref)
    _refuse_other_platform(image, context.manifest, log)
    if accept:
        accept(image)
    add_tag(engine, ref, tag)
    is_same = previous_image is not None and previous_image.ref == image.ref
    return Built(image=inspect(engine, tag), tag=tag, log=log, up_to_date=is_same)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuildRequest:
    """The input of a build, which any of the builders can run."""

    engine: Engine
    context: BuildContext
    dockerfile: str
    log: Path
    report: Reporter
    mask: Callable[[str], str]
    no_cache: bool

    def run_with_fallback(self, builder: ChosenBuilder) -> str:
        """Build with `builder`, or with buildx if the engine no longer has the classic builder.

        Return the engine's name for the image.
        """
        try:
            return self.run(builder)
        except ImgkitError as error:
            fallback = choose_fallback(builder, error)
            if fallback is None:
                raise
            self.report.note(f"the engine refuses its classic builder, so buildx builds: {error.what}")
            return self.run(fallback)

    def run(self, builder: ChosenBuilder) -> str:
        """Build with `builder`, and return the engine's name for the image.

        A follower reads the output of the builder. It writes the log, reports progress, and explains errors.

        Raises
        ------
        ToolFailed, UsageError : a step failed. The error has the recipe's line and the last output.
        """
        follower_class = BuildKitFollower if builder.name == "buildx" else BuildFollower
        # A generator: the context is read later, when the builder asks for it.
        chunks = _read_context_chunks(self.context, self.dockerfile, self.report)
        with self.log.open("w", encoding="utf-8") as log_stream, contextlib.closing(chunks):
            follower = follower_class(
                log_stream,
                self.dockerfile,
                base=self.context.manifest.base.name,
                log_path=self.log,
                report=self.report,
                mask=self.mask,
            )
            self.report.stage("send the context")
            if builder.name == "classic":
                return self._run_classic(chunks, follower)
            return self._run_guarded_program(chunks, follower, builder)

    def _run_classic(self, chunks: Iterator[bytes], follower: BuildFollower) -> str:
        """Build with the classic builder, through the engine's API, and return the image id.

        `chunks` is the tar of the build context. `follower` receives the engine's output, and explains its
        errors.

        Notes
        -----
        If the connection closes (Ctrl-C, kill -9), the engine cancels the step. Because of ``forcerm``, it
        also removes the step's container within a second (docker 20.10). If imgkit is still running, it
        removes the container itself as well, because the engine may not have noticed.
        """
        try:
            self._follow_classic_build(chunks, follower)
            if not follower.image_id:
                # An engine that is being stopped may close the stream without an error.
                raise connection_lost_error("build", "it ended before the image was finished")
        except BaseException as error:
            if follower.container:
                # Ignore an error here, because the engine itself may have ended. The first error is the one
                # to report.
                with contextlib.suppress(ImgkitError):
                    containers.remove(self.engine, follower.container)
            if isinstance(error, ImgkitError):
                raise follower.add_location(error) from error
            raise
        return follower.image_id

    def _follow_classic_build(self, chunks: Iterator[bytes], follower: BuildFollower) -> None:
        """Request a build of the tar `chunks` from the engine, and pass all of its events to `follower`."""
        stream: Any = chunks  # requests sends an iterator in chunks, although the SDK expects a file
        with translate_errors("build"):
            events = self.engine.api.build(
                fileobj=stream,
                custom_context=True,
                dockerfile=DOCKERFILE_NAME,
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

    def _run_guarded_program(
        self, chunks: Iterator[bytes], follower: BuildFollower, builder: ChosenBuilder
    ) -> str:
        """Build with buildx or podman, the program of `builder`, and return the engine's name for the image.

        The program reads the tar `chunks` from its standard input. It is started by ``build_guard``, a
        process between imgkit and the program. If imgkit is interrupted or killed, the guard ends the build
        step, and removes what podman leaves behind.
        """
        id_file = self.log.with_name("image-id")
        metadata = self.log.with_name("build.json")
        token = f"imgkit-{secrets.token_hex(8)}"
        env = local_podman_env() if builder.name == "podman" else _make_buildx_env(self.engine)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        argv = self._make_program_argv(builder, token, id_file, metadata)
        with _run_guarded(argv, token, builder.containers, env) as guard:
            for data in pump_pipes(guard, chunks):
                follower.add_text(decoder.decode(data))
            exit_code = guard.wait()
        if exit_code:
            raise follower.exit_error(exit_code)
        try:
            if self.engine.has_containerd_store:
                # Such an engine identifies an image by the digest of its manifest. The id file contains
                # another digest.
                return str(json_text.load(metadata)["containerimage.digest"])
            return id_file.read_text(encoding="ascii").strip()
        except (OSError, ValueError, KeyError, TypeError) as error:
            lost = connection_lost_error("build", "it ended before the image was finished")
            raise follower.add_location(lost) from error

    def _make_program_argv(
        self, builder: ChosenBuilder, token: str, id_file: Path, metadata: Path
    ) -> list[str]:
        """Return the command that builds with the program of `builder`, from a tar on its standard input.

        `token` is a text that identifies podman's containers of this build. The program writes the id of the
        image to `id_file`, and buildx also writes facts about the image to `metadata`.
        """
        if builder.name == "podman":
            # The format docker is not used, because with it podman uses no cache on a base whose history has
            # no dates. The base is local by now, so it is never pulled.
            argv = [*PODMAN, "build", "--layers", "--force-rm", "--pull=never", "--identity-label=false"]
            argv += ["--build-arg", f"BUILD_OF_IMGKIT={token}"]
        else:
            argv = ["docker", "buildx", "build", "--progress", "plain", "--load"]
            argv += ["--metadata-file", str(metadata)]
        argv += ["--iidfile", str(id_file), "--file", DOCKERFILE_NAME]
        argv += ["--platform", self.context.manifest.platform]
        if self.no_cache:
            argv.append("--no-cache")
        return [*argv, *builder.options, "-"]


def _render_labelled_dockerfile(context: BuildContext, created: str) -> str:
    """Return the Dockerfile of `context` with the labels of this build. One of them is the time `created`."""
    labels = manifests.labels(
        context.manifest, context_sha256=context.sha256, created=created, locked=context.is_locked
    )
    return context.dockerfile.rstrip("\n") + "\n" + _label_instruction(labels)


def _refuse_other_platform(image: ImageInfo, manifest: Manifest, log: Path) -> None:
    """Raise ToolFailed, with the path of the `log`, if `image` is not for the platform in its `manifest`."""
    # If the base with this name is for another platform, the classic builder silently uses that platform.
    if image.platform != manifest.platform:
        raise ToolFailed(
            f"the engine built {image.platform} instead of {manifest.platform}",
            hint=f"the base {manifest.base.name} has that architecture; log: {log}",
        )


def _make_log_folder(name: str) -> Path:
    """Make a folder for the log of this build. It is in the home folder, or in /tmp if that is read-only."""
    parent = files.state_dir() / "builds"
    with contextlib.suppress(OSError):
        parent.mkdir(parents=True, exist_ok=True)
    if not os.access(parent, os.W_OK | os.X_OK):
        parent = Path(tempfile.gettempdir())
    # The date makes the folders sort by time. `mkdtemp` adds a random text, because several builds may begin
    # in the same second.
    prefix = f"{time.strftime('%Y%m%dT%H%M%S')}-{name}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def _choose_creation_time(old: ImageInfo | None, context: BuildContext) -> str:
    """Return the creation time for the label of the new image, in RFC 3339.

    If the image `old` was built from the same context, its creation time is used again. The label then stays
    the same, all steps come from the cache, and the new image has the same id. ``SOURCE_DATE_EPOCH`` has
    priority if it is set.
    """
    is_fixed = os.environ.get("SOURCE_DATE_EPOCH", "").isdigit()
    # Equal contexts have equal bases, because the context contains the manifest, and the manifest contains
    # the id of the base.
    if old and not is_fixed and old.labels.get(CONTEXT_LABEL) == context.sha256:
        return old.labels.get(CREATED_LABEL) or time_of_build()
    return time_of_build()


def _label_instruction(labels: Mapping[str, str]) -> str:
    """Return a single LABEL instruction for all labels.

    With the SDK's argument ``labels=``, each label would be a step of its own. If a label has changed, each
    step takes 65 ms (docker 20.10).
    """
    pairs = [f"{_quote_label(key)}={_quote_label(value)}" for key, value in labels.items()]
    return f"LABEL {' '.join(pairs)}\n"


def _quote_label(text: str) -> str:
    """Return a label's name or value, quoted for LABEL. Line breaks are replaced by blanks."""
    return docker_quote(" ".join(text.splitlines()))


def _read_context_chunks(
    context: BuildContext, dockerfile_text: str, report: Reporter
) -> Generator[bytes, None, None]:
    """Yield the tar of `context` in chunks, with an additional Dockerfile as its first member.

    Its name is `DOCKERFILE_NAME`. It contains labels that are known only during a build.
    """
    content = dockerfile_text.encode()
    member = tarfile.TarInfo(DOCKERFILE_NAME)
    member.size = len(content)
    member.mode = 0o644
    # A tar consists of blocks of 512 bytes, so zeros follow up to the next block.
    padding = bytes(-len(content) % tarfile.BLOCKSIZE)
    with context.open(report) as tar:
        yield member.tobuf(tarfile.USTAR_FORMAT) + content + padding
        yield from iter(lambda: tar.read(CHUNK_BYTES), b"")  # until the end of the tar


def _make_buildx_env(engine: Engine) -> dict[str, str]:
    """Return the environment variables with which buildx builds on this engine.

    The user may have selected another builder with ``docker buildx use``, which would not have the local
    base. So the builder of this engine is set. Attestations (descriptions of the build that buildx adds) are
    switched off, because with them the result would be a list of two images.
    """
    endpoint = engine.endpoint
    env = {
        **os.environ,
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
        "BUILDX_BUILDER": endpoint.context or "default",
    }
    # The builder of a context connects by itself. The builder "default" uses these variables.
    if not endpoint.context:
        env["DOCKER_HOST"] = endpoint.host
        env.pop("DOCKER_CONTEXT", None)
    return env


@contextlib.contextmanager
def _run_guarded(
    argv: list[str], token: str, working_containers: Path | None, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `argv` under the program ``build_guard``, and yield the process of that program.

    The guard ends `argv` when the block ends, and also if this process is killed.

    Parameters
    ----------
    token : a text that identifies podman's containers of this build.
    working_containers : the folder with podman's containers. None for buildx, which cleans up itself.
    env : the environment variables for `argv`.
    """
    source = importlib.resources.files(__package__).joinpath("build_guard.py").read_text(encoding="utf-8")
    # The guard waits until this pipe is closed. If this process is killed, the kernel closes it.
    read_end, write_end = os.pipe()
    guarded = [str(read_end), token, str(working_containers or ""), "--", *argv]
    with (
        os.fdopen(write_end, "wb", buffering=0) as life,
        os.fdopen(read_end, "rb", buffering=0),
        # The guard runs in its own session, so that Ctrl-C reaches only imgkit, which then closes the pipe.
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
            # Close this pipe before the others. The guard then ends the program, which may be waiting for the
            # others.
            life.close()
            for stream in (guard.stdin, guard.stdout):
                if stream is not None:
                    stream.close()
            guard.wait()
