"""The values that fill both templates: an image as its layers, each with its line of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from imgkit_builder.recipe.model import Image

NEXT = " \\\n    "
"""Continues a shell command or instruction on the next line."""

INSIDE = "/opt/imgkit"
"""The folder of imgkit's own files in the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A value with its line of the recipe."""

    origin: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFile:
    """A file, or the content of a folder: its path in the build context and its path in the image."""

    context_path: str
    path: str
    is_folder: bool = False
    origin: str = ""
    """The recipe's line, for the user's own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the build: one RUN, and one step of a definition's ``%post``."""

    origin: str
    """The recipe's line, or ``imgkit: `` and its purpose."""
    command: str
    """Shell commands; line ends are escaped, so that a Dockerfile has a single instruction."""
    docker: str = ""
    """The argument of RUN; empty if it is `command`."""
    mounts: str = ""
    """Options of RUN that give it its secrets, each with a line end."""
    files: tuple[ContextFile, ...] = ()
    """Files of the context that the step needs. The step removes folders among them at its end."""

    @property
    def text(self) -> str:
        """Return its first command on one line, or the purpose of a step of imgkit's own."""
        if self.origin.startswith("imgkit: "):
            return self.origin.removeprefix("imgkit: ")
        commands = self.command.replace("\\\n", " ")  # without continued lines
        first_command, _, _ = commands.partition("\n")
        return " ".join(first_command.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """Files to copy and commands to run before packages are installed, since packages need them.

    The commands start in ``/``.
    """

    copy: tuple[ContextFile, ...]
    run: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Variables or labels that form one layer."""

    origin: str
    entries: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """An image as its layers, in order."""

    image: Image
    """The recipe's values, for keys that a template writes without help."""
    name: str
    file: str
    reference: str
    """The argument of ``imgkit render`` for this recipe."""
    platform: str
    uses_secrets: bool
    """Whether a step needs a builder that supports secrets."""
    base: Text
    base_user: str
    """The user of the base, whom the finished image has too; empty for root, as whom all steps run."""
    args: Block | None
    """The recipe's own variables of every step."""
    ca: Step | None
    """What makes the system trust the recipe's certificates."""
    before_apt: Early
    apt: tuple[Step, ...]
    after_apt: Early
    protect: tuple[Step, ...]
    """What makes pip keep packages of the base."""
    pip: tuple[Step, ...]
    env: Block
    workdir: Text
    run: tuple[Step, ...]
    install_wheel: Step
    projects: tuple[Step, ...]
    """The user's own projects that pip installs; each has one folder."""
    copy: tuple[ContextFile, ...]
    origins: tuple[ContextFile, ...]
    """What a locked image says about itself: its lock."""
    run_after_copy: tuple[Step, ...]
    labels: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What a definition has only while imgkit builds it."""

    files: tuple[ContextFile, ...] = ()
    steps: tuple[Step, ...] = ()
    """Steps before those of the recipe."""
    labels: Mapping[str, str] = field(default_factory=dict)
