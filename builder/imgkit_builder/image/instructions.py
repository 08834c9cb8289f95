"""The values that fill both templates: an image as its layers, each with its line of the recipe."""

from __future__ import annotations

from dataclasses import dataclass

from imgkit_builder.recipe import Image

NEXT = " \\\n    "
"""Continues a shell command or instruction on the next line."""

INSIDE = "/opt/imgkit"
"""The folder of imgkit's own files in the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One word, or one shell command whose line ends are escaped, so that it is a single instruction."""

    origin: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFile:
    """A file: its path in the build context and its path in the image."""

    member: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipCommand:
    """One pip step and its requirements file."""

    origin: str
    command: str
    requirements: ContextFile | None
    kept: ContextFile | None
    """A folder with wheels, which must not stay in the image."""
    mounts: str
    """Options of RUN that give it its secrets, each with a line end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UvCommand:
    """The step of a uv project and the files that it needs."""

    origin: str
    files: tuple[ContextFile, ...]
    kept: ContextFile | None
    """The folder of its wheels, where all of them lie on this machine."""
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project of the user: the content of the folder `member` goes into `target`, and pip installs that."""

    origin: str
    member: str
    target: str
    command: str
    stays: bool
    """Whether the image needs `target` afterwards."""
    mounts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A user's command, as the argument of RUN and as one command of ``%post``."""

    origin: str
    docker: str
    posix: str
    mounts: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """User code: the content of the folder `member` goes into `target`."""

    origin: str
    member: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """Files and commands of the user that packages need; the commands start in ``/``."""

    copy: tuple[Copy, ...]
    run: tuple[RunStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """A variable or a label."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Variables or labels that form one layer."""

    origin: str
    entries: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Authorities:
    """Certificates, the command that makes the system trust them, and the variables for other programs."""

    origin: str
    files: tuple[ContextFile, ...]
    install: str
    env: tuple[KeyValue, ...]


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
    """Whether a step needs a builder that knows secrets."""
    base: Text
    base_user: str
    """The user of the base, whom the finished image has too; empty for root, as whom all steps run."""
    args: Block | None
    """The recipe's own variables of every step."""
    ca: Authorities | None
    before_apt: Early
    apt: Text | None
    apt_files: ContextFile | None
    """The folder that a locked apt step needs, and removes."""
    after_apt: Early
    protect: str
    filtered_constraint: Text | None
    uv: UvCommand | None
    pip: tuple[PipCommand, ...]
    env: Block
    workdir: Text
    run: tuple[RunStep, ...]
    wheel: ContextFile
    install_wheel: str
    projects: tuple[Project, ...]
    copy: tuple[Copy, ...]
    origins: tuple[ContextFile, ...]
    """What a locked image says about itself: its lock."""
    run_after_copy: tuple[RunStep, ...]
    labels: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a definition's ``%post``."""

    origin: str
    """The recipe's line, or ``imgkit: `` and its purpose."""
    command: str
    """Commands of the shell."""

    @property
    def text(self) -> str:
        """Its first command on one line, or the purpose of a step of imgkit's own."""
        purpose = self.origin.removeprefix("imgkit: ")
        if purpose != self.origin:
            return purpose
        first = self.command.replace("\\\n", " ").partition("\n")[0]
        return " ".join(first.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What a definition has only while imgkit builds it."""

    mark: str = ""
    """Begins the line that each step prints first; ``3/9`` follows. Empty in a text for people."""
    files: tuple[ContextFile, ...] = ()
    steps: tuple[Step, ...] = ()
    """Steps before those of the recipe."""
    labels: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A definition and its steps, in their order."""

    text: str
    steps: tuple[Step, ...]
