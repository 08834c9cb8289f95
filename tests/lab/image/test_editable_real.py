"""pip installs the skeleton of an editable project, and Python then imports the code of a run."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from file_tree import write_files

from imgkit_builder.image import context
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import Image, PipStep, Recipe
from imgkit_entrypoints.system import SystemFacts

PROJECT = (
    '[project]\nname = "my-letters"\nversion = "1"\n[project.scripts]\nletters = "my_letters.cli:main"\n'
)
SETUPTOOLS = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
# Without dev-mode-dirs, hatchling needs the package `editables`, too.
HATCHLING = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.hatch.build]
dev-mode-dirs = ["{}"]
"""
HATCH_VERSION = '[tool.hatch.version]\npath = "src/my_letters/about.py"\npattern = "\'(?P<version>.)\'"\n'
NAMED = '[tool.setuptools]\npackages = ["my_letters", "my_letters.sub"]\n'
ATTR = '[tool.setuptools.dynamic]\nversion = {attr = "my_letters.about.VERSION"}\n'
DYNAMIC = PROJECT.replace('version = "1"', 'dynamic = ["version"]')
PACKAGE = {
    "my_letters/__init__.py": "from my_letters.sub import deep\n",
    "my_letters/sub/deep.py": "WHO = 'run'\n",
    "my_letters/cli.py": "from my_letters.sub.deep import WHO\ndef main(): print(WHO, __file__)\n",
    "my_letters/about.py": "VERSION = '1'\n",
}
FLAT = {**PACKAGE, "train.py": "", "data/x": ""}
SRC = {f"src/{name}": text for name, text in PACKAGE.items()}


def unpack_skeleton(project, target):
    """Write what the build would copy to the folder of the editable project."""
    pip = PipStep(project=project, editable="/workspace")
    recipe = Recipe(
        name="r",
        image=Image(base="b", pip=(pip,)),
        system=SystemFacts(),
        file=project,
        sha256="0",
        positions={},
    )
    built = context.pack_context(recipe, base=BaseImage(name="b"), platform="linux/amd64", revision="")
    built.unpack(target.with_name("context"))
    shutil.move(target.with_name("context") / "project/0", target)


@pytest.mark.parametrize(
    ("toml", "texts"),
    [
        pytest.param(SETUPTOOLS + PROJECT, FLAT, id="setuptools-flat"),
        pytest.param(SETUPTOOLS + PROJECT, SRC, id="setuptools-src"),
        pytest.param(SETUPTOOLS + DYNAMIC + ATTR, SRC, id="setuptools-attr"),
        pytest.param(SETUPTOOLS + PROJECT + NAMED, FLAT, id="setuptools-named"),
        pytest.param(HATCHLING.format(".") + PROJECT, FLAT, id="hatchling-flat"),
        pytest.param(HATCHLING.format("src") + DYNAMIC + HATCH_VERSION, SRC, id="hatchling-version"),
    ],
)
def test_installed_skeleton_leads_to_the_code_of_the_run(toml, texts, tmp_path):
    project = write_files(tmp_path / "project", {"pyproject.toml": toml, **texts})
    workspace = tmp_path / "workspace"
    unpack_skeleton(project, workspace)
    prefix = tmp_path / "prefix"
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--prefix", str(prefix), "--editable", str(workspace)], check=True)
    shutil.rmtree(workspace)
    shutil.copytree(project, workspace)
    (site,) = prefix.glob("lib/python3*/site-packages")
    program = f"import site; site.addsitedir({str(site)!r}); from my_letters import cli; cli.main()"
    printed = subprocess.run(
        [sys.executable, "-IBc", program], check=True, capture_output=True, text=True
    ).stdout
    source = next(name for name in texts if name.endswith("cli.py"))
    assert printed == f"run {workspace}/{source}\n"
    assert (prefix / "bin/letters").exists()
