"""Recognise a build that would change nothing, without reading the recipe, and without the docker SDK.

A build that ends well leaves a note in the cache folder. It says what the build depended on, and what it
answered. The next build with the same words compares all of that in milliseconds, and gives the same answer:
imgkit's own files, the recipe's files and those that it names, the user's code byte by byte, the git commit,
the base and the image in the engine. Whatever differs, is absent or cannot be read is a miss: the usual way
then decides, and says what is wrong.

Notes
-----
The engine's own cache of layers is not asked: the image that the layers would make is there already. An
engine or a user that removed the base, the image or its log makes a miss.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import imgkit_entrypoints
import imgkit_recipes
from imgkit_builder.base import files
from imgkit_builder.engine import address, connection
from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.connection import ImageState
from imgkit_builder.image import members, smoke
from imgkit_builder.image.context import revision
from imgkit_builder.image.members import Code, Packed
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ImgkitError

if TYPE_CHECKING:
    from imgkit_builder.engine.building import Built
    from imgkit_builder.image.context import BuildContext
    from imgkit_builder.recipe import Recipe

SCHEMA = 1
MOST_CODE_BYTES = 1 << 28
"""More code takes seconds to read: the usual way shows its progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInputs:
    """What decides about a build besides files: arguments of the command line, a variable, and the engine."""

    recipe: str
    """The user's word for it."""
    tag: str | None
    base: str | None
    platform: str | None
    build_args: tuple[str, ...]
    builder: str
    lock: str
    """``--locked``, ``--no-lock``, or empty."""
    no_test: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a build said."""

    notes: tuple[str, ...]
    """Warnings about the recipe."""
    data: str
    """A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpToDate:
    """A build that would change nothing."""

    tag: str
    answer: Answer
    code: Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """A `members.Code` as JSON has it."""

    source: str
    member: str
    where: str
    ignore: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """What a finished build depended on, and its answer."""

    schema: int
    imgkit: str
    sources: Mapping[str, str]
    """The sha256 of each file that decided on the recipe's values."""
    code: tuple[_Code, ...]
    code_sha256: str
    folder: str
    """The recipe's folder, whose git commit is `revision`."""
    revision: str
    base: str
    base_state: ImageState
    tag: str
    image_id: str
    image_state: ImageState
    log: str
    answer: Answer


def find(asked: BuildInputs) -> UpToDate | None:
    """The answer of the last build of the same, if another one would change nothing; None after any doubt."""
    try:
        place = address.endpoint()
        note: _Note = json_text.read(_Note, json_text.parse(files.read_own(_kept(asked, place))), "note")
        if not isinstance(json_text.parse(note.answer.data), dict):
            return None
        if note.schema != SCHEMA or note.imgkit != _own_state() or not Path(note.log).is_file():
            return None
        if any(_sha256(Path(name)) != stated for name, stated in note.sources.items()):
            return None
        if not asked.no_test and not smoke.passed_before(note.image_id):
            return None
        found = connection.image_state(place, note.base), connection.image_state(place, note.tag)
        if found != (note.base_state, note.image_state):
            return None
        code = members.pack(
            Code(source=Path(one.source), member=one.member, where=one.where, ignore=one.ignore)
            for one in note.code
        )
        if code.size_bytes > MOST_CODE_BYTES or code.sha256() != note.code_sha256:
            return None
        if revision(Path(note.folder)) != note.revision:
            return None
        return UpToDate(tag=note.tag, answer=note.answer, code=code)
    except (OSError, ValueError, ImgkitError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a build that has begun depends on; made before the build asks the engine for its base."""

    asked: BuildInputs
    place: Endpoint
    imgkit: str
    base: str
    base_state: ImageState | None


def watch(asked: BuildInputs, place: Endpoint, *, base: str) -> Watch:
    """Look at what a build that begins now depends on."""
    # A base that gets another image after this has another state when the note is compared.
    state = connection.image_state(place, base)
    return Watch(asked=asked, place=place, imgkit=_own_state(), base=base, base_state=state)


def code_sha256(context: BuildContext) -> str:
    """Digest of the code in `context`, to be taken before it is sent; empty where there is too much."""
    return context.code.sha256() if context.code.size_bytes <= MOST_CODE_BYTES else ""


def remember(
    watched: Watch,
    recipe: Recipe,
    context: BuildContext,
    built: Built,
    *,
    code_sha256: str,
    answer: Answer,
) -> None:
    """Leave a note of a build that has ended well, unless something makes its answer hard to repeat."""
    state = connection.image_state(watched.place, built.tag)
    if not code_sha256 or watched.base_state is None or state is None:
        return
    # The value of a secret is nowhere on disk: nobody can tell whether it has changed. And a base that could
    # not be probed is probed again.
    if recipe.image.secrets or context.manifest.base.probe.skipped:
        return
    note = _Note(
        schema=SCHEMA,
        imgkit=watched.imgkit,
        sources={str(path): digest for path, digest in recipe.sources.items()},
        code=tuple(
            _Code(source=str(one.source), member=one.member, where=one.where, ignore=one.ignore)
            for one in context.code.parts
        ),
        code_sha256=code_sha256,
        folder=str(recipe.file.parent),
        revision=context.manifest.revision,
        base=watched.base,
        base_state=watched.base_state,
        tag=built.tag,
        image_id=built.image.id,
        image_state=state,
        log=str(built.log),
        answer=answer,
    )
    # Somebody else may have moved the name meanwhile, or written into a file while it was read.
    if state.ref == built.image.ref and all(
        _sha256(path) == stated for path, stated in recipe.sources.items()
    ):
        text = json.dumps(dataclasses.asdict(note))
        files.write_cache(_kept(watched.asked, watched.place), f"{text}\n")


def _kept(asked: BuildInputs, place: Endpoint) -> Path:
    decisive = {
        **dataclasses.asdict(asked),
        "engine": place.host,
        "folder": str(Path.cwd()),
        "time": os.environ.get("SOURCE_DATE_EPOCH", ""),
    }
    name = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    return files.cache_dir() / "unchanged" / f"{name}.json"


def _sha256(path: Path) -> str:
    """Digest of a file; empty where there is none."""
    try:
        return hashlib.sha256(files.read_bytes(path)).hexdigest()
    except OSError:
        return ""


def _own_state() -> str:
    """Digest of what renders and packs: imgkit's files by size and times, Python, and what is installed."""
    found = hashlib.sha256(sys.version.encode())
    builder = str(Path(__file__).parents[1])
    for package in (builder, imgkit_entrypoints.__path__[0], imgkit_recipes.__path__[0]):
        for name, status in sorted(_files(package)):
            found.update(f"{name}\0{status}\0".encode("utf-8", "surrogateescape"))
    for folder in map(Path, sys.path):
        # Installing, upgrading or removing a package changes its time.
        if folder.name.endswith("-packages") and folder.is_dir():
            found.update(f"{folder}\0{folder.stat().st_mtime_ns}\0".encode())
    return found.hexdigest()


def _files(folder: str) -> Iterator[tuple[str, str]]:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                yield from _files(entry.path)
        else:
            status = entry.stat()
            yield entry.path, f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
