"""Known issues of versions and settings, as rows of data.

A row states when an issue appears, what to do then, and who documents it. ``known_issues.json`` contains the
rows that imgkit ships. A condition compares a named fact, such as the version of NCCL, or a variable. Nothing
in a row is executed. This module does not read the machine: nodes evaluate the rows in `fabric.issues`, and
``imgkit check`` evaluates them with the versions in a base image.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import EnvName, EnvValue, Fault, Line, Rule, Text, pattern_rule

SHIPPED_FILE = Path(__file__).with_name("known_issues.json")
SITE_FILE_VARIABLE = "IMGKIT_KNOWN_ISSUES"
"""Variable with the path of a JSON file that contains further rows."""
FACTS: Mapping[str, str] = {
    "arch": "architecture",
    "aws_ofi_nccl": "aws-ofi-nccl version",
    "cuda": "CUDA version",
    "cuda_compat": "use of CUDA's forward compatibility",
    "cuda_driver": "first driver for this CUDA",
    "driver": "driver version",
    "fabric": "fabric",
    "gpu": "GPU model",
    "gpus": "number of GPUs",
    "image_nccl": "NCCL version of the image",
    "kernel": "Linux version",
    "libcudart": "presence of libcudart.so",
    "libfabric": "libfabric version",
    "nccl": "NCCL version",
    "nccl_of": "owner of the NCCL that torch loads",
    "nodes": "number of nodes",
    "numa_calls": "use of NUMA calls",
    "plugin_opens": "library that NCCL's plug-in opens",
    "tasks": "tasks per node",
    "torch": "torch version",
    "ucx": "UCX version",
}
"""The facts that a condition may contain, each with its name in messages."""

# Examples are "nccl < 2.29.3", "$NCCL_PROTO is set", "driver < {cuda_driver}"
_CONDITION = re.compile(r"(\$?[A-Za-z_][A-Za-z0-9_]*) (<|>=|==|!=|in|contains|matches|allows|is) (\S.*)")
_VERSION = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})*")
_HINT = "for example: nccl < 2.29.3, arch in aarch64, x86_64, or $NCCL_PROTO is set"
_VARIABLE_STATES, _FACT_STATES = ("set", "unset", "requested"), ("unknown",)
"""The states of a variable, and of a fact, that the operator ``is`` can test."""


class Comparison(NamedTuple):
    """One comparison of a condition, such as ``driver < {cuda_driver}``."""

    name: str
    """The name of a fact, or ``$VARIABLE``."""
    operator: str
    operand: str
    """A value, or ``{fact}`` to compare with the value of another fact."""

    @property
    def is_of_variable(self) -> bool:
        """Return whether the left side of the comparison is a variable, and not a fact."""
        return self.name.startswith("$")

    @property
    def operand_fact(self) -> str | None:
        """Return the name of the fact in the operand, or None if the operand is a value."""
        return self.operand.strip("{}") if self.operand.startswith("{") else None

    @property
    def value_names(self) -> list[str]:
        """Return the names of the facts and variables whose values the comparison needs.

        There are two for ``driver < {cuda_driver}``: driver and cuda_driver.
        """
        return [self.name] if self.operand_fact is None else [self.name, self.operand_fact]


@functools.cache  # each condition is parsed twice: when its row is read, and when it is evaluated
def parse_condition(condition: str) -> tuple[Comparison, ...]:
    """Return the comparisons of a condition, which are separated by ``or``.

    For example, ``arch is unknown or nccl < 2.29`` has two comparisons.

    Raises
    ------
    ValueError : the text is not a condition, or contains a fact that does not exist.
    """
    comparisons = []
    for comparison_text in condition.split(" or "):
        match = _CONDITION.fullmatch(comparison_text.strip())
        if match is None:
            raise ValueError(f"{comparison_text.strip()!r} is not a condition")
        comparison = Comparison(*match.groups())
        for name in comparison.value_names:
            if not name.startswith("$") and name not in FACTS:
                raise ValueError(f"{name!r} is not a fact; known are {', '.join(FACTS)}")
        _check_operand(comparison)
        comparisons.append(comparison)
    return tuple(comparisons)


def _check_operand(comparison: Comparison) -> None:
    """Raise ValueError if the operator of a comparison does not accept its operand, as in ``nccl < new``."""
    operand = comparison.operand
    # A variable can be "set", "unset" or "requested". A fact can only be "unknown".
    states = _VARIABLE_STATES if comparison.is_of_variable else _FACT_STATES
    if comparison.operator == "is" and operand not in states:
        raise ValueError(f"{operand!r} is none of {', '.join(states)}")
    if comparison.operator == "matches":
        _check_pattern(operand)
    # The value of another fact is only known on a node.
    is_value = comparison.operand_fact is None
    if comparison.operator in ("<", ">=") and is_value and not _VERSION.match(operand):
        raise ValueError(f"{operand!r} is not a version")


def _check_pattern(pattern: str) -> None:
    """Raise ValueError if `pattern` is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


def _check_condition(text: str) -> Iterator[Fault]:
    """Yield the fault of a condition, or nothing if it is valid. This is a check for a `Rule`."""
    try:
        parse_condition(text)
    except ValueError as error:
        yield str(error), _HINT


Condition = Annotated[Line, Rule(_check_condition)]
IssueId = Annotated[Line, pattern_rule(r"[a-z0-9][a-z0-9.-]*", "is not an id", "allowed: a-z, 0-9, - and .")]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """One fault of a version or a setting: when it appears, and what to do then."""

    id: IssueId
    """Short name; a row of a site replaces the shipped one with the same id."""
    message: Text
    """What happens, in one sentence."""
    when: tuple[Condition, ...] = ()
    """Conditions that must all hold, such as ``nccl < 2.29.3``; ``or`` joins alternatives."""
    effect: Literal["set", "warn", "refuse", "ignore"] = "warn"
    """``set`` gives workers `env`, ``refuse`` ends a start with GPUs, ``ignore`` takes a shipped row away."""
    env: Mapping[EnvName, EnvValue] = field(default_factory=dict)
    """Variables that ``set`` sets unless the user does."""
    hint: Line = ""
    """What the user can do."""
    source: Line = ""
    """Who documents it."""
    date: Line = ""
    """Day on which somebody read the source, ``YYYY-MM-DD``."""

    def faults(self) -> Iterator[tuple[str, Fault]]:
        """Yield the faults of values that do not fit each other, each with the key that has to change."""
        if not self.when and self.effect != "ignore":
            yield "when", ("has no condition, so the row would always match", _HINT)
        if (self.effect == "set") != bool(self.env):
            yield "env", ("belongs to the effect set, which needs it", "effect: set, and env: {NAME: value}")


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a fact or a variable.

    The text is empty if the fact is unknown or the variable is not set.
    """

    text: str
    evidence: str = ""
    """The value and its source, for messages."""
    is_requested: bool | None = False
    """True for a variable that the user, an nccl.conf file or the recipe sets, and not only the image.

    None means that the source is unknown.
    """
    is_known: bool = True
    """False for a variable whose value is only known on a node."""


@dataclass(frozen=True, slots=True)
class IssueResult:
    """The result of comparing an issue with a machine."""

    issue: KnownIssue
    state: Literal["match", "no match", "unknown"]
    reason: str
    """The values that match, the condition that is not met, or the facts that are unknown."""

    @property
    def message(self) -> str:
        """Return the message of the issue, followed by the evidence, the id and the source in parentheses."""
        parts = (self.reason, f"known issue {self.issue.id}", self.issue.source)
        return f"{self.issue.message} ({'; '.join(filter(None, parts))})"


Lookup = Callable[[str], Value]
"""A function that returns the value of a fact, such as ``nccl``, or of a ``$VARIABLE``."""


def evaluate_issue(issue: KnownIssue, lookup: Lookup) -> IssueResult:
    """Compare the conditions of an issue with the values of a machine, which `lookup` returns.

    The issue matches if all conditions are met. It does not match if any condition is not met, even if other
    conditions are unknown because a fact is missing. Otherwise, the result is "unknown".
    """
    # These dicts are ordered sets: each text appears once in the message.
    evidence: dict[str, None] = {}
    unknown_names: dict[str, None] = {}
    for condition in issue.when:
        alternatives = parse_condition(condition)  # they are joined by "or", so a single true one is enough
        states = [_evaluate_comparison(comparison, lookup) for comparison in alternatives]
        if True in states:
            met_comparison = alternatives[states.index(True)]
            evidence.update(dict.fromkeys(lookup(name).evidence for name in met_comparison.value_names))
        elif None in states:
            # One alternative is enough for the message, because the others would not matter if it were true.
            unknown_comparison = alternatives[states.index(None)]
            unknown_names.update(dict.fromkeys(_list_unknown_names(unknown_comparison, lookup)))
        else:  # all alternatives are false, so the result is certain
            unmet_values = dict.fromkeys(lookup(comparison.name).evidence for comparison in alternatives)
            return IssueResult(issue, "no match", f"needs {condition} ({', '.join(unmet_values)})")
    if unknown_names:
        return IssueResult(issue, "unknown", f"unknown: {', '.join(unknown_names)}")
    return IssueResult(issue, "match", ", ".join(filter(None, evidence)))


def _list_unknown_names(comparison: Comparison, lookup: Lookup) -> list[str]:
    """Return the names of the unknown facts in a comparison, as messages show them.

    For ``driver < {cuda_driver}`` with a known driver, only ``first driver for this CUDA`` is returned.
    """
    names = comparison.value_names
    unknown_names = [name for name in names if not _parse_version(lookup(name).text)] or names
    return [FACTS.get(name, name) for name in unknown_names]


def _evaluate_comparison(comparison: Comparison, lookup: Lookup) -> bool | None:
    """Return whether a comparison, such as ``nccl < 2.29.3``, is true. Return None if a value is unknown.

    The text of a fact is empty if the fact is unknown. The text of a variable is empty if it is not set. Such
    a text can be compared like any other.

    Parameters
    ----------
    lookup : returns the value of a fact, such as ``nccl``, or of a variable, such as ``$NCCL_ALGO``.
    """
    left = lookup(comparison.name)
    if not left.is_known:  # a variable that is only known on a node
        return None
    if comparison.operator == "is":
        return _has_state(left, comparison.operand)
    right_text = comparison.operand
    if comparison.operand_fact is not None:  # as in "driver < {cuda_driver}"
        right_text = lookup(comparison.operand_fact).text
    is_left_unknown = not left.text and not comparison.is_of_variable
    if is_left_unknown or not right_text:
        return None
    if comparison.operator in ("<", ">="):
        is_true = _compare_versions(left.text, comparison.operator, right_text)
        # The value of a variable is known here. If it is not a version, the comparison is false.
        if is_true is None and comparison.is_of_variable:
            return False
        return is_true
    if comparison.operator == "matches":
        return re.search(right_text, left.text, re.IGNORECASE) is not None
    return _OPERATORS[comparison.operator](left.text.lower(), right_text.lower())


def _has_state(value: Value, state: str) -> bool | None:
    """Return whether a value has a state for which the operator ``is`` asks.

    The states are ``set``, ``unset`` and ``requested`` for a variable, and ``unknown`` for a fact. Return
    None if it is not known whether a variable is requested.
    """
    if state == "requested":
        return value.is_requested
    has_text = value.text != ""
    # A variable without a text is "unset", and a fact without a text is "unknown".
    return has_text if state == "set" else not has_text


def _compare_versions(text: str, sign: str, limit_text: str) -> bool | None:
    """Return whether the first version is below the second (`sign` is ``<``), or not below it (``>=``).

    Return None if one of the texts is not a version.
    """
    version, limit = _parse_version(text), _parse_version(limit_text)
    if not version or not limit:
        return None
    is_below = version < limit
    return is_below if sign == "<" else not is_below


def _parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version for comparisons, such as (2, 20, 5) for ``2.20.5+cuda12``.

    The result is empty if the text does not begin with a number.
    """
    match = _VERSION.match(text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _is_in(value: str, operand: str) -> bool:
    """Return whether `value` is one of the choices in `operand`, which are separated by commas."""
    return value in [choice.strip() for choice in operand.split(",")]


def _list_allows(value: str, item: str) -> bool:
    """Return whether a list of NCCL, such as the value of NCCL_PROTO, allows `item` for all functions.

    The format is ``[^]item,...;function:...``. ``LL,Simple`` allows only these two items, and ``^LL128``
    allows every item except LL128. The text after a semicolon is about single functions, and is ignored here.
    """
    names, _, _ = value.partition(";")
    items = [name.strip() for name in names.removeprefix("^").split(",") if name.strip()]
    if not items:
        return False
    if names.startswith("^"):
        return item not in items
    return item in items


_OPERATORS: Mapping[str, Callable[[str, str], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "in": _is_in,
    "contains": operator.contains,
    "allows": _list_allows,
}


def load_issues(system_issues: Iterable[KnownIssue], env: Mapping[str, str]) -> tuple[KnownIssue, ...]:
    """Return all known issues: those that imgkit ships, those of a system, and those in the site's file.

    A variable in `env` (``IMGKIT_KNOWN_ISSUES``) contains the path of the site's file. If several issues have
    the same id, the last one replaces the others. Issues with the effect ``ignore`` are removed.

    Raises
    ------
    UsageError : a file cannot be read, or an issue in it is not valid. The message names its row and the key.
    """
    # Later issues replace earlier ones, so the site's file comes last.
    issues = [*read_issues(SHIPPED_FILE), *system_issues]
    site_file = env.get(SITE_FILE_VARIABLE)
    if site_file:
        issues += read_issues(Path(site_file))
    issue_by_id = {issue.id: issue for issue in issues}
    return tuple(issue for issue in issue_by_id.values() if issue.effect != "ignore")


def read_issues(path: Path) -> tuple[KnownIssue, ...]:
    """Return the known issues in a JSON file. Each row of the file is one issue.

    Raises
    ------
    UsageError : the file cannot be read, or an issue is not valid. The message names its row and the key.
    """
    hint = "write a list of rows as known_issues.json has them, each with id, message, when and effect"
    try:
        # With `closed`, an unknown key is an error.
        issues = json_text.build_value(tuple[KnownIssue, ...], json_text.load(path), "rows", closed=True)
        for index, issue in enumerate(issues):
            first_fault = next(issue.faults(), None)
            if first_fault is not None:
                key, (what, fix) = first_fault
                raise ValueError(f"rows[{index}].{key}: {what}; {fix}")
    except (OSError, ValueError) as error:
        raise UsageError(f"known issues cannot be read: {error}", where=str(path), hint=hint) from error
    return tuple(issues)
