"""``imgkit list``, ``check`` and ``render``: verbs for recipes."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer

from imgkit_builder.base import files
from imgkit_builder.cli.common import (
    JSON,
    RECIPE,
    confirm_large_code,
    error_data,
    flag_option,
    format_columns,
    name_argument,
    output_option,
    print_result,
    problem_data,
)
from imgkit_builder.cli.options import field_option
from imgkit_builder.image import render
from imgkit_builder.image.context import BuildContext, code_revision, pack_context, refuse_unpackable_code
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe import bases, host_effects, lock_file, system_files
from imgkit_builder.recipe.load import load, load_system
from imgkit_builder.recipe.problems import warning_lines
from imgkit_builder.recipe.schema import schema_json
from imgkit_builder.workflow.build_request import BuildRequest
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, EXIT_USAGE, UsageError
from imgkit_recipes import recipe_names

if TYPE_CHECKING:
    from imgkit_builder.recipe.model import Recipe
    from imgkit_builder.recipe.problems import Problem


def load_recipe(ref: str, *, build_args: Sequence[str] = ()) -> Recipe:
    """Load a recipe, and print its warnings on stderr."""
    recipe = load(ref, build_args=build_args)
    terminal.print_messages(*warning_lines(recipe.warnings))
    return recipe


def verb_list(
    of_bases: bool = flag_option(
        "--bases", "List what is known of NVIDIA's PyTorch images instead, for image.base."
    ),
    of_systems: bool = flag_option("--systems", "List known clusters and how each has been tested."),
    as_json: bool = JSON,
) -> None:
    """List the shipped recipes.

    \b
    Examples:
      imgkit list
      imgkit list --systems
      imgkit list --json
      imgkit list --bases          (--json: with the source of each value)
    """
    if of_bases and of_systems:
        raise UsageError(
            "--bases cannot be combined with --systems", where="--systems", hint="imgkit list --bases"
        )
    if of_bases:
        _list_bases(as_json=as_json)
    elif of_systems:
        _list_systems(as_json=as_json)
    else:
        _list_recipes(as_json=as_json)


def _list_recipes(*, as_json: bool) -> None:
    """Print the shipped recipes as a table or as JSON."""
    json_rows, table_rows = [], []
    for recipe in map(load, recipe_names()):
        image, system = recipe.image, recipe.system
        platforms = ",".join(platform.removeprefix("linux/") for platform in image.platforms)
        table_rows.append((recipe.name, platforms, system.scheduler, image.base, recipe.description))
        json_rows.append(
            {
                "name": recipe.name,
                "description": recipe.description,
                "base": image.base,
                "current_base": image.current_base,
                "platforms": image.platforms,
                "scheduler": system.scheduler,
                "fabric": system.fabric.kind,
                "file": recipe.file,
            }
        )
    print_result({"recipes": json_rows}, *format_columns(table_rows), as_json=as_json)


def _list_bases(*, as_json: bool) -> None:
    """Print the base images that imgkit knows, with the versions of the software in them."""
    known_bases = bases.load_table()
    # All bases have the same columns, so the first one gives the titles of the table.
    column_names = [name for name, _ in known_bases[0].list_columns()]
    table = [["TAG", *(name.replace("_", "-").upper() for name in column_names)]]
    json_rows = []
    for base in known_bases:
        json_row: dict[str, Any] = {"reference": base.reference, "tag": base.tag}
        table_row = [base.tag]
        for name, version in base.list_columns():
            json_row[name] = dataclasses.asdict(version) if version else None
            table_row.append(version.value if version else "unknown")
        json_rows.append(json_row)
        table.append(table_row)
    print_result({"bases": json_rows}, *format_columns(table), as_json=as_json)


def _list_systems(*, as_json: bool) -> None:
    """Print each known cluster and how its values were tested.

    The table shows only the strongest test, and the JSON shows all tests.
    """
    json_rows, table_rows = [], []
    for system in map(load_system, system_files.find_systems()):
        facts = system.facts
        is_of_site = system_files.is_site(system.file)
        # The path shows that the file belongs to a site and is not shipped with imgkit.
        title = f"{facts.title} ({system.file})" if is_of_site else facts.title
        table_rows.append((system.name, facts.scheduler, system.proof.strongest, title))
        json_rows.append(
            {
                "name": system.name,
                "title": facts.title,
                "scheduler": facts.scheduler,
                "runtime": facts.runtime.kind,
                "proof": dataclasses.asdict(system.proof),
                "site": is_of_site,
                "file": system.file,
            }
        )
    print_result({"systems": json_rows}, *format_columns(table_rows), as_json=as_json)


def verb_check(
    files: list[str] = name_argument("FILE...", "Files or names of recipes.", None),
    strict: bool = flag_option(
        "--strict", "Also list what a recipe does on this machine; a warning fails: exit code 1."
    ),
    schema: bool = flag_option("--schema", "Print the JSON Schema of recipe files, for editors, then exit."),
    as_json: bool = JSON,
) -> None:
    """Check recipes and report every problem in one run.

    Also checks the folders that recipes copy for files that cannot go into an image.
    Exit code 2 if a recipe has a problem. Checking executes nothing: run
    --strict on a recipe from someone else before you build it or submit its jobs.

    \b
    Examples:
      imgkit check mine.yaml
      imgkit check stranger.yaml --strict
      imgkit check mine.yaml --json
      imgkit check --schema > recipe.schema.json
      # first line of a recipe, for editors with a YAML language server:
      # yaml-language-server: $schema=recipe.schema.json
    """
    if schema:
        if files:
            raise UsageError("--schema takes no FILE", where="--schema", hint="imgkit check --schema")
        terminal.print_document(schema_json() + "\n")
        return
    if not files:
        raise UsageError("no recipe given", where="FILE", hint="imgkit check FILE...")
    rows = []
    exit_code = 0
    for file in files:
        findings = _find_problems(file, strict=strict)
        file_exit_code = findings.exit_code(strict=strict)
        # The worst recipe decides about the exit code of the verb.
        exit_code = max(exit_code, file_exit_code)
        rows.append(
            {
                "recipe": file,
                "passed": file_exit_code == 0,
                "problems": _problems_to_dicts(findings.error) if findings.error else [],
                "warnings": [problem_data(warning) for warning in findings.warnings],
            }
        )
        if not as_json:
            _print_findings(findings)
            terminal.print_results(f"{_VERDICTS[file_exit_code]:4} {file}")
    if as_json:
        print_result({"passed": not exit_code, "recipes": rows}, as_json=True)
    raise typer.Exit(exit_code)


class _Findings(NamedTuple):
    """What the check of a recipe has found."""

    warnings: Sequence[Problem]
    error: UsageError | None
    """None for a correct recipe."""

    def exit_code(self, *, strict: bool) -> int:
        """Return the exit code for this recipe. Warnings count only with `strict`."""
        if self.error:
            return EXIT_USAGE
        return EXIT_NO if strict and self.warnings else 0


_VERDICTS = {0: "ok", EXIT_NO: "warn", EXIT_USAGE: "bad"}
"""Exit code for a recipe -> the word that is printed before its name."""


def _print_findings(findings: _Findings) -> None:
    """Print the warnings and the error of a recipe on stderr."""
    error_lines = f"imgkit: {findings.error}".split("\n") if findings.error else ()
    terminal.print_messages(*warning_lines(findings.warnings), *error_lines)


def _find_problems(file: str, *, strict: bool) -> _Findings:
    """Load the recipe `file`, and return its warnings and its error.

    With `strict`, there are also warnings about values that affect a machine outside of the image, such as
    folders of a machine that jobs can access.
    """
    warnings: list[Problem] = []
    try:
        recipe = load(file)
        warnings += recipe.warnings
        if strict:
            warnings += host_effects.find_host_effects(recipe)
        refuse_unpackable_code(recipe)
    except UsageError as error:
        # Warnings that were found before the error are still worth printing.
        return _Findings(warnings, error)
    return _Findings(warnings, error=None)


def _problems_to_dicts(error: UsageError) -> list[dict[str, Any]]:
    """Return the JSON form of the problems in `error`.

    An error that is not about the text of the recipe becomes one problem without a key.
    """
    data = error_data(error)["error"]
    if data.get("problems"):
        return list(data["problems"])
    return [{"what": data["what"], "where": data["where"], "hint": data["hint"], "key": ""}]


def verb_render(
    recipe: str = RECIPE,
    form: Literal["dockerfile", "def"] = typer.Option(
        "dockerfile",
        "--format",
        help="Output format: dockerfile, or def for singularity and apptainer.",
    ),
    base: str | None = field_option(BuildRequest, "base"),
    platform: str | None = typer.Option(
        None,
        "--platform",
        metavar="PLATFORM",
        help="linux/amd64 or linux/arm64 (default: the recipe's first).",
    ),
    output: Path | None = output_option("FILE", "Write to this file instead of stdout."),
    context: Path | None = typer.Option(
        None, "--context", metavar="FILE", help="Also write the build context, a tar of all copied files."
    ),
    build_args: list[str] = field_option(BuildRequest, "build_args"),
    no_lock: bool = flag_option("--no-lock", "Ignore the recipe's lock."),
    large: bool = field_option(BuildRequest, "large"),
) -> None:
    """Print the Dockerfile or definition file of a recipe.

    A comment above each instruction names its line in the recipe. The same
    recipe and lock give the same bytes on every machine.

    \b
    Examples:
      imgkit render mn5
      imgkit render ./mine.yaml -o Dockerfile
      imgkit render mn5 --context mn5.tar && docker build -t mn5 - < mn5.tar
      imgkit render mn5 --format def -o mn5.def
    """
    loaded_recipe = load_recipe(recipe, build_args=build_args)
    base = bases.select_base(base, loaded_recipe)
    if not no_lock:
        loaded_recipe = lock_file.attach_lock(
            loaded_recipe, platform=platform or loaded_recipe.image.platforms[0], base=base
        )
        # A lock names its base by digest, and its packages fit only that image.
        base = loaded_recipe.lock.base.exact if loaded_recipe.lock else base
    make = render.render_dockerfile if form == "dockerfile" else render.render_definition
    text = make(loaded_recipe, base=base, platform=platform)
    if context is not None:
        _write_context(loaded_recipe, context, base=base, platform=platform, large=large)
    if output is not None:
        files.write_file(output, text)
    else:
        terminal.print_document(text)


def _write_context(
    recipe: Recipe, file: Path, *, base: str | None, platform: str | None, large: bool
) -> None:
    """Write the build context of the recipe, which contains all files that a build gets, to `file` as a tar.

    Parameters
    ----------
    base, platform : the options of ``imgkit render``. None means the recipe's value.
    large : whether the user has allowed code of more than 1 GB.
    """

    # `confirm_large_code` calls this again if the user agrees to large code.
    def pack(large: bool) -> BuildContext:
        return pack_context(
            recipe,
            base=BaseImage(name=base or recipe.image.base),
            platform=platform or recipe.image.platforms[0],
            revision=code_revision(recipe),
            large=large,
        )

    context = confirm_large_code(pack, large=large)
    with context.open() as source, files.replace_file(file) as target:
        shutil.copyfileobj(source, target, files.CHUNK_BYTES)
