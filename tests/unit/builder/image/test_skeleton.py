"""What a build packs of an editable project: enough to install it, and nothing that an edit changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files
from packed_context import git, pack

from imgkit_builder.image import context, skeleton
from imgkit_builder.image.context import BuildContext
from imgkit_builder.recipe.model import CopyStep, PipStep, Recipe

MakeRecipe = Callable[..., Recipe]
BUILD = '[build-system]\nrequires = ["{0}"]\nbuild-backend = "{1}"\n'
SETUPTOOLS = BUILD.format("setuptools", "setuptools.build_meta")
HATCHLING = BUILD.format("hatchling", "hatchling.build")
FLIT = BUILD.format("flit_core", "flit_core.buildapi")
PROJECT = '[project]\nname = "my-letters"\nversion = "1"\n'
SRC = {
    "src/my_letters/__init__.py": "A = 1\n",
    "src/my_letters/model/net.py": "B = 1\n",
    "train.py": "C = 1\n",
}
FLAT = {"my_letters/__init__.py": "A = 1\n", "my_letters/model/__init__.py": "B = 1\n", "data/x.bin": "0"}


@pytest.fixture
def project(tmp_path: Path, make_recipe: MakeRecipe) -> Any:
    """``project({"pyproject.toml": ...})``: a function that packs an editable project with these files."""

    def write(texts: dict[str, str], **step: Any) -> Any:
        folder = write_files(tmp_path / "project", texts)
        pip = PipStep(**{"project": folder, "editable": "/workspace", **step})

        def build(**image: Any) -> BuildContext:
            recipe = replace(make_recipe(pip=(pip,), **image), file=folder / "mine.yaml")
            return pack(recipe, revision=context.code_revision(recipe))

        return build

    return write


def packed(built: BuildContext) -> dict[str, str]:
    """Return the files of the project in the context, with ``stub`` for those that are not its own."""
    contents = {}
    for member in built.members:
        name = member.name.removeprefix("project/0/")
        if name != member.name and member.kind == b"0":
            source = member.source
            contents[name] = "stub" if source is None else source.read_text().removesuffix("\n")
    return contents


@pytest.mark.parametrize("texts", [SRC, FLAT], ids=["src", "flat"])
def test_edit_and_commit_leave_the_context_alone(texts, tmp_path, project):
    build = project({"pyproject.toml": SETUPTOOLS + PROJECT, **texts})
    folder = tmp_path / "project"
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm1")
    before = build()
    for name in texts:
        (folder / name).write_text("edited\n")
    write_files(folder, {"my_letters/deep/er/__init__.py": "", "notes.txt": ""})
    git(folder, "add", ".")
    git(folder, "commit", "-qam2")
    after = build()
    assert (after.sha256, after.manifest.revision) == (before.sha256, "")


def test_packages_become_stubs_beside_what_is_named(project):
    dynamic = '[tool.setuptools.dynamic]\nversion = {attr = "my_letters.about.__version__"}\n'
    texts = {
        "pyproject.toml": SETUPTOOLS + PROJECT.replace('version = "1"', 'readme = "text/R.md"') + dynamic,
        "text/R.md": "read\n",
        "LICENSE": "mine\n",
        "src/my_letters/__init__.py": "A = 1\n",
        "src/my_letters/about.py": "__version__ = '1'\n",
        "tools/run/__init__.py": "",
        "notes.md": "",
    }
    contents = packed(project(texts)())
    assert contents == {
        "pyproject.toml": texts["pyproject.toml"],
        "text/R.md": "read\n",
        "LICENSE": "mine\n",
        "src/my_letters/__init__.py": "stub",
        "src/my_letters/about.py": "__version__ = '1'\n",
    }


def test_flit_reads_a_version_from_the_module(project):
    text = FLIT + '[project]\nname = "my-letters"\ndynamic = ["version", "description"]\n'
    source = '"""Letters."""\n__version__ = "1"\n'
    contents = packed(project({"pyproject.toml": text, "my_letters.py": source, "train.py": ""})())
    assert contents == {"pyproject.toml": text, "my_letters.py": source}


def test_import_without_the_code_says_what_to_do(project):
    built = project({"pyproject.toml": HATCHLING + PROJECT, **SRC})()
    (stub,) = [member.data for member in built.members if member.name.endswith("src/my_letters/__init__.py")]
    with pytest.raises(ImportError) as caught:
        exec(stub, {})  # noqa: S102 - as Python imports it
    assert str(caught.value) == (
        "imgkit: this image has the project without its code, which each run mounts over it: "
        "imgkit run --code DIR"
    )


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (
            {"setup.py": "from setuptools import setup, Extension\nsetup(ext_modules=[1])\n"},
            "its setup.py is a program",
        ),
        (
            {"setup.py": "from setuptools import setup\nsetup(version=open('V').read())\n"},
            "its setup.py is a program",
        ),
        ({"pyproject.toml": BUILD.format("maturin", "maturin")}, "its build backend is maturin"),
        (
            {"pyproject.toml": f'{BUILD.format("x", "hatchling.build")}backend-path = ["b"]\n'},
            "its build backend is hatchling.build",
        ),
        (
            {"pyproject.toml": f"{HATCHLING}[tool.hatch.build.hooks.custom]\npath = 'b.py'\n"},
            "its pyproject.toml has tool.hatch.build.hooks",
        ),
        (
            {"pyproject.toml": f"{SETUPTOOLS}[[tool.setuptools.ext-modules]]\nname = 'a'\n"},
            "its pyproject.toml has tool.setuptools.ext-modules",
        ),
    ],
)
def test_project_that_a_program_builds_is_packed_whole(texts, reason, project, tmp_path, make_recipe):
    contents = packed(project({"pyproject.toml": SETUPTOOLS + PROJECT, "a/b.py": "B = 1\n", **texts})())
    assert contents["a/b.py"] == "B = 1\n"
    step = PipStep(project=tmp_path / "project", editable="/workspace")
    assert [*context.whole_project_notes(make_recipe(pip=(step,)))] == [
        f"mine.yaml:2: all files of the project are in the image, so an edit builds again: {reason}; modules "
        "that it compiles are hidden by the code of a run"
    ]


def test_setup_file_without_a_program_is_fine(tmp_path):
    call = "import setuptools\nif __name__ == '__main__':\n    setuptools.setup(name='x', version='1')\n"
    assert (
        skeleton.unfit_reason(write_files(tmp_path, {"setup.py": call, "pyproject.toml": SETUPTOOLS})) == ""
    )


def test_project_outside_of_the_runs_code_is_packed_whole(project):
    contents = packed(project({"pyproject.toml": SETUPTOOLS + PROJECT, **SRC}, editable="/opt/mine")())
    assert contents["src/my_letters/__init__.py"] == "A = 1\n"


def test_copied_code_is_in_the_image_all_the_same(project, tmp_path):
    built = project({"pyproject.toml": SETUPTOOLS + PROJECT, **SRC})(
        copy=(CopyStep(source=tmp_path / "project"),)
    )
    sources = {member.name: member.source for member in built.members}
    assert sources["copy/0/src/my_letters/__init__.py"] == tmp_path / "project/src/my_letters/__init__.py"
