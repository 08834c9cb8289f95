"""Verbs for recipes: list, show, check, render."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import (
    BASE_HELP,
    LARGE,
    RESULT_JSON,
    columns,
    complete_names,
    problem_data,
    show,
    with_leave,
)
from imgkit_builder.workflow.build import warning_lines
from imgkit_builder.workflow.names import RECIPE_SUFFIXES
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO, EXIT_USAGE, UsageError

if TYPE_CHECKING:
    from imgkit_builder.delta.descriptor import FileFacts
    from imgkit_builder.engine.images import ImageFacts
    from imgkit_builder.recipe.model import Recipe
    from imgkit_builder.recipe.problems import Problem


def load_recipe(ref: str, *, build_args: Sequence[str] = ()) -> Recipe:
    """Load a recipe and print its warnings on stderr."""
    from imgkit_builder.recipe.load import load

    recipe = load(ref, build_args=build_args)
    terminal.err(*warning_lines(recipe.warnings))
    return recipe


def verb_list(
    bases: bool = typer.Option(
        False, "--bases", help="List what is known of NVIDIA's PyTorch images instead, for image.base."
    ),
    of_systems: bool = typer.Option(
        False, "--systems", help="List known clusters and how each has been tested."
    ),
    as_json: bool = RESULT_JSON,
) -> None:
    """List the shipped recipes.

    \b
    Examples:
      imgkit list
      imgkit list --systems
      imgkit list --json
      imgkit list --bases          (--json: with the source of each value)
    """
    if bases and of_systems:
        raise UsageError(
            "--bases cannot be combined with --systems", where="--systems", hint="imgkit list --bases"
        )
    if bases:
        _list_bases(as_json=as_json)
        return
    if of_systems:
        _list_systems(as_json=as_json)
        return
    from imgkit_builder.recipe.load import load
    from imgkit_recipes import recipe_names

    recipes = [load(name) for name in recipe_names()]
    if as_json:
        rows = [
            {
                "name": recipe.name,
                "description": recipe.description,
                "base": recipe.image.base,
                "current_base": recipe.image.current_base,
                "platforms": recipe.image.platforms,
                "scheduler": recipe.system.scheduler,
                "fabric": recipe.system.fabric.kind,
                "file": str(recipe.file),
            }
            for recipe in recipes
        ]
        show({"schema": 1, "recipes": rows}, as_json=True)
        return
    table = [
        (
            recipe.name,
            ",".join(platform.removeprefix("linux/") for platform in recipe.image.platforms),
            recipe.system.scheduler,
            recipe.image.base,
            recipe.description,
        )
        for recipe in recipes
    ]
    terminal.out(*columns(table))


def _list_bases(*, as_json: bool) -> None:
    from imgkit_builder.recipe.bases import table

    if as_json:
        rows = [{"reference": base.reference, **dataclasses.asdict(base)} for base in table()]
        show({"schema": 1, "bases": rows}, as_json=True)
        return
    lines = [(base.tag, *(cell.value if cell else "unknown" for _, cell in base.cells())) for base in table()]
    heads = (name.replace("_", "-").upper() for name, _ in table()[0].cells())
    terminal.out(*columns([("TAG", *heads), *lines]))


def _list_systems(*, as_json: bool) -> None:
    """Print each system with the strongest test of its values, or with all of them as JSON."""
    from imgkit_builder.recipe import system_files
    from imgkit_builder.recipe.load import load_system

    systems = [load_system(name) for name in system_files.find_all()]
    if as_json:
        rows = [
            {
                "name": one.name,
                "title": one.facts.title,
                "scheduler": one.facts.scheduler,
                "runtime": one.facts.runtime.kind,
                "proof": dataclasses.asdict(one.proof),
                "site": system_files.is_site(one.file),
                "file": str(one.file),
            }
            for one in systems
        ]
        show({"schema": 1, "systems": rows}, as_json=True)
        return
    table = [
        (
            one.name,
            one.facts.scheduler,
            one.proof.strongest,
            one.facts.title + (f" ({one.file})" if system_files.is_site(one.file) else ""),
        )
        for one in systems
    ]
    terminal.out(*columns(table))


def verb_show(
    recipe: str = typer.Argument(
        ...,
        metavar="RECIPE|IMAGE|FILE",
        autocompletion=complete_names,
        help="A recipe, an image, or a .sif or delta file.",
    ),
    as_json: bool = RESULT_JSON,
) -> None:
    """Show a recipe, an image, a .sif or a delta.

    For a recipe, show each value and the file and line that it comes from. A name
    without a colon or slash is a recipe; write NAME:TAG for an image.

    \b
    Examples:
      imgkit show mn5
      imgkit show ./mine.yaml --json
      imgkit show mn5:latest
      imgkit show mn5.sif
    """
    from imgkit_builder.delta import descriptor

    facts: FileFacts | ImageFacts | None = None
    if descriptor.is_file(recipe):
        facts = descriptor.file_facts(recipe)
    elif _is_image(recipe):
        from imgkit_builder.engine.images import image_facts

        facts = image_facts(recipe)
    if facts is not None:
        show(facts.to_dict(), *facts.lines(), as_json=as_json)
        return
    from imgkit_builder.recipe import targets

    text = targets.described_json(load_recipe(recipe))
    if as_json:
        terminal.document(text.rstrip() + "\n")
    else:
        terminal.out(*targets.table(text))


def _is_image(name: str) -> bool:
    """Whether `name` can only be an image reference: it has a tag, digest or slash and is no file."""
    if name.endswith(RECIPE_SUFFIXES) or name.startswith((".", "/", "~")):
        return False
    try:
        return (":" in name or "/" in name) and not Path(name).exists()
    except OSError:  # too long for a file name, but not for an image
        return True


def verb_check(
    files: list[str] = typer.Argument(
        None, metavar="FILE...", autocompletion=complete_names, help="Files or names of recipes."
    ),
    strict: bool = typer.Option(
        False, "--strict", help="Also list what a recipe does on this machine; a warning fails: exit code 1."
    ),
    schema: bool = typer.Option(
        False, "--schema", help="Print the JSON Schema of recipe files, for editors, then exit."
    ),
    as_json: bool = RESULT_JSON,
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
        _print_schema(files)
        return
    if not files:
        raise UsageError("no recipe given", where="FILE", hint="imgkit check FILE...")
    if as_json:
        _check_as_json(files, strict=strict)
        return
    from imgkit_builder.image.context import check_code
    from imgkit_builder.recipe.problems import RecipeErrors

    failed: list[UsageError] = []
    warned = False
    for file in files:
        try:
            recipe = load_recipe(file)
            check_code(recipe)
        except UsageError as error:
            failed.append(error)
            terminal.out(f"bad  {file}")
        else:
            doubts = _host_effects(recipe) if strict else ()
            terminal.err(*warning_lines(doubts))
            doubtful = strict and bool(doubts or recipe.warnings)
            warned = warned or doubtful
            terminal.out(f"{'warn' if doubtful else 'ok  '} {file}")
    problems = [problem for error in failed if isinstance(error, RecipeErrors) for problem in error.problems]
    others = [error for error in failed if not isinstance(error, RecipeErrors)]
    # What is raised is printed last.
    for other in others if problems else others[:-1]:
        terminal.err(*f"imgkit: {other}".split("\n"))
    if problems:
        # A parent that several files extend is read once for each of them.
        raise RecipeErrors(dict.fromkeys(problems))
    if others:
        raise others[-1]
    if warned:
        raise typer.Exit(EXIT_NO)


def _print_schema(files: list[str]) -> None:
    from imgkit_builder.recipe.schema import schema_json

    if files:
        raise UsageError("--schema takes no FILE", where="--schema", hint="imgkit check --schema")
    terminal.document(schema_json() + "\n")


def _host_effects(recipe: Recipe) -> tuple[Problem, ...]:
    from imgkit_builder.recipe import host_effects

    return host_effects.warnings(recipe)


def _check_as_json(files: list[str], *, strict: bool) -> None:
    from imgkit_builder.image.context import check_code
    from imgkit_builder.recipe.load import load
    from imgkit_builder.recipe.problems import RecipeErrors

    rows: list[dict[str, Any]] = []
    for file in files:
        problems: list[dict[str, Any]] = []
        warnings: list[dict[str, Any]] = []
        try:
            recipe = load(file)
            doubts = (*recipe.warnings, *(_host_effects(recipe) if strict else ()))
            warnings = [problem_data(warning) for warning in doubts]
            check_code(recipe)
        except RecipeErrors as error:
            problems = [problem_data(problem) for problem in error.problems]
        except UsageError as error:
            problems = [{"what": error.what, "where": error.where, "hint": error.hint, "key": ""}]
        good = not problems and not (strict and warnings)
        rows.append({"recipe": file, "passed": good, "problems": problems, "warnings": warnings})
    passed = all(row["passed"] for row in rows)
    show({"schema": 1, "passed": passed, "recipes": rows}, as_json=True)
    if not passed:
        raise typer.Exit(EXIT_USAGE if any(row["problems"] for row in rows) else EXIT_NO)


class RenderFormat(str, enum.Enum):
    """Formats of a rendered recipe."""

    DOCKERFILE = "dockerfile"
    DEF = "def"


def verb_render(
    recipe: str = typer.Argument(
        metavar="RECIPE|FILE",
        autocompletion=complete_names,
        help="A shipped recipe (imgkit list) or a .yaml file.",
    ),
    form: RenderFormat = typer.Option(
        RenderFormat.DOCKERFILE,
        "--format",
        help="Output format: dockerfile, or def for singularity and apptainer.",
    ),
    base: str | None = typer.Option(None, "--base", metavar="REF", help=BASE_HELP),
    platform: str | None = typer.Option(
        None,
        "--platform",
        metavar="PLATFORM",
        help="linux/amd64 or linux/arm64 (default: the recipe's first).",
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Write to this file instead of stdout."
    ),
    context: Path | None = typer.Option(
        None, "--context", metavar="FILE", help="Also write the build context, a tar of all copied files."
    ),
    build_args: list[str] = typer.Option(
        [], "--build-arg", metavar="NAME=VALUE", help="Value for the recipe's image.args; repeatable."
    ),
    no_lock: bool = typer.Option(False, "--no-lock", help="Ignore the recipe's lock."),
    large: bool = LARGE,
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
    from imgkit_builder.base import files
    from imgkit_builder.image import render
    from imgkit_builder.recipe import bases, lock_file

    loaded = load_recipe(recipe, build_args=build_args)
    base = bases.chosen(base, loaded)
    if not no_lock:
        wanted = platform or loaded.image.platforms[0]
        loaded = lock_file.follow(loaded, platform=wanted, base=base)
        base = loaded.lock.base.exact if loaded.lock else base
    make = render.dockerfile if form is RenderFormat.DOCKERFILE else render.definition
    text = make(loaded, base=base, platform=platform)
    if context is not None:
        from imgkit_builder.image.context import pack, revision
        from imgkit_builder.oci.manifest import BaseImage

        found = with_leave(
            lambda large: pack(
                loaded,
                base=BaseImage(name=base or loaded.image.base),
                platform=platform or loaded.image.platforms[0],
                revision=revision(loaded.file.parent),
                large=large,
            ),
            large=large,
        )
        with found.open() as source, files.writing(context) as target:
            while chunk := source.read(1 << 20):
                target.write(chunk)
    if output is not None:
        files.put(output, text)
    else:
        terminal.document(text)
