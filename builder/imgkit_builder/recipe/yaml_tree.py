"""Reads YAML as a tree in which every key and every value has its file, line and column.

Only PyYAML's composer runs, never its constructor. No object is built from a tag, so a recipe cannot run
code, and a scalar keeps its text: a constructor would turn ``24.10`` into the number 24.1.

PyYAML has compiled parts, so functions import it: ``imgkit sif`` and ``verify`` load this module and must run
from one environment on nodes of several architectures.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from imgkit_builder.recipe.problems import ANY, Collector, KeyPath, Position, reason
from imgkit_entrypoints import files

if TYPE_CHECKING:
    import yaml

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
class YamlNode:
    """A value with its position; a list or mapping has others below it."""

    position: Position

    def children(self) -> Iterable[tuple[str | int, YamlNode]]:
        """Return the parts of a list or mapping with their keys; a scalar has none."""
        return ()

    def deepest(self, path: KeyPath) -> tuple[YamlNode, KeyPath]:
        """Return the node at `path`, or the last existing one above it, and the path of that node."""
        node = self
        for depth, part in enumerate(path):
            below = dict(node.children()).get(part)
            if below is None:
                return node, path[:depth]
            node = below
        return node, path

    def select(self, *pattern: str) -> Iterator[tuple[KeyPath, YamlNode]]:
        """Yield each node whose path fits `pattern`, in which `ANY` stands for any key or index."""
        if not pattern:
            yield (), self
        for part, child in self.children() if pattern else ():
            if pattern[0] in (ANY, part):
                for path, node in child.select(*pattern[1:]):
                    yield (part, *path), node

    def walk(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, YamlNode]]:
        """Yield every node below this one with its path."""
        for part, child in self.children():
            yield (*path, part), child
            yield from child.walk((*path, part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar(YamlNode):
    """One value; `text` is as written, without quotes."""

    text: str
    type: ScalarType = "text"
    """The type that YAML infers for an unquoted scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items(YamlNode):
    """A list."""

    items: tuple[YamlNode, ...]

    def children(self) -> Iterable[tuple[int, YamlNode]]:
        """Return the items with their indices."""
        return enumerate(self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(YamlNode):
    """A mapping, in the order of the file."""

    entries: Mapping[str, YamlNode]
    keys: Mapping[str, Position]

    def children(self) -> Iterable[tuple[str, YamlNode]]:
        """Return the values with their keys."""
        return self.entries.items()

    def without(self, *names: str) -> Table:
        """Return this mapping without some keys."""
        entries = {key: node for key, node in self.entries.items() if key not in names}
        return Table(position=self.position, entries=entries, keys=self.keys)


def plain(node: YamlNode) -> Any:
    """Return the data of `node`; a value that YAML reads as something else than its text becomes a float.

    No key of a recipe takes a float, so its type is refused, and the message can quote the text.
    """
    if not isinstance(node, Scalar):
        values = {key: plain(child) for key, child in node.children()}
        return values if isinstance(node, Table) else list(values.values())
    if node.type == "integer":
        # YAML also reads 0644 (octal, 420), 1_000 and 3:00:00 (sexagesimal, 10800) as integers.
        return int(node.text) if re.fullmatch(r"-?(?:0|[1-9][0-9]{0,17})", node.text) else 0.5
    if node.type == "boolean":
        return node.text.lower() in ("true", "yes", "on")
    return {"text": node.text, "nothing": None}.get(node.type, 0.5)


def kind(node: YamlNode) -> str:
    """Return the kind of `node`, for messages."""
    if isinstance(node, Scalar):
        article = {"text": "text", "nothing": "empty", "integer": "an integer"}
        return article.get(node.type, f"a {node.type}")
    return "a list" if isinstance(node, Items) else "a mapping"


class _TooManyError(Exception):
    """The expanded tree exceeds its limit."""


def parse(file: Path, problems: Collector) -> Table | None:
    """Read `file`; report what is wrong to `problems`, and return None if the file is unusable."""
    import yaml

    # What has no line of its own is reported at the beginning of the file.
    start = Position(file=file, line=1, column=1)
    text = _read(file, start, problems)
    if text is None:
        return None
    # YAML's own line breaks: str.splitlines splits at further characters, which would shift the numbers.
    problems.lines[file] = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            problems.error(start, (), "the recipe is empty", "it needs at least `image: {base: NAME:TAG}`")
            return None
        tree = _Converter(file, problems).convert(root, ())
    except yaml.MarkedYAMLError as error:
        _report_syntax(error, file, problems)
        return None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        column = error.position - before.rfind("\n")
        position = Position(file=file, line=before.count("\n") + 1, column=column)
        # PyYAML names a number or a character.
        code = error.character if isinstance(error.character, int) else ord(error.character)
        problems.error(position, (), f"the character U+{code:04X} is not allowed in YAML", "delete it")
        return None
    except _TooManyError:
        message = f"more than {MAX_NODES} values after its anchors are expanded"
        problems.error(start, (), message, "recipes are small")
        return None
    except RecursionError:
        problems.error(start, (), "nested too deeply", "recipes need five levels at most")
        return None
    if tree is None or isinstance(tree, Table):
        return tree
    problems.error(tree.position, (), f"a recipe is a mapping, not {kind(tree)}", "write `key: value` lines")
    return None


def _read(file: Path, start: Position, problems: Collector) -> str | None:
    try:
        data = files.read_bytes(file, most_bytes=MAX_BYTES)
        problems.digests[file] = hashlib.sha256(data).hexdigest()
    except (OSError, ValueError) as error:
        problems.error(start, (), f"cannot be read: {reason(error)}")
        return None
    try:
        return data.decode("utf-8-sig")  # editors of Windows write a mark at the beginning
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        position = Position(file=file, line=before.count("\n") + 1, column=len(before) - before.rfind("\n"))
        problems.lines[file] = data.decode("utf-8", "replace").split("\n")
        problems.error(position, (), f"not UTF-8: byte 0x{data[error.start]:02x}", "save the file as UTF-8")
        return None


def _report_syntax(error: yaml.MarkedYAMLError, file: Path, problems: Collector) -> None:
    message = " ".join(part for part in (error.context, error.problem) if part)
    # If the end of a construct is missing, the error points to its beginning.
    marks = [error.problem_mark, error.context_mark]
    if "end" in message and "stream" in message:
        marks.reverse()
    mark = next(filter(None, marks), None)
    position = Position(file=file, line=mark.line + 1 if mark else 1, column=mark.column + 1 if mark else 1)
    if "'\\t'" in message:
        _report_tabs(position, file, problems)
        return
    hint = next((hint for sign, hint in _SYNTAX_HINTS if sign in message), "")
    message = message.replace("'<stream end>'", "the end of the file")
    problems.error(position, (), f"not YAML: {message}", hint)


def _report_tabs(position: Position, file: Path, problems: Collector) -> None:
    """Report the tab at which YAML's scanner stops, and those of later lines."""
    message, hint = "a tab: YAML is indented with spaces only", "replace it with spaces"
    problems.error(position, (), message, hint)
    for number, line in enumerate(problems.lines[file], start=1):
        tab = re.match("[ ]*\t", line)
        if tab and number > position.line:
            problems.error(Position(file=file, line=number, column=tab.end()), (), message, hint)


class _Converter:
    """Converts PyYAML's nodes to ours: expands anchors, and checks keys."""

    def __init__(self, file: Path, problems: Collector) -> None:
        self._file, self._problems = file, problems
        self._count = 0
        self._open: set[int] = set()

    def convert(self, node: yaml.Node, path: KeyPath) -> YamlNode | None:
        """Return our node, or None after a problem."""
        import yaml

        # Every use of an alias counts: the node of an anchor is one object, however often it is named.
        self._count += 1
        if self._count > MAX_NODES:
            raise _TooManyError
        position = self._position(node)
        if id(node) in self._open:
            self._problems.error(position, path, "this anchor contains itself", "write out its values")
            return None
        if isinstance(node, yaml.ScalarNode):
            if node.tag in _TYPES:
                return Scalar(position=position, text=node.value, type=_TYPES[node.tag])
        elif node.tag in _COLLECTIONS:
            # An alias is the anchor's own node: met again while it is open, it would contain itself.
            self._open.add(id(node))
            try:
                if isinstance(node, yaml.MappingNode):
                    return self._table(node, position, path)
                below = [self.convert(item, (*path, index)) for index, item in enumerate(node.value)]
                return Items(position=position, items=tuple(item for item in below if item is not None))
            finally:
                self._open.discard(id(node))
        tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
        hint = "text that begins with ! must be quoted"
        self._problems.error(position, path, f"the tag {tag} is not allowed", hint)
        return None

    def _table(self, node: yaml.MappingNode, position: Position, path: KeyPath) -> Table:
        import yaml

        entries: dict[str, YamlNode] = {}
        keys: dict[str, Position] = {}
        for key, value in node.value:
            key_position = self._position(key)
            if key.tag == _MERGE:
                hint = "write its keys here, or begin the recipe with `extends: NAME`"
                self._problems.error(key_position, path, "<< is not supported", hint)
                continue
            if not isinstance(key, yaml.ScalarNode) or _TYPES.get(key.tag) != "text":
                self._report_key(key, key_position, path)
                continue
            below = (*path, str(key.value))
            if key.value in keys:
                message = f"stated twice; the first is on line {keys[key.value].line}"
                self._problems.error(key_position, below, message, "keep one of them")
                continue
            keys[key.value] = key_position
            child = self.convert(value, below)
            if isinstance(child, Scalar) and child.type == "nothing" and not child.text:
                # YAML places a missing value at the next token; report it at its key.
                child = Scalar(position=key_position, text="", type="nothing")
            if child is not None:
                entries[key.value] = child
        return Table(position=position, entries=entries, keys=keys)

    def _report_key(self, key: yaml.Node, position: Position, path: KeyPath) -> None:
        import yaml

        if not isinstance(key, yaml.ScalarNode) or key.tag not in _TYPES:
            self._problems.error(position, path, "a key must be text", "write `key: value`")
        elif not key.value:
            self._problems.error(position, path, "a key is missing")
        else:
            reading = kind(Scalar(position=position, text=key.value, type=_TYPES[key.tag]))
            message = f"YAML reads the key {key.value} as {reading}"
            self._problems.error(position, path, message, f'quote it: "{key.value}"')

    def _position(self, node: yaml.Node) -> Position:
        mark = node.start_mark
        return Position(file=self._file, line=mark.line + 1, column=mark.column + 1)
