"""Reads YAML as a tree in which every key and every value has its file, line and column.

Only PyYAML's composer runs, never its constructor. No object is built from a tag, so a recipe cannot run
code, and a scalar keeps its text: a constructor would turn ``24.10`` into the number 24.1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from imgkit_builder.recipe.problems import Collector, KeyPath, Position, reason
from imgkit_entrypoints import files

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
"""Limit for one file with its anchors expanded: nine lines of nested aliases can mean billions of values."""

ScalarType = Literal["text", "integer", "number", "boolean", "nothing", "date"]

_TYPES: Mapping[str, ScalarType] = {
    "tag:yaml.org,2002:str": "text",
    "tag:yaml.org,2002:value": "text",  # a plain `=`
    "tag:yaml.org,2002:int": "integer",
    "tag:yaml.org,2002:float": "number",
    "tag:yaml.org,2002:bool": "boolean",
    "tag:yaml.org,2002:null": "nothing",
    "tag:yaml.org,2002:timestamp": "date",
}
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_MERGE = "tag:yaml.org,2002:merge"

_SYNTAX_HINTS = (
    ("cannot start any token", "quote text that begins with this character"),
    ("mapping values are not allowed here", 'quote text that contains ": "'),
    ("could not find expected ':'", "write `key: value`"),
    ("undefined alias", "text that begins with * must be quoted"),
    ("expected alphabetic or numeric character", "text that begins with *, & or ! must be quoted"),
    ("found undefined tag handle", "text that begins with ! must be quoted"),
    ("unexpected end of stream", "a quote or bracket is not closed"),
    ("<stream end>", "a quote or bracket is not closed"),
    ("found another document", "one recipe per file, without a second `---`"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One value; `text` is as written, without quotes."""

    position: Position
    text: str
    type: ScalarType = "text"
    """The type that YAML infers for an unquoted scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list."""

    position: Position
    items: tuple[YamlNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """The position of a key, and its value."""

    key: Position
    value: YamlNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A mapping, in the order of the file."""

    position: Position
    entries: Mapping[str, TableEntry]


YamlNode = Scalar | Items | Table


def children(node: YamlNode) -> tuple[tuple[str | int, YamlNode], ...]:
    """The parts of a list or table with their keys; a scalar has none."""
    if isinstance(node, Items):
        return tuple(enumerate(node.items))
    if isinstance(node, Table):
        return tuple((key, entry.value) for key, entry in node.entries.items())
    return ()


def deepest(root: YamlNode, path: KeyPath) -> tuple[YamlNode, KeyPath]:
    """The node at `path`, or the last existing one above it, and the path of that node."""
    node, reached = root, 0
    for part in path:
        below = dict(children(node)).get(part)
        if below is None:
            break
        node, reached = below, reached + 1
    return node, path[:reached]


def parse(file: Path, found: Collector) -> Table | None:
    """Read `file`; problems go to `found`, and the result is None if the file is unusable."""
    start = Position(file=file, line=1, column=1)
    text = _read(file, start, found)
    if text is None:
        return None
    # YAML's own line breaks: str.splitlines splits at further characters, which would shift the numbers.
    found.lines[file] = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            found.error(start, (), "the recipe is empty", "it needs at least `image: {base: NAME:TAG}`")
            return None
        tree = _Converter(file, found).convert(root, ())
    except yaml.MarkedYAMLError as error:
        _syntax(error, file, found)
        return None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Position(file=file, line=before.count("\n") + 1, column=error.position - before.rfind("\n"))
        found.error(place, (), f"the character U+{ord_of(error):04X} is not allowed in YAML", "delete it")
        return None
    except _TooManyError:
        found.error(
            start, (), f"more than {MAX_NODES} values after its anchors are expanded", "recipes are small"
        )
        return None
    except RecursionError:
        found.error(start, (), "nested too deeply", "recipes need five levels at most")
        return None
    if tree is not None and not isinstance(tree, Table):
        found.error(tree.position, (), f"a recipe is a mapping, not {kind(tree)}", "write `key: value` lines")
        return None
    return tree


def kind(node: YamlNode) -> str:
    """The kind of `node`, for messages."""
    if isinstance(node, Scalar):
        article = {"text": "text", "nothing": "empty", "integer": "an integer"}
        return article.get(node.type, f"a {node.type}")
    return "a list" if isinstance(node, Items) else "a mapping"


def ord_of(error: yaml.reader.ReaderError) -> int:
    """The code point that the reader refused; PyYAML reports a number or a character."""
    return error.character if isinstance(error.character, int) else ord(error.character)


class _TooManyError(Exception):
    """The expanded tree exceeds its limit."""


def _read(file: Path, start: Position, found: Collector) -> str | None:
    try:
        data = files.read_bytes(file, most_bytes=MAX_BYTES)
        found.digests[file] = hashlib.sha256(data).hexdigest()
    except (OSError, ValueError) as error:
        found.error(start, (), f"cannot be read: {reason(error)}")
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line_start = before.rfind(b"\n") + 1
        place = Position(
            file=file,
            line=before.count(b"\n") + 1,
            column=len(before[line_start:].decode("utf-8", "replace")) + 1,
        )
        found.lines[file] = data.decode("utf-8", "replace").split("\n")
        found.error(place, (), f"not UTF-8: byte 0x{data[error.start]:02x}", "save the file as UTF-8")
        return None


def _syntax(error: yaml.MarkedYAMLError, file: Path, found: Collector) -> None:
    what = " ".join(part for part in (error.context, error.problem) if part)
    # If the end of a construct is missing, the error points to its beginning.
    marks = (error.problem_mark, error.context_mark)
    mark = next(
        (mark for mark in (marks[::-1] if "end" in what and "stream" in what else marks) if mark), None
    )
    place = Position(file=file, line=mark.line + 1 if mark else 1, column=mark.column + 1 if mark else 1)
    if "'\\t'" in what:
        _tabs(place, file, found)
        return
    hint = next((hint for sign, hint in _SYNTAX_HINTS if sign in what), "")
    said = what.replace("'<stream end>'", "the end of the file")
    found.error(place, (), f"not YAML: {said}", hint)


def _tabs(place: Position, file: Path, found: Collector) -> None:
    """YAML's scanner stops at the first tab; report the tabs of later lines too."""
    what, hint = "a tab: YAML is indented with spaces only", "replace it with spaces"
    found.error(place, (), what, hint)
    for number, line in enumerate(found.lines[file], start=1):
        tab = re.match("[ ]*\t", line)
        if tab and number > place.line:
            found.error(Position(file=file, line=number, column=tab.end()), (), what, hint)


class _Converter:
    """Converts PyYAML's nodes to ours: expands anchors and merge keys, and checks keys."""

    def __init__(self, file: Path, found: Collector) -> None:
        self._file, self._found = file, found
        self._count = 0
        self._open: set[int] = set()

    def convert(self, node: yaml.Node, path: KeyPath) -> YamlNode | None:
        """Our node, or None after a problem."""
        self._count += 1
        if self._count > MAX_NODES:
            raise _TooManyError
        position = self._position(node)
        if id(node) in self._open:
            self._found.error(position, path, "this anchor contains itself", "write out its values")
            return None
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _TYPES:
                return Scalar(position=position, text=node.value, type=_TYPES[node.tag])
        elif node.tag in _COLLECTIONS:
            self._open.add(id(node))
            try:
                if isinstance(node, yaml.MappingNode):
                    return Table(position=position, entries=self._entries(node, path))
                below = [self.convert(item, (*path, index)) for index, item in enumerate(node.value)]
                return Items(position=position, items=tuple(item for item in below if item is not None))
            finally:
                self._open.discard(id(node))
        tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
        self._found.error(
            position, path, f"the tag {tag} is not allowed", "text that begins with ! must be quoted"
        )
        return None

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, TableEntry]:
        stated: dict[str, TableEntry] = {}
        seen: dict[str, int] = {}
        merged: dict[str, TableEntry] = {}
        for key, value in node.value:
            place = self._position(key)
            if key.tag == _MERGE:
                self._merge(value, path, merged)
                continue
            if not isinstance(key, yaml.ScalarNode) or _TYPES.get(key.tag) != "text":
                self._bad_key(key, place, path)
                continue
            below = (*path, str(key.value))
            if key.value in seen:
                what = f"stated twice; the first is on line {seen[key.value]}"
                self._found.error(place, below, what, "keep one of them")
                continue
            seen[key.value] = place.line
            child = self.convert(value, below)
            if child is not None:
                if child == Scalar(position=child.position, text="", type="nothing"):
                    # YAML places a missing value at the next token; report it at its key.
                    child = Scalar(position=place, text="", type="nothing")
                stated[key.value] = TableEntry(key=place, value=child)
        # Explicit keys override merged ones, wherever the merge key is.
        return {**{key: entry for key, entry in merged.items() if key not in seen}, **stated}

    def _merge(self, value: yaml.Node, path: KeyPath, merged: dict[str, TableEntry]) -> None:
        """Expand a ``<<`` key: one mapping or a list of them, the first with precedence."""
        for source in value.value if isinstance(value, yaml.SequenceNode) else (value,):
            table = self.convert(source, path)
            if isinstance(table, Table):
                for key, entry in table.entries.items():
                    merged.setdefault(key, entry)
            elif table is not None:
                self._found.error(table.position, path, f"<< merges mappings, not {kind(table)}")

    def _bad_key(self, key: yaml.Node, place: Position, path: KeyPath) -> None:
        if isinstance(key, yaml.ScalarNode) and key.tag in _TYPES:
            said = kind(Scalar(position=place, text=key.value, type=_TYPES[key.tag]))
            what = f"YAML reads the key {key.value} as {said}" if key.value else "a key is missing"
            self._found.error(place, path, what, f'quote it: "{key.value}"' if key.value else "")
        else:
            self._found.error(place, path, "a key must be text", "write `key: value`")

    def _position(self, node: yaml.Node) -> Position:
        mark = node.start_mark
        return Position(file=self._file, line=mark.line + 1, column=mark.column + 1)
