"""The layers of an image, each with the line of the recipe that causes it.

Both templates use these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from imgkit_builder.recipe.model import Image

NEXT = " \\\n    "
"""Continues a shell command or an instruction on the next line."""

INSIDE = "/opt/imgkit"
"""The folder with imgkit's own files in the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text, and the line of the recipe that sets it."""

    origin: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFile:
    """A file, or the content of a folder, with its path in the build context and its path in the image."""

    context_path: str
    path: str
    is_folder: bool = False
    origin: str = ""
    """The line of the recipe. Set only for the user's own code."""


def imgkit_file(name: str, *, is_folder: bool = False) -> ContextFile:
    """Return a file or folder of imgkit itself, which is in `INSIDE` in the image.

    ``uv.json`` -> ``imgkit/uv.json`` in the build context, and ``/opt/imgkit/uv.json`` in the image.
    """
    return ContextFile(context_path=f"imgkit/{name}", path=f"{INSIDE}/{name}", is_folder=is_folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of the build: one RUN in a Dockerfile, or one step in ``%post`` of a definition file."""

    origin: str
    """The line of the recipe, or ``imgkit: `` and the purpose of a step that imgkit adds."""
    command: str
    """Shell commands. Line breaks are escaped, so that a Dockerfile has a single instruction."""
    docker: str = ""
    """The argument of RUN, if it differs from `command`. Otherwise empty."""
    mounts: str = ""
    """Options of RUN that provide secrets to the step. Each option ends with a line break."""
    files: tuple[ContextFile, ...] = ()
    """Files of the build context that the step needs. At its end, the step removes those that are folders."""

    @property
    def text(self) -> str:
        """The first command on one line. For a step that imgkit adds, it is the purpose."""
        if self.origin.startswith("imgkit: "):
            return self.origin.removeprefix("imgkit: ")
        commands = self.command.replace("\\\n", " ")  # join continued lines
        first_command, _, _ = commands.partition("\n")
        return " ".join(first_command.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """Files to copy and commands to run before packages are installed, because the installation needs them.

    The commands start in ``/``.
    """

    copy: tuple[ContextFile, ...]
    run: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Variables or labels that form a single layer."""

    origin: str
    entries: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of an image, in the order in which they are built."""

    image: Image
    """The values of the recipe, for keys that a template writes directly."""
    name: str
    file: str
    reference: str
    """The argument with which ``imgkit render`` finds this recipe."""
    platform: str
    uses_secrets: bool
    """Whether a step needs a builder that supports secrets."""
    base: Text
    base_user: str
    """The user of the base, which the finished image also has. Empty for root. All steps run as root."""
    args: Block | None
    """The recipe's own variables, which all steps can use."""
    ca: Step | None
    """The step that makes the system trust the recipe's certificates."""
    before_apt: Early
    apt: tuple[Step, ...]
    after_apt: Early
    protect: tuple[Step, ...]
    """The steps that make pip keep packages of the base."""
    pip: tuple[Step, ...]
    env: Block
    workdir: Text
    run: tuple[Step, ...]
    install_wheel: Step
    projects: tuple[Step, ...]
    """The steps that install the user's own projects with pip. Each has one folder."""
    copy: tuple[ContextFile, ...]
    origins: tuple[ContextFile, ...]
    """Files that describe where the image comes from. Currently this is its lock."""
    run_after_copy: tuple[Step, ...]
    labels: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """Content of a definition file that is needed only while imgkit itself builds the image."""

    files: tuple[ContextFile, ...] = ()
    steps: tuple[Step, ...] = ()
    """Steps that run before those of the recipe."""
    labels: Mapping[str, str] = field(default_factory=dict)
