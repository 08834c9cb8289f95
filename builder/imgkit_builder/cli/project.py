"""``imgkit init``, and what the verbs of jobs do with an ``imgkit.toml``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import RESULT_JSON, columns, confirmed, show
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.project.confirm import ForeignValues
    from imgkit_builder.project.origins import ValueSource
    from imgkit_builder.project.toml_file import ProjectFile
    from imgkit_builder.recipe.targets import Target

SCHEMA = 1

CONFIRM: str = typer.Option(
    "",
    "--confirm",
    metavar="DIGEST",
    help="Accept the values of a new imgkit.toml or of a site's system, and what they run and mount.",
)


def project_here() -> ProjectFile | None:
    """The imgkit.toml of this folder or above it, which is named on stderr; None if there is none."""
    from imgkit_builder.recipe import targets

    if targets.is_bundled():
        return None  # a file of a laptop's folder: the single-file tool runs on clusters
    from imgkit_builder.project import toml_file
    from imgkit_builder.recipe.problems import shown

    found = toml_file.find(Path.cwd())
    if found:
        terminal.err(f"imgkit: values from {shown(found.file)}")
    return found


def confirm_values(
    project: ProjectFile | None, recipes: Sequence[Target], given: str, *, stated: bool
) -> None:
    """Let a person look at another person's values before the first run with them.

    Parameters
    ----------
    recipes, stated : as of `confirm.of_job`.

    Raises
    ------
    UsageError : nobody has confirmed them, and there is nobody to ask, or the answer is no.
    """
    from imgkit_builder.recipe import targets

    if targets.is_bundled():
        return
    from imgkit_builder.project import confirm

    if site := confirm.of_site(recipes):
        _confirm(site, given)
    found = confirm.of_job(project, recipes, stated=stated)
    if project is None or not confirm.is_authors(project, recipes):
        _confirm(found, given)


def _confirm(found: ForeignValues, given: str) -> None:
    """Ask whether to use the values `found`, unless that has been answered, or `given` is their digest."""
    if found.is_known:
        return
    # One line each, also in the hint.
    lines = [f"  {name:8} {terminal.shown(text)}" for name, text in found.shown]
    if given != found.digest:
        head = f"{found.file} is new here. A run with it uses:"
        may_ask = sys.stdin.isatty() and sys.stderr.isatty()
        if not may_ask or not confirmed(head, *lines, "Continue, and remember this answer?"):
            raise UsageError(
                "these values are not confirmed on this machine",
                where=str(found.file),
                hint="\n".join(("they are:", *lines, f"if you trust them, pass --confirm {found.digest}")),
            )
    try:
        found.remember()
    except OSError as error:
        terminal.err(f"imgkit: cannot save this confirmation ({error.filename}: {error.strerror})")


def values_table(rows: Sequence[ValueSource]) -> Iterator[str]:
    """Lines with name, value and source of each of `rows`."""
    return columns([(one.name, one.value or "-", one.source) for one in rows], most=60)


def values_data(rows: Sequence[ValueSource]) -> list[dict[str, Any]]:
    """The JSON form of `rows`."""
    return [
        {
            "name": one.name,
            "value": one.value,
            "source": one.source,
            "file": str(one.position.file) if one.position else None,
            "line": one.position.line if one.position else None,
        }
        for one in rows
    ]


def verb_init(
    folder: Path = typer.Argument(Path(), metavar="[DIR]", help="Folder of the project, created if missing."),
    recipe: str = typer.Option(
        "", metavar="RECIPE", help="The recipe to extend (default: that of the remote)."
    ),
    on: str = typer.Option(
        "", "--on", metavar="NAME", help="The remote (default: the one with that recipe)."
    ),
    account: str = typer.Option("", "--account", "-A", help="Account or project to charge."),
    queue: str = typer.Option("", "--queue", "-q", help="Queue or partition."),
    qos: str = typer.Option("", help="Quality of service (Slurm)."),
    time: str = typer.Option("", metavar="HH:MM:SS", help="Time limit of a job (default: 30m)."),
    nodes: str = typer.Option("", metavar="N|N+S", help="Number of nodes (default: 1)."),
    keep: bool = typer.Option(
        False,
        "--keep-existing",
        help="Keep existing files and write only the missing ones; .gitignore gets lines that it lacks.",
    ),
    as_json: bool = RESULT_JSON,
) -> None:
    """Write an imgkit.toml, a recipe, a train.py that resumes and a .gitignore.

    imgkit run then needs no flags in this folder, nor imgkit submit where the
    system has no queue. Existing files are not overwritten.

    \b
    Examples:
      imgkit init
      imgkit init --recipe mn5 -A bsc98 --qos acc_debug mine
      imgkit init --keep-existing
    """
    from imgkit_builder.project import confirm, new_folder, toml_file
    from imgkit_builder.recipe import targets

    remote, recipe = _chosen(on, recipe)
    parent = targets.find(recipe)
    wanted = new_folder.NewFolder(
        folder=folder.absolute(),
        recipe=recipe,
        remote=remote,
        account=account,
        queue=queue,
        qos=qos,
        time=time,
        nodes=nodes,
    )
    texts = new_folder.texts(wanted, parent)
    made = new_folder.write(folder, texts, keep=keep)
    added = new_folder.complete_gitignore(folder) if keep else ()
    file = folder / toml_file.NAME
    if file in made:
        project = toml_file.read(file.absolute())
        if Path(project.recipe) in (path.absolute() for path in made):
            confirm.of_job(project, [targets.find(project.recipe)], stated=True).remember()
            confirm.remember_author(project.file)
    lines = [
        *(f"wrote  {path}" for path in made),
        *([f"added  {' '.join(added)} to {folder / new_folder.GITIGNORE}"] if added else []),
        *(f"next   {one}" for one in new_folder.next_steps(wanted, parent, folder)),
    ]
    data = {"schema": SCHEMA, "files": [str(path) for path in made], "remote": remote, "recipe": recipe}
    show(data, *lines, as_json=as_json)


def _chosen(on: str, recipe: str) -> tuple[str, str]:
    """The remote, empty if there is none, and the recipe."""
    from imgkit_builder.remote import config

    known = list(config.remotes().values())
    if on:
        remotes = [config.find(on)]
    elif recipe:
        words = (recipe, str(Path(recipe).absolute()))
        remotes = [one for one in known if one.recipe in words]
    else:
        remotes = known
    remote = remotes[0] if len(remotes) == 1 else None
    if not recipe and (remote is None or not remote.recipe):
        names = ", ".join(one.name for one in known)
        raise UsageError(
            f"no recipe given, and there are several remotes: {names}"
            if len(known) > 1
            else "no recipe given, and no remote has a default recipe",
            where="--recipe",
            hint="imgkit init --on NAME"
            if len(known) > 1
            else "imgkit init --recipe mn5; imgkit list names them",
        )
    return (remote.name if remote else ""), recipe or (remote.recipe if remote else "")
