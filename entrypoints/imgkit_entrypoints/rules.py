"""Rules of values as metadata of `Annotated`: a field states its type and what a value must be.

pydantic applies them on the host, to what a person wrote, and `json_text.build_value` to all JSON. Nothing of
pydantic is imported here: its schemas are plain dictionaries, and the image half starts with the standard
library alone.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

Fault = tuple[str, str]
"""What is wrong with a value, and how to correct it."""
Check = Callable[[Any], Iterator[Fault]]

_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: control, format, surrogates, separators of lines and paragraphs."""
IMAGE_PATH = re.compile(r"/[^\s$\"'\\`*?\[\]]*")
SITE_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\}|(?P<plain>[A-Za-z_][A-Za-z0-9_]*))")
"""``$NAME`` or ``${NAME}``: a variable that a module of the site sets on the node, such as EBROOTNCCL."""


class Unfit(ValueError):
    """A value breaks a rule; `hint` says what to write instead."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """What a value of the annotated type must be."""

    # No field is in the repr, which the documentation of a type shows.
    check: Check = field(repr=False)
    """Yield what is wrong with a value."""
    core: Mapping[str, Any] | None = field(default=None, repr=False)
    """pydantic's schema of the value before the check; None: that of the type."""
    convert: Callable[[Any], Any] = field(default=lambda value: value, repr=False)
    """Make the value from what passed the check."""
    schema: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Keys for the JSON Schema."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        inner = handler(source) if self.core is None else dict(self.core)
        validator = {"type": "no-info", "function": self.apply}
        return {"type": "function-after", "function": validator, "schema": inner}

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {**handler(core), **self.schema}

    def apply(self, value: Any) -> Any:
        """Return the converted value.

        Raises
        ------
        Unfit : it does not pass the check.
        """
        for message, hint in self.check(value):
            raise Unfit(message, hint)
        return self.convert(value)


def printable_text(text: str, *, several_lines: bool = False) -> Iterator[Fault]:
    """Refuse line breaks, control and invisible characters.

    A value is one line of a Dockerfile or a job script; a shell command may have several. Invisible
    characters, such as marks of the direction of writing, make a text look like another one.
    """
    if text.isprintable():
        return
    allowed = "\t\n" if several_lines else "\t"
    unseen = (letter for letter in text if unicodedata.category(letter) in _INVISIBLE)
    bad = next((letter for letter in unseen if letter not in allowed), "")
    if bad and bad in "\n\r\x85\u2028\u2029":
        is_block = text.strip().count("\n") == 0
        yield (
            "contains a line break",
            "write >- instead of | or >" if is_block else "write it on one line, commands joined with &&",
        )
    elif bad:
        kind = "control" if unicodedata.category(bad) == "Cc" else "invisible"
        yield f"contains the {kind} character U+{ord(bad):04X}", "delete it"


def pattern_rule(pattern: str, fault: str, hint: str) -> Rule:
    """Return the rule that a text matches `pattern` as a whole; `fault` follows the text in the message."""

    def check(text: str) -> Iterator[Fault]:
        if not re.fullmatch(pattern, text, re.ASCII):
            yield f"{text!r} {fault}", hint

    return Rule(check)


def at_least(least: int) -> Rule:
    """Return the rule of an integer with a lower bound; YAML's booleans are no integers."""

    def check(value: int) -> Iterator[Fault]:
        if value < least:
            yield f"{value} is too small", f"at least {least}"

    return Rule(check, core={"type": "int", "strict": True}, schema={"minimum": least})


def not_empty(text: str) -> Iterator[Fault]:
    """Refuse a text without a character."""
    if not text.strip():
        yield "is empty", "remove it"


def single_word(text: str) -> Iterator[Fault]:
    """Accept a program, module or host: one word."""
    if not text or re.search(r"\s", text):
        yield f"{text!r} is not one word", "write it without blanks"


def env_value(text: str) -> Iterator[Fault]:
    """Accept the value of a variable, which no shell reads."""
    if substitution := re.search(r"\$\(\(|\$\(|`[^`]*`", text):
        form = {"$((": "$((...))", "$(": "$(...)"}.get(substitution.group(), "`...`")
        yield (
            f"{form} is not executed: the variable would hold this text as it is written",
            'write the value, such as "8"; or set the variable where a shell reads it, or in your program',
        )


def site_value(text: str) -> Iterator[Fault]:
    """Accept ``$NAME`` and ``${NAME}``, which are replaced on the node, and no other ``$``."""
    if "$" in SITE_VARIABLE.sub("", text):
        yield (
            f"{text!r} has a $ that begins no variable",
            "allowed: $NAME and ${NAME}, which the node replaces",
        )


def site_variables(*texts: str) -> tuple[str, ...]:
    """Return the names of the variables in `texts`, each once."""
    matches = (match for text in texts for match in SITE_VARIABLE.finditer(text))
    return tuple(dict.fromkeys(match["braced"] or match["plain"] for match in matches))


def expand_variables(text: str, env: Mapping[str, str]) -> str:
    """Replace the variables in `text` by their values in `env`.

    Raises
    ------
    KeyError : one is not set, or empty; the argument is its name.
    """
    for name in site_variables(text):
        if not env.get(name):
            raise KeyError(name)
    return SITE_VARIABLE.sub(lambda match: env[match["braced"] or match["plain"]], text)


def bind_mount(text: str) -> Iterator[Fault]:
    """Accept ``SRC[:DEST[:ro]]``, whose folders may begin with a variable of the site."""
    parts = SITE_VARIABLE.sub("/x", text).split(":")
    if len(parts) > 3 or not all(part.startswith("/") for part in parts[:2]) or "," in text:
        yield f"{text!r} is not a bind", "write /SRC, /SRC:/DEST or /SRC:/DEST:ro"
    elif len(parts) == 3 and parts[2] not in ("ro", "rw"):
        yield f"{parts[2]!r} is not a bind option", "allowed: ro, rw"


def host_folder(text: str) -> Iterator[Fault]:
    """Accept a folder on the nodes, for a bind and for LD_LIBRARY_PATH, also with variables of the site."""
    if not IMAGE_PATH.fullmatch(SITE_VARIABLE.sub("/x", text)) or re.search("[:,]", text):
        hint = "write an absolute path without blanks, quotes and : , or begin it with $NAME of a module"
        yield f"{text!r} is not a folder on the nodes", hint


def srun_option(text: str) -> Iterator[Fault]:
    """Accept an option of srun that leaves the number of its tasks alone."""
    if re.match(r"--(?:nodes|ntasks|ntasks-per-node|kill-on-bad-exit|wait|no-kill)\b|-[nNKkW]", text):
        yield f"imgkit decides {text.partition('=')[0]} itself", "remove it; --nodes of a job sets its nodes"


LINE = Rule(printable_text, core={"type": "str"})
"""The first rule of a text; also of an optional one, which a person leaves out rather than states as null."""
Line = Annotated[str, LINE]
Text = Annotated[Line, Rule(not_empty)]
Word = Annotated[Line, Rule(single_word)]
VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ENV_NAME = pattern_rule(
    VARIABLE_NAME,
    "is not a variable name",
    "allowed: letters, digits and _, but no digit at the beginning",
)
EnvName = Annotated[Line, ENV_NAME]
EnvValue = Annotated[Line, Rule(env_value)]
SiteValue = Annotated[EnvValue, Rule(site_value)]
_TIME = r"(?:(?:\d+-)?\d{1,3}:\d{2}(?::\d{2})?)?"
Walltime = Annotated[Line, pattern_rule(_TIME, "is not a duration", 'write "HH:MM:SS"')]
"""A duration as schedulers read it; empty is "not set"."""
