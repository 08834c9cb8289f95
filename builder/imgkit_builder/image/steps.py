"""The steps of a definition's ``%post``, in the order of the Dockerfile's instructions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from imgkit_builder.image.instructions import INSIDE, NEXT, Block, Copy, Layers, Project, RunStep, Step


def steps(made: Layers) -> Iterator[Step]:
    """Yield the steps of the image `made`."""
    # Brackets: without them, only the last command of several behind && would end the build when it fails.
    copied = " ".join((INSIDE, *(file.path for file in made.ca.files))) if made.ca else INSIDE
    yield _own(
        "copied files have the same modes, whatever umask copied them", f"chmod -R u=rwX,go=rX {copied}"
    )
    if made.ca:
        exported = _export(Block(origin=made.ca.origin, entries=made.ca.env))
        yield Step(origin=made.ca.origin, command=f"{made.ca.install}\n{exported}")
    if made.apt:
        yield Step(origin=made.apt.origin, command=f"({made.apt.text})")
    if made.protect:
        yield _own("every pip step below must keep the base's torch and NCCL", f"({made.protect})")
    if made.filtered_constraint:
        yield Step(origin=made.filtered_constraint.origin, command=made.filtered_constraint.text)
    if made.uv:
        yield Step(origin=made.uv.origin, command=f"({made.uv.command})")
    for pip in made.pip:
        yield Step(origin=pip.origin, command=f"({pip.command})" if pip.kept else pip.command)
    yield Step(origin=made.env.origin, command=_export(made.env))
    yield Step(origin=made.workdir.origin, command=f"mkdir -p -- {shlex.quote(made.workdir.text)}")
    for run in made.run:
        yield _run(made, run)
    yield _own(
        "no index, no dependencies; forced, because a changed wheel can have the same version",
        f"({made.install_wheel})",
    )
    for project in made.projects:
        placed = f"{_placed(project)}\n" if project.stays else ""
        yield Step(origin=project.origin, command=f"{placed}{project.command}")
    if made.projects:
        yield _own("the projects are installed", f"rm -rf {INSIDE}/project")
    for copy in made.copy:
        yield Step(origin=copy.origin, command=_placed(copy))
    if made.copy:
        yield _own("the copies are in their places", f"rm -rf {INSIDE}/copy")
    for run in made.run_after_copy:
        yield _run(made, run)


def _own(purpose: str, command: str) -> Step:
    return Step(origin=f"imgkit: {purpose}", command=command)


def _export(block: Block) -> str:
    return f"export {NEXT.join(f'{one.key}={shlex.quote(one.value)}' for one in block.entries)}"


def _run(made: Layers, step: RunStep) -> Step:
    return Step(origin=step.origin, command=f"(cd -- {shlex.quote(made.workdir.text)} && {step.posix})")


def _placed(code: Copy | Project) -> str:
    """The commands that put the content of a folder of the context into its place."""
    target = shlex.quote(code.target)
    return f"mkdir -p -- {target}\ncp -RP -- {INSIDE}/{code.member}/. {target}"
