"""Builds an image: output becomes progress, a log, and an error that names the recipe's line."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine import build_program, containers
from imgkit_builder.engine import labels as marks
from imgkit_builder.engine.builders import Choice, after_refusal
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import broken, translated
from imgkit_builder.engine.following import BuildFollower, BuildKitFollower
from imgkit_builder.engine.images import ImageInfo, check_name, inspect
from imgkit_builder.engine.transfer import add_tag
from imgkit_builder.oci import manifest as manifests
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import ImgkitError, ToolFailed

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext
    from imgkit_builder.recipe import Recipe
    from imgkit_builder.recipe.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A finished build."""

    image: ImageInfo
    tag: str
    log: Path
    """The engine's whole output; the Dockerfile is in the same folder."""


def default_tag(recipe: Recipe | Target) -> str:
    """The default of ``--tag``: ``mn5:latest``."""
    return f"{recipe.name}:latest"


def build(
    engine: Engine,
    context: BuildContext,
    *,
    tag: str,
    report: Reporter,
    builder: Choice | None = None,
    no_cache: bool = False,
    hide: Callable[[str], str] = secret_patterns.masked,
    accept: Callable[[ImageInfo], None] | None = None,
) -> Built:
    """Build `context` with `builder`, by default the classic one, and name the result `tag`.

    `hide` puts stars into a line of output before anything else sees it, and into the kept Dockerfile.

    The tag moves last, after the architecture has been checked and `accept` has returned. A build that
    fails, is interrupted or is not accepted leaves the old image under its name.

    Raises
    ------
    ToolFailed : a step failed (with the recipe's line and the last output), or the engine went away.
    UsageError : the engine cannot read the Dockerfile or find the base.
    """
    check_name(tag)
    folder = _run_folder(context.manifest.recipe)
    created = marks.created(engine, context, tag=tag, fresh=no_cache)
    values = manifests.labels(
        context.manifest,
        context_sha256=context.label_sha256,
        created=created,
        locked=context.source_date_epoch is not None,
    )
    dockerfile = context.dockerfile.rstrip("\n") + "\n" + marks.instruction(values)
    files.put(folder / "Dockerfile", hide(dockerfile))
    log = folder / "build.log"
    builder = builder or Choice(name="classic")
    if builder.note:
        report.note(builder.note)

    def run(choice: Choice) -> str:
        follower = BuildKitFollower if choice.name == "buildx" else BuildFollower
        start = _run if choice.name == "classic" else build_program.run
        with log.open("w", encoding="utf-8") as stream:
            watch = follower(
                stream, dockerfile, base=context.manifest.base.name, log_path=log, report=report, hide=hide
            )
            report.stage("send the context")
            return start(engine, context, dockerfile, watch, builder=choice, no_cache=no_cache)

    try:
        ref = run(builder)
    except ImgkitError as error:
        other = after_refusal(builder, error)
        if other is None:
            raise
        report.note(f"the engine refuses its classic builder, so buildx builds: {error.what}")
        ref = run(other)
    image = inspect(engine, ref)
    if image.platform != context.manifest.platform:
        raise ToolFailed(
            f"the engine built {image.platform} instead of {context.manifest.platform}",
            hint=f"the base {context.manifest.base.name} has that architecture; log: {log}",
        )
    if accept:
        accept(image)
    add_tag(engine, ref, tag)
    return Built(image=inspect(engine, tag), tag=tag, log=log)


def _run(
    engine: Engine,
    context: BuildContext,
    dockerfile: str,
    watch: BuildFollower,
    *,
    builder: Choice,
    no_cache: bool,
) -> str:
    """Let the classic builder behind the engine's API build, and return the image id.

    Notes
    -----
    When the connection closes (Ctrl-C, kill -9), the engine cancels the step and, because of ``forcerm``,
    removes its container within a second (docker 20.10). If imgkit is still running, it removes it as well.
    """
    with _no_container_left(engine, watch), context.open(watch.report) as tar:
        try:
            with translated("build"):
                events = engine.api.build(
                    fileobj=marks.with_dockerfile(tar, dockerfile),
                    custom_context=True,
                    dockerfile=marks.DOCKERFILE,
                    decode=True,
                    rm=True,
                    forcerm=True,
                    pull=False,
                    nocache=no_cache,
                    platform=context.manifest.platform,
                    timeout=None,
                )
                with contextlib.closing(events):
                    for event in events:
                        watch.take(event)
        except ImgkitError as error:
            raise watch.located(error) from error
        if not watch.image_id:
            # A dying engine may close the stream cleanly.
            raise watch.located(broken("build", "it ended before the image was finished"))
    return watch.image_id


@contextlib.contextmanager
def _no_container_left(engine: Engine, watch: BuildFollower) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if watch.container:
            # The engine may be the one that died.
            with contextlib.suppress(ImgkitError):
                containers.remove(engine, watch.container)
        raise


def _run_folder(name: str) -> Path:
    """A new folder for the log of this build, unique even within one second; in tmp if HOME is read-only."""
    parent = files.state_dir() / "builds"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(parent, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        return Path(tempfile.mkdtemp(prefix=f"imgkit-build-{name}-"))
    stamp = time.strftime("%Y%m%dT%H%M%S")
    number = 0
    while True:
        folder = parent / (f"{stamp}-{name}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
