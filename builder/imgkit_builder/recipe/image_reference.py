"""Image references as Docker parses them (grammar: the `reference` package of the distribution project)."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_NAME = 255
"""Characters of registry and repository together."""

_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_LABEL = r"(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])"
_DOMAIN = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[A-Fa-f0-9:]+\])(?::[0-9]+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}")
_HEX_DIGITS = {"sha256": 64, "sha384": 96, "sha512": 128}
_TRANSPORT = re.compile(r"(?:https?|docker|oci|oras|library|docker-archive|docker-daemon):(?://)?")


class BadReference(ValueError):
    """The reason why a text is not an image reference, and what to write instead."""

    def __init__(self, *, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReference:
    """``registry/repository:tag@digest``; missing parts are empty."""

    registry: str
    repository: str
    tag: str
    digest: str


def parse(text: str) -> ImageReference:
    """Split an image reference into its parts.

    Raises
    ------
    BadReference : names the first problem.
    """
    if not text:
        raise BadReference(what="the image reference is empty", hint="write NAME:TAG")
    if re.search(r"\s", text):
        raise BadReference(what=f"{text!r} contains a blank", hint="an image reference is one word, NAME:TAG")
    if "$" in text:
        raise BadReference(
            what=f"{text} contains a variable", hint="recipes have no variables: write the whole name"
        )
    transport = _TRANSPORT.match(text)
    if transport and ("//" in transport.group() or text.startswith(("docker-", "oci:"))):
        raise BadReference(
            what=f"{transport.group()} is not part of an image reference",
            hint=f"write {text[transport.end() :]}",
        )
    name, _, digest = text.partition("@")
    if "@" in text:
        _check_digest(digest)
    # A colon after the last slash begins the tag; an earlier colon begins a registry's port.
    head, slash, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise BadReference(
            what=f"{tag!r} is not a tag" if tag else "the tag after the colon is empty",
            hint="a tag has up to 128 letters, digits, _ . -, and does not begin with . or -",
        )
    name = f"{head}{slash}{last}"
    first, _, rest = name.partition("/")
    has_registry = bool(rest) and (bool(re.search(r"[.:A-Z]", first)) or first == "localhost")
    registry, repository = (first, rest) if has_registry else ("", name)
    if registry and not _DOMAIN.fullmatch(registry):
        raise BadReference(what=f"{registry!r} is not a registry", hint="write HOST or HOST:PORT")
    for component in repository.split("/"):
        _check_component(component, repository)
    if len(name) > MAX_NAME:
        raise BadReference(
            what=f"the name has {len(name)} characters", hint=f"at most {MAX_NAME} are allowed"
        )
    return ImageReference(registry=registry, repository=repository, tag=tag, digest=digest)


def _check_component(component: str, repository: str) -> None:
    if _COMPONENT.fullmatch(component):
        return
    if not component:
        raise BadReference(what=f"{repository!r} has an empty part between slashes", hint="write NAME:TAG")
    if component != component.lower():
        raise BadReference(
            what=f"{component!r} has capital letters",
            hint=f"repository names are lower-case: {component.lower()}",
        )
    raise BadReference(
        what=f"{component!r} is not a repository name",
        hint="allowed: lower-case letters and digits, with . _ or - between them",
    )


def _check_digest(digest: str) -> None:
    algorithm, _, hexadecimal = digest.partition(":")
    wanted = _HEX_DIGITS.get(algorithm)
    if wanted and len(hexadecimal) != wanted:
        raise BadReference(
            what=f"the {algorithm} digest has {len(hexadecimal)} digits", hint=f"it needs {wanted}"
        )
    if not _DIGEST.fullmatch(digest):
        raise BadReference(what=f"{digest!r} is not a digest", hint="write sha256: and 64 hexadecimal digits")
