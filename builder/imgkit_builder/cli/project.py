"""``imgkit init``, and functions for the verbs for jobs that find an ``imgkit.toml`` and print its values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.base.progress import Silent
from imgkit_builder.cli.common import JSON, format_columns, print_message, print_result
from imgkit_builder.cli.options import field_option
from imgkit_builder.jobs.remote import config
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.project import new_folder, ownership, program, toml_file
from imgkit_builder.recipe import targets
from imgkit_builder.recipe.problems import shorten_path
from imgkit_entrypoints.errors import ImgkitError, UsageError

if TYPE_CHECKING:
    from imgkit_builder.project.origins import ValueSource
    from imgkit_builder.project.toml_file import ProjectFile


def read_project(*, recipe: str, trusted: bool) -> ProjectFile | None:
    """Return the imgkit.toml of the current folder or a folder above it, or None if there is none.

    The path of the file is printed on stderr.

    Parameters
    ----------
    recipe : the recipe on the command line, or "". If there is one, the recipe in the file is not used, and
        is not checked.
    trusted : do not check whether other users can change the file or the files that it names.

    Raises
    ------
    UsageError : the file has problems, or other users can change it or a file that it names.
    """
    file = toml_file.find_file(Path.cwd())
    if file is None:
        return None
    if not trusted:
        ownership.refuse_foreign(file)  # before it is read
    project = toml_file.read_file(file)
    # The other files that will be read are known only now. A file of another user could run commands as this
    # user.
    if not trusted:
        for path in ownership.named_paths(project, with_recipe=not recipe):
            ownership.refuse_foreign(path)
    print_message(f"values from {shorten_path(file)}")
    return project


def values_table(rows: Sequence[ValueSource]) -> Iterator[str]:
    """Yield a line for each of `rows`, with its name, value and source in aligned columns."""
    return format_columns([(row.name, row.value or "-", row.source) for row in rows], max_width=60)


def values_data(rows: Sequence[ValueSource]) -> list[dict[str, Any]]:
    """Return the JSON form of `rows`, with the file and line that set each value."""
    data = []
    for row in rows:
        item: dict[str, Any] = {"name": row.name, "value": row.value, "source": row.source}
        item["file"] = str(row.position.file) if row.position else None
        item["line"] = row.position.line if row.position else None
        data.append(item)
    return data


def verb_init(
    folder: Path = typer.Argument(Path(), metavar="[DIR]", help="Folder of the project, created if missing."),
    recipe: str = typer.Option(
        "", metavar="RECIPE", help="The recipe to extend (default: that of the remote)."
    ),
    on: str = typer.Option(
        "", "--on", metavar="NAME", help="The remote (default: the one with that recipe)."
    ),
    account: str = field_option(JobRequest, "account"),
    queue: str = typer.Option("", "--queue", "-q", help="Queue or partition."),
    qos: str = field_option(JobRequest, "qos"),
    time: str = typer.Option("", metavar="HH:MM:SS", help="Time limit of a job (default: 30m)."),
    nodes: str = typer.Option("", metavar="N|N+S", help="Number of nodes (default: 1)."),
    as_json: bool = JSON,
) -> None:
    """Write an imgkit.toml, a recipe and a .gitignore for a folder with a program.

    imgkit run then needs no flags in this folder. Files that exist are kept. The
    recipe installs what pyproject.toml, requirements.txt or environment.yml names,
    except what the base has; a folder without Python gets a train.py that resumes.

    \b
    Examples:
      imgkit init
      imgkit init --recipe mn5 -A bsc98 --qos acc_debug mine
    """
    remote, recipe = _select_remote_and_recipe(on, recipe)
    options = new_folder.NewFolder(
        folder=folder.absolute(),
        recipe=recipe,
        parent=targets.load_target(recipe),
        remote=remote,
        values={"account": account, "queue": queue, "qos": qos, "time": time},
        nodes=nodes,
    )
    # These values depend on the files in the folder, so they are computed before new files are written.
    texts = new_folder.file_texts(options)
    next_steps = [*new_folder.next_steps(options, folder)]
    pip = program.pip_steps(options.folder, editable=not options.copies_code)
    mounts_code = not options.copies_code
    paths = new_folder.write_files(folder, texts)
    lines = [f"wrote  {path}" for path in paths]
    for name in texts:
        if folder / name not in paths:
            lines.append(f"kept   {folder / name}")
    added_lines = new_folder.complete_gitignore(folder)
    if added_lines:
        lines.append(f"added  {' '.join(added_lines)} to {folder / new_folder.GITIGNORE}")
    if pip is not None and folder / options.recipe_file in paths:
        lines += _format_pip_steps(pip)
    notice = _left_out_notice(folder) if mounts_code else ""
    if notice:
        lines.append(f"note   {notice}")
    lines += [f"next   {step}" for step in next_steps]
    print_result({"files": paths, "remote": remote, "recipe": recipe}, *lines, as_json=as_json)


def _format_pip_steps(proposal: program.PipProposal) -> list[str]:
    """Return a line for each pip step of a new recipe, and a line with the packages that it leaves out."""
    lines = [f"pip    {step}" for step in proposal.steps]
    if proposal.left_out:
        lines.append(f"omits  {', '.join(proposal.left_out)}")
    return lines


def _left_out_notice(folder: Path) -> str:
    """Return a line about files of `folder` that a job may need, but that are left out of its code.

    It is empty if there are no such files, or if the code cannot be read.
    """
    from imgkit_builder.jobs import code

    try:
        code_folder = code.read_code_folder(JobRequest.of(code=folder), large=False, report=Silent())
    except ImgkitError:  # imgkit run will report this error
        return ""
    return code.left_out_notice(code_folder, None)


def _select_remote_and_recipe(on: str, recipe: str) -> tuple[str, str]:
    """Return the name of the remote (or "" for none) and the recipe for a new imgkit.toml.

    If the user has not given a value, it is chosen only if there is exactly one possible choice.

    Parameters
    ----------
    on : the value of ``--on``. If it is empty, the only remote is used, or the only remote with this recipe.
    recipe : the value of ``--recipe``. If it is empty, the default recipe of the remote is used.

    Raises
    ------
    UsageError : no recipe is given, and it cannot be taken from a remote.
    """
    remotes = list(config.read_remotes().values())
    remote = config.get_remote(on) if on else _only_remote(remotes, recipe)
    # A remote without a default recipe is used only if the user names a recipe.
    if remote is not None and (recipe or remote.recipe):
        return remote.name, recipe or remote.recipe
    if recipe:
        return "", recipe
    # With several remotes, the hint is to choose one of them.
    if len(remotes) > 1:
        names = ", ".join(item.name for item in remotes)
        message = f"no recipe given, and there are several remotes: {names}"
        raise UsageError(message, where="--recipe", hint="imgkit init --on NAME")
    hint = "imgkit init --recipe mn5; imgkit list names them"
    raise UsageError("no recipe given, and no remote has a default recipe", where="--recipe", hint=hint)


def _only_remote(remotes: Sequence[config.Remote], recipe: str) -> config.Remote | None:
    """Return the only remote in `remotes` that has this recipe, or None if there is not exactly one.

    Parameters
    ----------
    recipe : a name or path. If it is empty, remotes with any recipe count.
    """
    candidates = remotes
    if recipe:
        # `imgkit remote add` stores a shipped recipe by its name, and a file by its path.
        recipe_spellings = (recipe, str(Path(recipe).absolute()))
        candidates = [remote for remote in remotes if remote.recipe in recipe_spellings]
    return candidates[0] if len(candidates) == 1 else None
