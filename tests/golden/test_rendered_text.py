"""What every shipped recipe renders to, byte by byte, and that linters have nothing to say about it.

After a wanted change: ``IMGKIT_UPDATE_GOLDEN=1 pytest tests/golden``, then read the diff.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imgkit_builder.image import render
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Recipe
from imgkit_entrypoints import __version__
from imgkit_recipes import recipe_names

HERE = Path(__file__).parent
EXPECTED = HERE / "expected"
SHIPPED = recipe_names()
RECIPES: dict[str, str | Path] = {
    **{name: name for name in SHIPPED},
    "everything": HERE / "recipes" / "everything.yaml",
    "locked": HERE / "recipes" / "locked.yaml",
}
RENDERERS: dict[str, Callable[[Recipe], str]] = {
    "Dockerfile": render.render_dockerfile,
    "def": render.render_definition,
}


def loaded(name: str) -> Recipe:
    """The recipe, with its lock where one lies beside it."""
    recipe = load(RECIPES[name])
    return lock_file.attach_lock(recipe, platform="linux/amd64") if name == "locked" else recipe


def current(name: str, form: str) -> str:
    """The text as it is now, without what every release and every change of a system part changes."""
    text = RENDERERS[form](loaded(name))
    text = text.replace(__version__, "VERSION")
    return re.sub(r"(imgkit\.recipe\.sha256\W+)[0-9a-f]{64}", r"\1SHA256", text)


@pytest.mark.parametrize("form", RENDERERS)
@pytest.mark.parametrize("name", RECIPES)
def test_text_is_as_recorded(name, form):
    file = EXPECTED / f"{name}.{form}"
    text = current(name, form)
    if os.environ.get("IMGKIT_UPDATE_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "wanted? IMGKIT_UPDATE_GOLDEN=1 pytest tests/golden"


def test_no_record_without_recipe():
    recorded = {path.name for path in EXPECTED.iterdir()}
    assert recorded == {f"{name}.{form}" for name in RECIPES for form in RENDERERS}


def test_dockerfiles_pass_hadolint(tmp_path, find_linter):
    files = []
    for name in RECIPES:
        files.append(tmp_path / f"{name}.Dockerfile")
        files[-1].write_text(render.render_dockerfile(loaded(name)), encoding="utf-8")
    result = subprocess.run(
        [find_linter("hadolint"), "--config", HERE.parents[1] / ".hadolint.yaml", *files],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_shell_text_passes_shellcheck(tmp_path, find_linter):
    scripts = []
    for name in RECIPES:
        recipe = loaded(name)
        texts = [*run_lines(render.render_dockerfile(recipe)), post(render.render_definition(recipe))]
        for number, text in enumerate(texts):
            scripts.append(tmp_path / f"{name}-{number}.sh")
            scripts[-1].write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    # SC2016, "expressions don't expand in single quotes": the shell that a run step gets does expand them.
    result = subprocess.run(
        [find_linter("shellcheck"), "--shell=sh", "--exclude=SC2016", *scripts],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("bad", ["cd /x", 'rm -rf $HOME/"$(ls)"', "[ 1 = 1 ]; echo $?x$y"])
def test_shellcheck_sees_run_steps(tmp_path, bad, find_linter):
    """The check above is one: a step with a known mistake does not pass it."""
    (tmp_path / "bad.yaml").write_text(f"image: {{base: 'a:1', run: [{json.dumps(bad + ' $unset')}]}}")
    script = tmp_path / "bad.sh"
    script.write_text(
        "#!/bin/sh\n" + "\n".join(run_lines(render.render_dockerfile(load(tmp_path / "bad.yaml")))) + "\n"
    )
    assert subprocess.run([find_linter("shellcheck"), script], capture_output=True).returncode == 1


def run_lines(dockerfile: str) -> Iterator[str]:
    """The shell text of every RUN."""
    for body in re.findall(r"^RUN ((?:.*\\\n)*.*)$", dockerfile, re.MULTILINE):
        yield json.loads(body)[2] if body.startswith('["/bin/sh"') else body


def post(definition: str) -> str:
    """The text of ``%post``."""
    return definition.split("\n%post\n", 1)[1].split("\n%environment\n", 1)[0]
