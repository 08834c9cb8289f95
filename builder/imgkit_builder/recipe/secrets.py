"""Finds values that look like secrets: anybody who can pull an image can read them, even deleted ones."""

from __future__ import annotations

import re

_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW(?:OR)?D|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL", re.IGNORECASE
)
_HARMLESS = re.compile(r"|/.*|\$.*|[\d.]+|true|false|yes|no|on|off", re.IGNORECASE)
"""Harmless values of such a variable: nothing, a path, another variable, a number, a switch."""

_VALUES = (
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_\w{40}"), "a GitHub token"),
    (re.compile(r"\bglpat-[\w-]{20}"), "a GitLab token"),
    (re.compile(r"\bhf_[A-Za-z0-9]{30}"), "a Hugging Face token"),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{32}"), "an API key"),
    (re.compile(r"\bnvapi-[\w-]{40}"), "an NVIDIA API key"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "an AWS access key"),
    (re.compile(r"\bxox[abprs]-[\w-]{10}"), "a Slack token"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"), "a private key"),
    (re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/$@]+@"), "a URL with a password"),
    (re.compile(r"\bhttps?://[^\s/:$@]{16,}@"), "a URL with a token"),
)


def in_name(name: str, value: str) -> bool:
    """Whether a variable called `name` with this value is probably a secret."""
    return bool(_NAME.search(name)) and not _HARMLESS.fullmatch(value)


def in_value(value: str) -> str:
    """The kind of secret in `value`, in words; empty where there is none of a known kind."""
    return next((words for pattern, words in _VALUES if pattern.search(value)), "")


def masked(text: str) -> str:
    """`text` with a star for each character of a secret, so that columns stay the same."""
    for pattern, _ in _VALUES:
        text = pattern.sub(lambda match: "*" * len(match.group()), text)
    return text
