"""What the last layers of an image copied, for users who cannot read the engine's disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from imgkit_builder.archive import tar_read
from imgkit_builder.archive.tar_read import REGULAR
from imgkit_builder.engine import containers
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated
from imgkit_entrypoints.errors import ToolFailed

_COPY = re.compile(r"/bin/sh -c #\(nop\) +(?:COPY|ADD) .* in (/.*?) ?")
_WITHOUT_LAYER = re.compile(
    r"/bin/sh -c #\(nop\) +(?:LABEL|ENV|CMD|ENTRYPOINT|USER|EXPOSE|STOPSIGNAL|HEALTHCHECK|ONBUILD) .*",
    re.DOTALL,
)


def copied(engine: Engine, name: str, layers: int) -> tuple[str, ...] | None:
    """Targets of the last `layers` layers if COPY and ADD made all of them, else None.

    The history does not show which steps made a layer. A step that may have made one (WORKDIR) gives None,
    and so does an engine that cannot tell its history.
    """
    steps: list[dict[str, Any]]
    try:
        with translated(f"read the history of {name}", name=name):
            steps = engine.api.history(name)  # type: ignore[no-untyped-call]  # the stubs forgot it
    except ToolFailed:
        # Podman 4.3 ends with a nil pointer where a step of the base has no date.
        return None
    found: list[str] = []
    for step in steps:
        if len(found) == layers:
            break
        text = str(step.get("CreatedBy") or "")
        if match := _COPY.fullmatch(text):
            found.append(match[1])
        elif not _WITHOUT_LAYER.fullmatch(text):
            return None
    return tuple(found) if len(found) == layers else None


def fetch(
    engine: Engine, name: str, paths: Sequence[str], folder: Path, *, platform: str
) -> tuple[Path | None, ...]:
    """Write a tar of each of `paths` into `folder`, None for a missing path; starts no container."""
    import docker.errors

    found: list[Path | None] = []
    with containers.created(engine, name, ["true"], purpose="read", platform=platform) as container:
        for number, path in enumerate(paths):
            target = folder / f"copy-{number}.tar"
            with translated(f"read {path} in {name}", name=name), engine.patient() as api:
                try:
                    chunks, _ = api.get_archive(container, path)
                except docker.errors.NotFound:
                    found.append(None)
                    continue
                with target.open("wb") as stream:
                    stream.writelines(chunks)
            found.append(target)
    return tuple(found)


def store_files(
    engine: Engine, name: str, path: str, folder: Path, *, wanted: Callable[[str], bool], platform: str
) -> None:
    """Write the files below `path` whose names are `wanted` into the new `folder`, flat; starts no container.

    Raises
    ------
    FileExistsError : two files have one name.
    CheckFailed : the engine's tar is damaged.
    """
    with (
        containers.created(engine, name, ["true"], purpose="read", platform=platform) as container,
        translated(f"read {path} in {name}", name=name),
        engine.patient() as api,
    ):
        chunks, _ = api.get_archive(container, path)
        stream = tar_read.TarStream(iter(chunks), name=f"{path} in {name}")
        for member in stream:
            file = member.name.rpartition("/")[2]
            if member.kind == REGULAR and wanted(file):
                with (folder / file).open("xb") as target:
                    target.writelines(stream.content())
