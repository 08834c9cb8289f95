"""The values of a recipe and of its lock: frozen dataclasses whose annotations pydantic validates.

A key of a recipe is one field: its type with rules, its default, and its description. The JSON Schema follows
from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from imgkit_builder.recipe import rules
from imgkit_builder.recipe.problems import KeyPath, Position, Problem, stated_at
from imgkit_entrypoints.rules import (
    ENV_NAME,
    LINE,
    EnvName,
    EnvValue,
    Line,
    Rule,
    Text,
    Unfit,
    at_least,
    pattern_rule,
)
from imgkit_entrypoints.system import SystemFacts
from imgkit_recipes import FOLDER

KEYS = {"extra": "forbid", "use_attribute_docstrings": True}
"""pydantic's configuration: unknown keys are refused, and a field's docstring is its description."""


@dataclass(frozen=True, slots=True, eq=False)
class Short:
    """A short form of a value in YAML, which is expanded before pydantic checks the type."""

    expand: Callable[[Any], Any]
    schema: Callable[[dict[str, Any]], dict[str, Any]] = lambda schema: schema
    """Make the JSON Schema of both forms from that of the long one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        # Not a union: one mistake in `str | Run` gives an error for each form.
        validator = {"type": "no-info", "function": self.expand}
        return {"type": "function-before", "function": validator, "schema": handler(source)}

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return self.schema(handler(core))


def _expand_platforms(value: Any) -> Any:
    """Return ``["linux/arm64"]`` for ``arm64``.

    A wrong name stays as it is, for the message that quotes it.
    """
    if not isinstance(value, list | tuple):
        value = [value]
    return [rules.PLATFORMS.get(str(name), name) for name in value]


_CONSTRAINTS_HINT = "allowed: keep, ignore, {drop: [NAME, ...]}"


def _expand_constraints(value: Any) -> Any:
    """Return the fields of `Constraints` for ``keep``, ``ignore`` or ``{drop: [NAME, ...]}``."""
    if value in ("keep", "ignore"):
        return {"policy": value}
    if isinstance(value, str):
        raise Unfit(f"{value!r} is not a policy", _CONSTRAINTS_HINT)
    if not isinstance(value, dict):
        raise Unfit("is not a policy", _CONSTRAINTS_HINT)
    unknown_keys = set(value) - {"drop"}
    if unknown_keys:
        raise Unfit(f"unknown key {min(unknown_keys)}", _CONSTRAINTS_HINT)
    if not value.get("drop"):
        raise Unfit("drops nothing", _CONSTRAINTS_HINT)
    return {"policy": "drop", **value}


def _make_constraints_schema(_: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of what a recipe may write for ``image.constraints``.

    The argument is the schema that pydantic would use. It describes the expanded form, so it is ignored.
    """
    names = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    drop = {
        "type": "object",
        "properties": {"drop": names},
        "required": ["drop"],
        "additionalProperties": False,
    }
    return {"anyOf": [{"enum": ["keep", "ignore"]}, drop]}


def _require_one_of(*keys: str, **schema: Any) -> dict[str, Any]:
    """Return `KEYS` with a JSON Schema that requires exactly one of `keys`. pydantic itself ignores that."""
    alternatives = [{"required": [key]} for key in keys]
    return {**KEYS, "json_schema_extra": {"oneOf": alternatives, **schema}}


_SECRET_KEYS = _require_one_of("env", "file")
NO_DEPS = "--no-deps"
"""Option of pip: install a project without its dependencies, which other steps install."""
_PIP_KEYS = _require_one_of(
    "packages", "requirements", "project", dependentRequired={"editable": ["project"]}
)
_PLATFORM_NAMES = [*rules.PLATFORMS, *rules.PLATFORMS.values()]
_FILE = Rule(rules.printable_text, core={"type": "str"}, convert=Path)
_SECRET_NAME = pattern_rule(
    "[A-Za-z0-9][A-Za-z0-9_.-]*", "is not a name of a secret", "allowed: letters, digits and _ . -"
)
_SECRET_FILE = Rule(rules.find_secret_file_faults, core={"type": "str"}, convert=Path)

Platform = Annotated[Line, Rule(rules.find_platform_faults, schema={"enum": _PLATFORM_NAMES})]
Platforms = Annotated[
    tuple[Platform, ...],
    Short(
        _expand_platforms,
        lambda many: {"anyOf": [many["items"], {**many, "minItems": 1, "uniqueItems": True}]},
    ),
]
ImageReference = Annotated[Line, Rule(rules.find_reference_faults)]
File = Annotated[Path, _FILE]
PipName = Annotated[Line, Rule(rules.find_pip_name_faults)]
BuildEnvName = Annotated[EnvName, Rule(rules.find_build_env_faults)]
ImageEnvName = Annotated[EnvName, Rule(rules.find_image_env_faults)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSecret:
    """A value that steps may use and that never becomes part of the image: a token, a netrc file."""

    __pydantic_config__ = _SECRET_KEYS

    id: Annotated[Line, _SECRET_NAME]
    """Its name; a step finds the value in the file ``/run/secrets/ID``."""
    env: Annotated[str | None, LINE, ENV_NAME] = None
    """The variable of this machine that holds the value; a step sees the same variable."""
    file: Annotated[Path | None, _SECRET_FILE] = None
    """The file of this machine that holds the value: absolute, below ``~``, or relative to the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipStep:
    """One ``pip install``: `packages`, a `requirements` file or a `project`, with `options` before them."""

    __pydantic_config__ = _PIP_KEYS

    packages: tuple[Annotated[Line, Rule(rules.find_pip_package_faults)], ...] = ()
    """Requirements as pip writes them: ``numpy``, ``deepspeed==0.13.1``."""
    requirements: Annotated[Path | None, _FILE] = None
    """A requirements file, relative to the recipe's file; absolute after loading."""
    project: Annotated[Path | None, _FILE] = None
    """Folder with a pyproject.toml: its dependencies are installed in this order, its code before `copy`."""
    editable: Annotated[str | None, LINE, Rule(rules.find_copy_target_faults)] = None
    """Absolute path in the image where the project's folder stays; ``pip install --editable`` links to it."""
    options: tuple[Annotated[Line, Rule(rules.find_pip_option_faults)], ...] = ()
    """Options of this ``pip install``, one word per item: ``--no-build-isolation``."""
    env: Mapping[BuildEnvName, EnvValue] = field(default_factory=dict)
    """Variables of this ``pip install`` alone: ``MAX_JOBS``, ``TORCH_CUDA_ARCH_LIST``."""
    secrets: tuple[Line, ...] = ()
    """Names (`id`) of the build secrets that this ``pip install`` may use."""
    ignore: tuple[Text, ...] = ()
    """Patterns of gitignore's kind (``*.pyc``, ``data/``), matched below `project`."""

    @property
    def installs_dependencies(self) -> bool:
        """Return whether pip also installs what the project depends on."""
        return self.project is not None and NO_DEPS not in self.options


@dataclass(frozen=True, slots=True, kw_only=True)
class UvProject:
    """A uv project: what the base lacks of its ``uv.lock`` is installed before the pip steps."""

    project: File
    """Folder with pyproject.toml and uv.lock, relative to the recipe's file; absolute after loading."""
    extras: tuple[PipName, ...] = ()
    """Extras of the project (``project.optional-dependencies``) that the image needs."""
    groups: tuple[PipName, ...] = ()
    """Dependency groups that the image needs; none by default, not even ``dev``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """How pip treats the base's own constraint file (NGC's /etc/pip/constraint.txt).

    YAML has ``keep``, ``ignore`` or ``{drop: [name, ...]}``.
    """

    policy: Literal["keep", "ignore", "drop"] = "keep"
    drop: tuple[PipName, ...] = ()
    """Packages that may differ from the base's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStep:
    """User code that is copied into the image."""

    source: File
    """File or folder relative to the recipe's file, inside its folder; absolute after loading."""
    target: Annotated[str, Rule(rules.find_copy_target_faults)] = "/workspace"
    """Absolute path in the image; a folder's content lands in it, a file lands in it under its name."""
    ignore: tuple[Text, ...] = ()
    """Patterns of gitignore's kind (``*.pyc``, ``data/``), matched below `source`."""
    after: Literal["base", "apt", "pip"] = "pip"
    """``base``, ``apt``: just before the `run` steps that state the same; ``pip``: late, as code changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """A shell command. A text in the list is short for ``{command: TEXT}``."""

    command: Annotated[str, Rule(rules.find_shell_command_faults)]
    """What ``/bin/sh`` runs; a separate layer. Of several lines, the first that fails ends the build."""
    after: Literal["base", "apt", "pip", "copy"] = "pip"
    """``base``: before the apt step; ``apt``: before pip; ``pip``: after it; ``copy``: after your code."""
    secrets: tuple[Line, ...] = ()
    """Names (`id`) of the build secrets that this command may use."""

    @property
    def short(self) -> str | None:
        """Return the text that a recipe can write for this command. None if it has other keys, too."""
        if self != RunCommand(command=self.command):
            return None
        return self.command


Command = Annotated[
    RunCommand,
    Short(
        lambda value: value if isinstance(value, dict | list) else {"command": value},
        lambda mapping: {"anyOf": [{"type": "string"}, mapping]},
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The image part of a recipe."""

    base: ImageReference
    """The image to start from, with tag or digest."""
    current_base: Annotated[str | None, LINE, Rule(rules.find_reference_faults)] = None
    """A newer base, which ``--base current`` selects."""
    platforms: Platforms = field(default=("linux/amd64",), metadata={"alias": "platform"})
    """One platform or a list; default: the host's platform if listed, else the first."""
    ca: tuple[File, ...] = ()
    """Certificates (PEM) of the site's own authority, trusted before the first step that uses the network."""
    secrets: tuple[BuildSecret, ...] = ()
    """Values that the steps which name them may use, and that the image never holds."""
    args: Mapping[BuildEnvName, EnvValue] = field(default_factory=dict)
    """Variables of every build step, not kept in the image; ``--build-arg NAME=VALUE`` sets another value."""
    apt: tuple[Annotated[Line, Rule(rules.find_apt_package_faults)], ...] = ()
    """Debian packages: ``git``, ``git=1:2.39.2-1``."""
    uv: UvProject | None = None
    """A uv project whose ``uv.lock`` decides on versions."""
    pip: tuple[PipStep, ...] = ()
    """``pip install`` steps, in this order."""
    constraints: Annotated[Constraints, Short(_expand_constraints, _make_constraints_schema)] = Constraints()
    """How pip treats the base's own constraint file; the base's torch and NCCL are always protected."""
    env: Mapping[ImageEnvName, EnvValue] = field(default_factory=dict)
    """Variables stored in the image; ``PATH: /x:$PATH`` adds to the base's value. Network and thread tuning
    belongs in ``system.env``."""
    copy: tuple[CopyStep, ...] = ()
    """User code, copied into the last layers of the image."""
    run: tuple[Command, ...] = ()
    """Shell commands, one layer each: after pip and before imgkit's own files, or ``after: copy``."""
    labels: Mapping[Annotated[Line, Rule(rules.find_label_name_faults)], Line] = field(default_factory=dict)
    """Labels of the image, in addition to those that imgkit writes."""
    workdir: Annotated[str, Rule(rules.find_image_path_faults)] = "/workspace"
    """Folder in which ``run`` and, if the recipe states it, the commands of jobs start; absolute."""

    @property
    def used_secrets(self) -> frozenset[str]:
        """Return the names of the secrets that a step uses."""
        names: set[str] = set()
        steps: tuple[PipStep | RunCommand, ...] = (*self.pip, *self.run)
        for step in steps:
            names.update(step.secrets)
        return frozenset(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The content of an image, and facts about the system it is for."""

    __pydantic_config__ = KEYS

    description: Annotated[str, Rule(rules.find_description_faults, convert=str.strip)] = ""
    """One line about the recipe, for people."""
    image: Image
    """What the image holds."""
    system: SystemFacts = field(default_factory=SystemFacts)
    """The system that the image is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe whose ``extends`` is resolved and whose values are checked."""

    name: str
    description: str = ""
    image: Image
    system: SystemFacts
    file: Path
    """The requested file, absolute."""
    sha256: str
    """Digest of the resolved content: canonical JSON and requirements files, no positions or comments."""
    positions: Mapping[KeyPath, Position]
    """Position of every value that a file states; defaults have none."""
    sources: Mapping[Path, str] = field(default_factory=dict)
    """The sha256 of every file that decided on these values, as it was read."""
    warnings: tuple[Problem, ...] = ()
    """Problems that do not stop a build but deserve a look, for example a secret in ``env``."""
    lock: LockedPlatform | None = None
    """What the build installs, where it follows a lock; `load` attaches none."""
    lock_text: str = ""
    """`lock` as the content of a lock file."""
    kept: Mapping[str, Path] = field(default_factory=dict)
    """Packages of `lock` that lie on this machine, by the names of their files."""

    @property
    def reference(self) -> str:
        """Return what a command line in the recipe's folder calls it: a shipped name, or the file's name."""
        return self.name if self.file.parent == FOLDER else self.file.name

    def where(self, *path: str | int) -> str:
        """Return ``file.yaml:12`` for the nearest stated value at or above `path`."""
        return stated_at(self.positions, path, self.file)


LOCK_SCHEMA = 1
"""Grows when an older imgkit could misread a new lock."""
UV_STEP = -1
"""The step of the wheels of a uv project, which come before those of the pip steps."""
LOCK_HINT = "do not edit a lock; make it again: imgkit lock RECIPE"


def _lock_rule(pattern: str, description: str) -> Rule:
    """Return the rule for a value of a lock.

    A person should not have written it, so the hint is `LOCK_HINT`.
    """
    return pattern_rule(pattern, f"must be {description}", LOCK_HINT)


def _check_epoch(seconds: int) -> Iterator[rules.Fault]:
    if not 0 <= seconds < 1 << 32:
        yield "must be seconds since 1970, and fit into 32 bits", LOCK_HINT


# Names and URLs of a lock are answers of a base, and end in lists for a script and for pip: without blanks,
# quotes and control characters.
# "git_1%3a2.43.0_amd64"
_FILE_NAME = r"[A-Za-z0-9][A-Za-z0-9.+~%:_!-]*"
_URL = r"https?://[A-Za-z0-9._~:/?\[\]!&+,=%-]+"
_URL_DESCRIPTION = "a URL of http or https, without credentials and special characters"
Version = Annotated[Line, _lock_rule(r"[A-Za-z0-9][A-Za-z0-9.+~:_!-]*", "a version")]
Sha256 = Annotated[Line, _lock_rule("[0-9a-f]{64}", "64 hex digits")]
OptionalSha256 = Annotated[Line, _lock_rule("([0-9a-f]{64})?", "64 hex digits")]
Digest = Annotated[Line, _lock_rule("(sha256:[0-9a-f]{64})?", "sha256: and 64 hex digits")]
Number = Annotated[int, at_least(0)]
Flag = Annotated[bool, Rule(lambda _: iter(()), core={"type": "bool", "strict": True})]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedStep:
    """One pip step as the recipe asked for it when the lock was made."""

    requirements: tuple[Line, ...] = ()
    """Its packages, the lines of its requirements file, or the dependencies of its project."""
    options: tuple[Line, ...] = ()
    """Its options, then those that the requirements file states."""
    env: tuple[Line, ...] = ()
    """``NAME=VALUE``, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRequest:
    """What the recipe asked for: a recipe that asks for something else has a stale lock."""

    base: Annotated[Line, Rule(partial(rules.find_reference_faults, needs_tag=False))]
    """The base's name as the recipe, or ``--base``, states it; the latter may lack a tag."""
    apt: tuple[Annotated[Line, Rule(rules.find_apt_package_faults)], ...] = ()
    constraints: tuple[PipName, ...] = ("keep",)
    """The policy, and behind ``drop`` the names."""
    uv: OptionalSha256 = ""
    """Digest of the project's uv.lock with the chosen extras and groups; empty without a uv project."""
    pip: tuple[LockedStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedBase:
    """The image that a locked build starts from."""

    name: Line
    """The name in the request."""
    digest: Digest = ""
    """``sha256:...`` of the registry's manifest; empty for an image that was never in a registry."""
    id: Digest = ""
    """``sha256:...`` of the configuration."""

    @property
    def exact(self) -> str:
        """Return ``REPOSITORY@sha256:...``, or the name if it has a digest or no registry had the image."""
        if "@" in self.name or not self.digest:
            return self.name
        # A digest replaces the tag; a colon before the last slash belongs to the registry's port.
        folder, slash, name = self.name.rpartition("/")
        repository = name.partition(":")[0]
        return f"{folder}{slash}{repository}@{self.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedDeb:
    """One Debian package that the apt step installs."""

    name: Annotated[Line, _lock_rule("[a-z0-9][a-z0-9+.-]+", "the name of a Debian package")]
    version: Version
    architecture: Annotated[Line, _lock_rule("[a-z0-9][a-z0-9-]*", "an architecture")]
    file: Annotated[Line, _lock_rule(rf"{_FILE_NAME}\.deb", "the name of a .deb, without a folder")]
    url: Annotated[Line, _lock_rule(_URL, _URL_DESCRIPTION)]
    sha256: Sha256
    size_bytes: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedWheel:
    """One wheel that a pip step installs."""

    step: Annotated[int, at_least(UV_STEP)]
    """Number of the step, from 0, or `UV_STEP`."""
    name: PipName
    version: Version
    file: Annotated[Line, _lock_rule(rf"{_FILE_NAME}\.whl", "the name of a .whl, without a folder")]
    url: Annotated[Line, _lock_rule(f"({_URL})?", _URL_DESCRIPTION)] = ""
    """Where it came from; empty for one that was built from a source distribution."""
    sha256: Sha256
    kept: Flag = False
    """Whether no index has it: it lies in the folder of kept files only."""
    direct: Flag = False
    """Whether the recipe names the URL itself, and no index is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPlatform:
    """All that one platform's image is made of."""

    platform: Annotated[Line, Rule(rules.find_platform_faults)]
    source_date_epoch: Annotated[int, Rule(_check_epoch, core={"type": "int", "strict": True})]
    """The time of the lock in seconds since 1970, for the snapshot services of Debian and Ubuntu."""
    request: LockRequest
    base: LockedBase
    apt: tuple[LockedDeb, ...] = ()
    """Sorted by name."""
    pip: tuple[LockedWheel, ...] = ()
    """Sorted by step, then by name."""

    @property
    def digests(self) -> dict[str, str]:
        """Return the sha256 of every file, by its name."""
        debs = {deb.file: deb.sha256 for deb in self.apt}
        return debs | {wheel.file: wheel.sha256 for wheel in self.pip}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The content of a lock file."""

    __pydantic_config__ = KEYS

    schema: Number = LOCK_SCHEMA
    recipe: Annotated[Line, Rule(rules.find_recipe_name_faults)]
    """The recipe's name."""
    imgkit: Version
    """The version that made the lock."""
    platforms: tuple[LockedPlatform, ...]
    """Sorted by platform."""

    def for_platform(self, platform: str) -> LockedPlatform | None:
        """Return what the lock has for `platform`, or None."""
        for locked in self.platforms:
            if locked.platform == platform:
                return locked
        return None

    def with_platform(self, new: LockedPlatform) -> Lock:
        """Return a lock in which `new` replaces what there is for its platform, or is added."""
        by_name = {locked.platform: locked for locked in (*self.platforms, new)}
        platforms = tuple(by_name[name] for name in sorted(by_name))
        return dataclasses.replace(self, platforms=platforms)
