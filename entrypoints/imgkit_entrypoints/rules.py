"""Rules for the values of fields. They are in the metadata of `Annotated` types.

On the host, pydantic applies the rules to what a person has written. `json_text.build_value` applies them to
all JSON. The half of imgkit in the image has only the standard library, so pydantic is not imported here.
That is possible because the schemas of pydantic are plain dictionaries.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

Fault = tuple[str, str]
"""What is wrong with a value, and what to write instead, such as ``("is empty", "remove it")``."""
Check = Callable[[Any], Iterator[Fault]]
"""A function that yields the faults of a value. For a valid value, it yields nothing."""

_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of invisible characters: control, format, surrogate, line and paragraph separator."""
# An absolute path without characters that a shell or a Dockerfile would interpret.
IMAGE_PATH = re.compile(r"/[^\s$\"'\\`*?\[\]]*")
SITE_VARIABLE = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\}|(?P<plain>[A-Za-z_][A-Za-z0-9_]*))")
"""A variable of the site, as ``$NAME`` or ``${NAME}``. Modules on the node set such variables: EBROOTNCCL."""


class Unfit(ValueError):
    """A value breaks a rule. `hint` says what to write instead."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule that values of the annotated type must meet.

    pydantic calls the methods with underscores if it finds the rule in the metadata of a type.
    """

    # The documentation of a type shows the repr of its rules, so it contains no fields.
    check: Check = field(repr=False)
    """Yields what is wrong with a value."""
    core: Mapping[str, Any] | None = field(default=None, repr=False)
    """pydantic's schema for the value before the check. None for the schema of the annotated type."""
    convert: Callable[[Any], Any] = field(default=lambda value: value, repr=False)
    """Returns the final value of the field, given a value that has passed the check."""
    schema: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Keys that are added to the JSON Schema of the type, such as ``minimum``."""

    # With these names, pydantic calls `apply` after it has checked the type ("function-after"), and passes it
    # only the value ("no-info").
    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        inner = handler(source) if self.core is None else dict(self.core)
        validator = {"type": "no-info", "function": self.apply}
        return {"type": "function-after", "function": validator, "schema": inner}

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {**handler(core), **self.schema}

    def apply(self, value: Any) -> Any:
        """Check a value, and return it in its final form.

        Raises
        ------
        Unfit : the value does not pass the check.
        """
        for message, hint in self.check(value):
            raise Unfit(message, hint)
        return self.convert(value)


def printable_text(text: str, *, several_lines: bool = False) -> Iterator[Fault]:
    """Refuse line breaks, control characters and invisible characters. Yield the first fault.

    A value becomes a line of a Dockerfile or a job script, so a line break would begin another command.
    Invisible characters, such as marks for the direction of writing, can make a text look like a different
    one.

    Parameters
    ----------
    several_lines : True to accept line breaks, as in a shell command.
    """
    if text.isprintable():
        return
    allowed = "\t\n" if several_lines else "\t"  # both are control characters
    bad_character = next((character for character in text if _is_invisible(character, allowed)), None)
    if bad_character is None:  # isprintable also refuses spaces such as U+00A0, which are allowed
        return
    if bad_character in "\n\r\x85\u2028\u2029":
        # A single line with a line break at its end is YAML's block "|".
        is_block = "\n" not in text.strip()
        fix = "write >- instead of | or >" if is_block else "write it on one line, commands joined with &&"
        yield "contains a line break", fix
        return
    kind = "control" if unicodedata.category(bad_character) == "Cc" else "invisible"
    yield f"contains the {kind} character U+{ord(bad_character):04X}", "delete it"


def _is_invisible(character: str, allowed: str) -> bool:
    """Return whether a character is invisible, such as a line break, and not one of the `allowed` ones."""
    return unicodedata.category(character) in _INVISIBLE and character not in allowed


def pattern_rule(pattern: str, fault: str, hint: str) -> Rule:
    """Return a rule that the whole text must match `pattern`, a regular expression for ASCII.

    Parameters
    ----------
    fault : what the message says after the text, such as ``is not a variable name``.
    hint : what to write instead.
    """

    def check(text: str) -> Iterator[Fault]:
        if not re.fullmatch(pattern, text, re.ASCII):
            yield f"{text!r} {fault}", hint

    return Rule(check)


def at_least(least: int) -> Rule:
    """Return a rule that an integer must be at least `least`. YAML's booleans are not integers here."""

    def check(value: int) -> Iterator[Fault]:
        if value < least:
            yield f"{value} is too small", f"at least {least}"

    return Rule(check, core={"type": "int", "strict": True}, schema={"minimum": least})


def not_empty(text: str) -> Iterator[Fault]:
    """Refuse a text that is empty or contains only white space."""
    if not text.strip():
        yield "is empty", "remove it"


def single_word(text: str) -> Iterator[Fault]:
    """Accept only a text without white space, such as the name of a program, module or host."""
    if not text or re.search(r"\s", text):
        yield f"{text!r} is not one word", "write it without blanks"


def refuse_substitution(text: str) -> Iterator[Fault]:
    """Refuse a value of a variable that contains a command, such as ``$(nproc)``.

    No shell reads the value. So the variable would contain the text ``$(nproc)`` and not its result. Yield
    what is wrong and what to write instead, or nothing for a value without a command.
    """
    substitution = re.search(r"\$\(\(|\$\(|`[^`]*`", text)
    if substitution:
        form = {"$((": "$((...))", "$(": "$(...)"}.get(substitution.group(), "`...`")
        yield (
            f"{form} is not executed: the variable would hold this text as it is written",
            'write the value, such as "8"; or set the variable where a shell reads it, or in your program',
        )


def site_value(text: str) -> Iterator[Fault]:
    """Refuse a ``$``, except in ``$NAME`` and ``${NAME}``, which are replaced on the node."""
    if "$" in SITE_VARIABLE.sub("", text):
        yield (
            f"{text!r} has a $ that begins no variable",
            "allowed: $NAME and ${NAME}, which the node replaces",
        )


def site_variables(*texts: str) -> tuple[str, ...]:
    """Return the names of the variables in `texts` without duplicates: A and B for ``"$A/lib", "${B}"``."""
    matches = (match for text in texts for match in SITE_VARIABLE.finditer(text))
    return tuple(dict.fromkeys(match["braced"] or match["plain"] for match in matches))


def expand_variables(text: str, env: Mapping[str, str]) -> str:
    """Return `text` with its variables replaced by their values in `env`.

    Raises
    ------
    KeyError : a variable is not set or empty. The argument of the error is its name.
    """
    for name in site_variables(text):
        if not env.get(name):
            raise KeyError(name)
    return SITE_VARIABLE.sub(lambda match: env[match["braced"] or match["plain"]], text)


def bind_mount(text: str) -> Iterator[Fault]:
    """Accept only a mount ``SRC[:DEST[:ro]]``. Its folders may begin with a variable of the site."""
    # A variable contains an absolute path, for which "/x" stands.
    parts = SITE_VARIABLE.sub("/x", text).split(":")
    if len(parts) > 3 or not all(part.startswith("/") for part in parts[:2]) or "," in text:
        yield f"{text!r} is not a bind", "write /SRC, /SRC:/DEST or /SRC:/DEST:ro"
    elif len(parts) == 3 and parts[2] not in ("ro", "rw"):
        yield f"{parts[2]!r} is not a bind option", "allowed: ro, rw"


def host_folder(text: str) -> Iterator[Fault]:
    """Accept only an absolute path on the nodes. It may begin with a variable of the site.

    Colons and commas are refused, because they separate folders in a bind and in LD_LIBRARY_PATH.
    """
    if not IMAGE_PATH.fullmatch(SITE_VARIABLE.sub("/x", text)) or re.search("[:,]", text):
        hint = "write an absolute path without blanks, quotes and : , or begin it with $NAME of a module"
        yield f"{text!r} is not a folder on the nodes", hint


def srun_option(text: str) -> Iterator[Fault]:
    """Refuse an option of srun that changes the nodes or tasks, or what happens when a task fails."""
    if re.match(r"--(?:nodes|ntasks|ntasks-per-node|kill-on-bad-exit|wait|no-kill)\b|-[nNKkW]", text):
        yield f"imgkit decides {text.partition('=')[0]} itself", "remove it; --nodes of a job sets its nodes"


LINE = Rule(printable_text, core={"type": "str"})
"""The first rule of every text. It does not accept null: an optional text that is not set is left out."""
# Types of fields. Each type has its own rule, and the rules of the type from which it is made.
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
EnvValue = Annotated[Line, Rule(refuse_substitution)]
SiteValue = Annotated[EnvValue, Rule(site_value)]
# "HH:MM", "HH:MM:SS" or "D-HH:MM:SS"
_TIME = r"(?:(?:\d+-)?\d{1,3}:\d{2}(?::\d{2})?)?"
Walltime = Annotated[Line, pattern_rule(_TIME, "is not a duration", 'write "HH:MM:SS"')]
"""A duration in the format of schedulers, such as ``12:00:00``. An empty text means "not set"."""
