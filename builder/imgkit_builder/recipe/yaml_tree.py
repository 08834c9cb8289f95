"""Read YAML as a tree in which every key and every value has its file, line and column.

Only PyYAML's composer is used, never its constructor. A YAML tag can therefore never create an object, so a
recipe cannot run code. Scalars also keep their text, whereas the constructor would turn ``24.10`` into the
number 24.1.

PyYAML has compiled parts, so it is imported inside functions. ``imgkit sif`` and ``imgkit verify`` load this
module, and they must run from one environment on nodes of several architectures.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from imgkit_builder.recipe.problems import ANY, Collector, KeyPath, Position, error_reason
from imgkit_entrypoints import files
from imgkit_entrypoints.rules import Fault

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 1 << 20
MAX_NODES = 10_000
"""The largest number of values in a file. Each use of an alias counts, because nine lines of nested aliases
can expand to billions of values."""

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

# A part of PyYAML's error message -> what the author of the file probably has to do.
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
    """A value with its position. Lists and mappings have child nodes."""

    position: Position

    def children(self) -> Iterable[tuple[str | int, YamlNode]]:
        """Return the keys or indices of a list or mapping with their nodes. A scalar has none."""
        return ()

    def deepest(self, path: KeyPath) -> tuple[YamlNode, KeyPath]:
        """Return the node at `path`, and its path.

        If there is no such node, return its nearest existing ancestor.
        """
        node = self
        for depth, key in enumerate(path):
            children = dict(node.children())
            if key not in children:
                return node, path[:depth]
            node = children[key]
        return node, path

    def position_of(self, path: KeyPath) -> Position:
        """Return the position of the node at `path`, or of its nearest existing ancestor."""
        node, _ = self.deepest(path)
        return node.position

    def select(self, *pattern: str) -> Iterator[tuple[KeyPath, YamlNode]]:
        """Yield the path and node of each value that matches `pattern`.

        `ANY` in it matches any key or index. The paths begin at this node.
        """
        # The end of the pattern: this node itself matches, with the empty path.
        if not pattern:
            yield (), self
            return
        for key, child in self.children():
            if pattern[0] in (ANY, key):
                for path, node in child.select(*pattern[1:]):
                    yield (key, *path), node

    def select_texts(self, *pattern: str) -> Iterator[tuple[KeyPath, Scalar]]:
        """Yield the path and node of each text that matches `pattern`, as in `select`.

        A value that should be text but is not is skipped. The check of the types reports it.
        """
        for path, node in self.select(*pattern):
            if isinstance(node, Scalar) and node.type == "text":
                yield path, node

    def walk(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, YamlNode]]:
        """Yield every node below this one, with its path. `path` is the path of this node."""
        for key, child in self.children():
            yield (*path, key), child
            yield from child.walk((*path, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar(YamlNode):
    """A single value. `text` is the value as written in the file, without quotes."""

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
    """A mapping, in the order of the file. `keys` has the position of each key."""

    entries: Mapping[str, YamlNode]
    keys: Mapping[str, Position]

    def children(self) -> Iterable[tuple[str, YamlNode]]:
        """Return the values with their keys."""
        return self.entries.items()

    def without(self, *names: str) -> Table:
        """Return a copy of this mapping without the keys `names`."""
        entries = {key: node for key, node in self.entries.items() if key not in names}
        return Table(position=self.position, entries=entries, keys=self.keys)


_NO_ALLOWED_TYPE = 0.5
"""A float, which no key of a recipe accepts. pydantic therefore refuses it, and the message can quote the
text that the author wrote."""


def to_data(node: YamlNode) -> Any:
    """Convert `node` to plain data for pydantic: dicts, lists, texts, integers, booleans and None.

    Any other scalar, such as a date or ``0644``, becomes `_NO_ALLOWED_TYPE`, which pydantic refuses.
    """
    if isinstance(node, Table):
        return {key: to_data(child) for key, child in node.children()}
    if isinstance(node, Items):
        return [to_data(item) for item in node.items]
    # This cannot happen. Without this check, a new subclass of YamlNode would be taken for a scalar.
    if not isinstance(node, Scalar):
        raise TypeError(f"no data of {type(node)}")
    if node.type == "text":
        return node.text
    if node.type == "nothing":
        return None
    if node.type == "boolean":
        return node.text.lower() in ("true", "yes", "on")
    # Accept plain decimal digits only. YAML also reads 0644 as 420, 1_000 as 1000 and 3:00:00 as 10800, which
    # the author probably did not mean. At most 18 digits, so that every number fits into 64 bits.
    if node.type == "integer" and re.fullmatch(r"-?(?:0|[1-9][0-9]{0,17})", node.text):
        return int(node.text)
    return _NO_ALLOWED_TYPE


def describe_kind(node: YamlNode) -> str:
    """Return the kind of `node` for a message: ``an integer``, ``a date`` or ``a list``, for example."""
    if isinstance(node, Scalar):
        return _describe_type(node.type)
    if isinstance(node, Items):
        return "a list"
    return "a mapping"


def _describe_type(scalar_type: ScalarType) -> str:
    texts = {"text": "text", "nothing": "empty", "integer": "an integer"}
    return texts.get(scalar_type, f"a {scalar_type}")


class _TooManyError(Exception):
    """The file has more values than `MAX_NODES` after its aliases are expanded."""


def read_yaml(file: Path, problems: Collector) -> Table | None:
    """Read the YAML file `file`, and return the mapping at its top level.

    If the file cannot be used, report the reason to `problems`, and return None. `problems` also receives the
    lines of the file, so that messages can quote them.
    """
    # A problem that concerns the whole file is reported at its first line.
    start = Position(file=file, line=1, column=1)
    text = _read_text(file, start, problems)
    if text is None:
        return None
    # Split at the line breaks of YAML only. `str.splitlines` also splits at other characters, so the line
    # numbers would differ from those of PyYAML.
    problems.lines[file] = re.split("\r\n|[\n\r\x85\u2028\u2029]", text)
    tree = _parse(text, start, problems)
    if tree is None or isinstance(tree, Table):
        return tree
    message = f"a recipe is a mapping, not {describe_kind(tree)}"
    problems.error(tree.position, (), message, "write `key: value` lines")
    return None


def _parse(text: str, start: Position, problems: Collector) -> YamlNode | None:
    """Parse the text of a YAML file. If it is empty or not valid, report the reason and return None.

    `start` is the first position in the file, for a problem that concerns the whole file.
    """
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            problems.error(start, (), "the recipe is empty", "it needs at least `image: {base: NAME:TAG}`")
            return None
        # `compose` creates nodes, not objects, so a tag in the file cannot run code.
        return _Converter(start.file, problems).convert(root, (), frozenset())
    except yaml.MarkedYAMLError as error:
        _report_syntax(error, start.file, problems)
    except yaml.reader.ReaderError as error:
        position = _end_position(start.file, text[: error.position])
        _report_character(error.character, position, problems)
    except _TooManyError:
        message = f"more than {MAX_NODES} values after its anchors are expanded"
        problems.error(start, (), message, "recipes are small")
    except RecursionError:
        problems.error(start, (), "nested too deeply", "recipes need five levels at most")
    return None


def _report_character(character: str | int, position: Position, problems: Collector) -> None:
    """Report a character that YAML does not allow. PyYAML gives the character or its code point."""
    code_point = ord(character) if isinstance(character, str) else character
    problems.error(position, (), f"the character U+{code_point:04X} is not allowed in YAML", "delete it")


def _end_position(file: Path, text: str) -> Position:
    """Return the position in `file` directly after `text`, which is the beginning of its content."""
    return Position(file=file, line=text.count("\n") + 1, column=len(text) - text.rfind("\n"))


def _read_text(file: Path, start: Position, problems: Collector) -> str | None:
    """Return the text of `file`. If it cannot be read, report the reason and return None.

    Parameters
    ----------
    start : the first position in the file, for a problem that concerns the whole file.
    problems : receives the problem, and the digest of the file.
    """
    try:
        content = files.read_bytes(file, most_bytes=MAX_BYTES)
    except (OSError, ValueError) as error:
        problems.error(start, (), f"cannot be read: {error_reason(error)}")
        return None
    # A loaded recipe records the digest of every file that it was read from.
    problems.digests[file] = hashlib.sha256(content).hexdigest()
    try:
        return content.decode("utf-8-sig")  # some editors on Windows begin a file with a byte order mark
    except UnicodeDecodeError as error:
        position = _end_position(file, content[: error.start].decode("utf-8", "replace"))
        problems.lines[file] = content.decode("utf-8", "replace").split("\n")
        problems.error(
            position, (), f"not UTF-8: byte 0x{content[error.start]:02x}", "save the file as UTF-8"
        )
        return None


def _report_syntax(error: yaml.MarkedYAMLError, file: Path, problems: Collector) -> None:
    """Report a syntax error that PyYAML found.

    The problem has the position in the file. For a common mistake, such as a text that must be quoted, it
    also has a hint.
    """
    message = " ".join(text for text in (error.context, error.problem) if text)
    position = _find_error_position(error, message, file)
    # PyYAML writes a tab in its message as \t.
    if "'\\t'" in message:
        _report_tabs(position, file, problems)
        return
    hint = ""
    for known_text, known_hint in _SYNTAX_HINTS:
        if known_text in message:
            hint = known_hint
            break
    message = message.replace("'<stream end>'", "the end of the file")
    problems.error(position, (), f"not YAML: {message}", hint)


def _find_error_position(error: yaml.MarkedYAMLError, message: str, file: Path) -> Position:
    """Return the position of a syntax error. `message` is the whole message of PyYAML.

    PyYAML gives the position of the problem, the beginning of the construct around it (the context), or both.
    """
    # The message then contains "unexpected end of stream" or "<stream end>".
    is_unclosed = "end" in message and "stream" in message
    if is_unclosed:
        # The beginning of the quote or bracket helps the author more than the end of the file.
        mark = error.context_mark or error.problem_mark
    else:
        mark = error.problem_mark or error.context_mark
    if mark is None:
        return Position(file=file, line=1, column=1)
    return Position(file=file, line=mark.line + 1, column=mark.column + 1)


def _report_tabs(position: Position, file: Path, problems: Collector) -> None:
    """Report the tab at `position`, where PyYAML stops.

    Also report the tabs in the indentation of all later lines.
    """
    message = "a tab: YAML is indented with spaces only"
    hint = "replace it with spaces"
    problems.error(position, (), message, hint)
    # PyYAML stops at the first tab. The others are reported, too, so that the author corrects all at once.
    for line_number, line in enumerate(problems.lines[file], start=1):
        tab = re.match("[ ]*\t", line)
        if tab and line_number > position.line:
            problems.error(Position(file=file, line=line_number, column=tab.end()), (), message, hint)


class _Converter:
    """Converts PyYAML's nodes to `YamlNode`.

    It expands anchors, and reports keys and tags that are not allowed.
    """

    def __init__(self, file: Path, problems: Collector) -> None:
        self._file = file
        self._problems = problems
        self._count = 0

    def convert(self, node: yaml.Node, path: KeyPath, ancestors: frozenset[int]) -> YamlNode | None:
        """Convert PyYAML's `node` to a node of this module, or report a problem and return None.

        An alias (``*NAME``) is replaced by a copy of the value with the anchor ``&NAME``.

        Parameters
        ----------
        path : the key of `node` in the recipe.
        ancestors : the ids of the lists and mappings that contain `node`. They are needed to detect an anchor
            that contains itself.

        Raises
        ------
        _TooManyError : the file has more values than allowed.
        """
        import yaml

        # For an alias, PyYAML returns the node of the anchor again. So one node can be converted many times,
        # and each time counts.
        self._count += 1
        if self._count > MAX_NODES:
            raise _TooManyError
        position = self._position(node)
        if id(node) in ancestors:
            self._problems.error(position, path, "this anchor contains itself", "write out its values")
            return None
        if isinstance(node, yaml.ScalarNode) and node.tag in _TYPES:
            return Scalar(position=position, text=node.value, type=_TYPES[node.tag])
        # Any other tag, such as !!binary or !!set, has no form in a recipe.
        if not isinstance(node, yaml.CollectionNode) or node.tag not in _COLLECTIONS:
            tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            hint = "text that begins with ! must be quoted"
            self._problems.error(position, path, f"the tag {tag} is not allowed", hint)
            return None
        ancestors |= {id(node)}
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, path, ancestors)
        # An item with a problem is reported by `convert`, and left out.
        items = [self.convert(item, (*path, index), ancestors) for index, item in enumerate(node.value)]
        return Items(position=position, items=tuple(item for item in items if item is not None))

    def _convert_mapping(self, node: yaml.MappingNode, path: KeyPath, ancestors: frozenset[int]) -> Table:
        """Convert PyYAML's mapping `node`. Keys and values with a problem are reported and left out.

        `path` is the key of the mapping in the recipe. `ancestors` are the ids of the mapping and of the
        lists and mappings that contain it.
        """
        # `keys` has the position of each key, also if its value has a problem and is not in `entries`.
        entries = {}
        keys: dict[str, Position] = {}
        for key, value in node.value:
            position = self._position(key)
            fault = _find_key_fault(key)
            if fault is not None:
                self._problems.error(position, path, *fault)
                continue
            name = str(key.value)
            if name in keys:
                message = f"stated twice; the first is on line {keys[name].line}"
                self._problems.error(position, (*path, name), message, "keep one of them")
                continue
            keys[name] = position
            child = self.convert(value, (*path, name), ancestors)
            is_empty = isinstance(child, Scalar) and child.type == "nothing" and not child.text
            if is_empty:
                # For `key:` without a value, PyYAML gives the position of the next token, which may be lines
                # later.
                child = Scalar(position=position, text="", type="nothing")
            if child is not None:
                entries[name] = child
        return Table(position=self._position(node), entries=entries, keys=keys)

    def _position(self, node: yaml.Node) -> Position:
        mark = node.start_mark
        return Position(file=self._file, line=mark.line + 1, column=mark.column + 1)


def _find_key_fault(key: yaml.Node) -> Fault | None:
    """Return why `key` cannot be the key of a mapping, or None if it is text.

    For example, YAML reads the unquoted keys ``on`` and ``3.10`` as a boolean and a number.
    """
    import yaml

    if key.tag == _MERGE:
        return "<< is not supported", "write its keys here, or begin the recipe with `extends: NAME`"
    key_type = _TYPES.get(key.tag)
    if not isinstance(key, yaml.ScalarNode) or key_type is None:
        return "a key must be text", "write `key: value`"
    if key_type == "text":
        return None
    # A line such as ": value" has an empty key.
    if not key.value:
        return "a key is missing", ""
    return f"YAML reads the key {key.value} as {_describe_type(key_type)}", f'quote it: "{key.value}"'
