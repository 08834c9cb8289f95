"""Select the files of an editable project that are needed to install it, without the project's code.

``pip install --editable`` writes only paths into the image, such as ``/workspace/src``. Each run mounts its
code there. So the build packs only pyproject.toml, the files to which it refers, and stubs in place of the
top-level packages. An edit of the code then changes neither the build context nor the image.

This is what build backends read, as observed with setuptools 68 and 84, hatchling 1.33, flit-core 4.2,
poetry-core 2.5, pdm-backend 2.5 and uv-build 0.13:

* They find the project's packages by the names of folders and of ``__init__.py``.
* setuptools links a flat layout by the names of its top-level packages, and a layout with ``src`` by that
  folder.
* A version may be read from a module: ``attr`` of setuptools, ``path`` of hatchling, the module of flit.
"""

from __future__ import annotations

import ast
import fnmatch
import posixpath
import re
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from imgkit_builder.image.members import Code, TarMember, memory_file
from imgkit_builder.recipe import problems
from imgkit_builder.recipe.requirements import PYPROJECT, canonical_name
from imgkit_entrypoints import files
from imgkit_entrypoints.system import WORKSPACE

CODE_FOLDER = f"/{WORKSPACE}"
"""The folder of an image over which each run mounts its code."""

_SETUPTOOLS = "setuptools.build_meta"
_SETUPTOOLS_BACKENDS = (_SETUPTOOLS, "setuptools.build_meta:__legacy__")
_FLIT = "flit_core.buildapi"
_BACKENDS = (
    *_SETUPTOOLS_BACKENDS,
    "hatchling.build",
    _FLIT,
    "poetry.core.masonry.api",
    "pdm.backend",
    "uv_build",
)
_TOOLS = ("setuptools", "flit", "poetry", "pdm")
"""The tables below ``tool`` in which these backends refer to files and packages. The tables of hatch and uv
are not listed, because they also contain other settings."""
_BUILD_PROGRAMS = (
    *("setuptools.ext-modules", "setuptools.cmdclass", "setuptools.data-files", "setuptools-rust"),
    *("hatch.build.hooks", "hatch.build.force-include", "hatch.build.targets.wheel.hooks"),
    *("hatch.build.targets.wheel.force-include", "hatch.build.targets.wheel.shared-data"),
    *("hatch.metadata.hooks.custom", "poetry.build", "pdm.build.custom-hook"),
)
"""The keys below ``tool`` that make a backend compile code, run a program of the project, or install other
files."""
_ROOT_FILES = (PYPROJECT, "setup.py", "setup.cfg")
_LICENSES = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "AUTHORS*")
"""The files that setuptools and hatchling add to the metadata if pyproject.toml names none."""
_DECLARATIVE_NAMES = frozenset(
    {"setuptools", "setup", "find_packages", "find_namespace_packages", "__name__"}
)
_COMPILING_KEYWORDS = frozenset(
    {"ext_modules", "cmdclass", "cffi_modules", "rust_extensions", "data_files", "distclass"}
)
_SETUP_CFG_VERSION = re.compile(r"^version\s*=\s*attr:\s*([\w.]+)", re.MULTILINE)
# Larger files of a project are not read, because a hostile one could fill the memory.
_MOST_BYTES = 1 << 20
_STUB = b"""\
raise ImportError(
    "imgkit: this image has the project without its code, "
    "which each run mounts over it: imgkit run --code DIR"
)
"""


def unfit_reason(project: Path) -> str:
    """Return why all files of a project must be packed, for example ``its setup.py is a program``.

    This is necessary if the installation compiles modules or runs a program of the project, because the
    program may read any file. The result is empty if a skeleton (the project without its code) is enough for
    the installation.
    """
    pyproject = _read_toml(project)
    backend = _get_backend(pyproject)
    # The key "backend-path" means that the backend is part of the project, so it may do anything.
    if backend not in _BACKENDS or "backend-path" in _table(pyproject, "build-system"):
        return f"its build backend is {backend}"
    for key in _BUILD_PROGRAMS:
        *parents, name = key.split(".")
        if _table(pyproject, "tool", *parents).get(name):
            return f"its {PYPROJECT} has tool.{key}"
    if backend == "pdm.backend" and (project / "pdm_build.py").exists():
        return "its pdm_build.py is a program"
    # setuptools runs setup.py, and a program may read any file of the project.
    setup_py = _read_text(project / "setup.py")
    if setup_py and not _is_declarative(setup_py):
        return "its setup.py is a program"
    return ""


def select_skeleton(code: Code, members: Iterable[TarMember]) -> tuple[TarMember, ...]:
    """Select the files that pip needs to install an editable project, whose code each run mounts.

    `members` are all files and folders of the project. The result contains pyproject.toml, the files to which
    it refers, and the folders in which the build backend looks for packages. The content of top-level modules
    is replaced by `_STUB`.
    """
    members_by_name = {posixpath.relpath(member.name, code.context_folder): member for member in members}
    project = _Project.read(code.source, members_by_name)
    needed_names = set()
    for name, member in members_by_name.items():
        is_needed = project.needs_folder if member.kind == tarfile.DIRTYPE else project.needs_content
        if is_needed(name):
            needed_names.add(name)
    stub_names = {name for name in members_by_name.keys() - needed_names if project.is_module(name)}
    # The folders that contain these files are needed, too.
    needed_names |= _collect_parents(needed_names | stub_names)
    skeleton = []
    # In the order of `members`. Files that are in neither of the two sets are left out.
    for name, member in members_by_name.items():
        if name in needed_names:
            skeleton.append(member)
        elif name in stub_names:
            skeleton.append(memory_file(member.name, _STUB))
    return tuple(skeleton)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Project:
    """The names in a project's folder that its build backend may look for."""

    configuration_texts: frozenset[str]
    """The texts for the backend in pyproject.toml, setup.cfg and setup.py.

    Any may be a path, a package or a pattern. So a file or folder of this name is needed.
    """
    license_patterns: tuple[str, ...]
    version_modules: tuple[str, ...]
    """The modules from which the version is read, as paths without a suffix: ``letters/version``.

    Their content is needed, and no stub can replace it.
    """
    modules: frozenset[str]
    """The names of modules that may be the whole project, such as ``letters`` for ``letters.py``.

    The backend looks for these files, but does not read them, so a stub is enough.
    """
    python_folders: frozenset[str]
    """Folders that contain Python files, also in subfolders. Only in them can there be packages."""
    packages: frozenset[str]
    """Folders with an ``__init__.py``."""

    @classmethod
    def read(cls, folder: Path, names: Collection[str]) -> _Project:
        """Make an object from the files in `folder` that configure the build backend.

        `names` are the paths of all files and folders of the project, relative to `folder`.
        """
        pyproject = _read_toml(folder)
        setup_cfg = _read_text(folder / "setup.cfg")
        configuration_texts = _list_configuration_texts(pyproject, setup_cfg, _read_text(folder / "setup.py"))
        module_name = canonical_name(str(_get_metadata(pyproject).get("name", ""))).replace("-", "_")
        python_files = [name for name in names if name.endswith(".py")]
        has_python_folder = any("/" in name for name in python_files)
        # The module of the project has the name of the project, or a name in its configuration.
        modules = {module_name, *configuration_texts}
        if _get_backend(pyproject) in _SETUPTOOLS_BACKENDS and not has_python_folder:
            # setuptools looks for modules beside pyproject.toml only if the project has no package. Then a
            # module may have any name.
            modules.update(name.removesuffix(".py") for name in python_files)
        return cls(
            configuration_texts=configuration_texts,
            license_patterns=tuple(_list_license_patterns(pyproject)),
            version_modules=(
                *_list_setuptools_version_modules(pyproject, setup_cfg),
                *_list_flit_version_modules(pyproject, module_name),
            ),
            # setup.py and conftest.py belong to tools. They are no modules of the project.
            modules=frozenset(modules - {"setup", "conftest"}),
            python_folders=_collect_parents(python_files),
            packages=frozenset(posixpath.dirname(name) for name in python_files if _is_init(name)),
        )

    def needs_content(self, name: str) -> bool:
        """Return whether the build backend reads the content of the file `name`."""
        if name in _ROOT_FILES or name in self.configuration_texts:
            return True
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.license_patterns):
            return True
        if not name.endswith(".py"):
            return False
        # Is it a module with the version? Such modules are written as "letters" for letters/__init__.py, and
        # "letters/version" for letters/version.py.
        module = name.removesuffix("/__init__.py").removesuffix(".py")
        # The module may be in the project's folder, or in a subfolder such as `src`.
        _, _, module_below_subfolder = module.partition("/")
        return module in self.version_modules or module_below_subfolder in self.version_modules

    def is_module(self, name: str) -> bool:
        """Return whether the file `name` is a top-level package or module that a stub can replace."""
        folder, base_name = posixpath.split(name)
        if _is_init(name):
            return self.needs_folder(folder)
        module = base_name.removesuffix(".py")
        return folder in ("", "src") and module != base_name and module in self.modules

    def needs_folder(self, name: str) -> bool:
        """Return whether the build backend may need the folder `name` to find the packages."""
        # The configuration may name a folder by its path, or by the name of its package: "letters.model".
        package_name = name.replace("/", ".")
        if name == "." or name in self.configuration_texts or package_name in self.configuration_texts:
            return True
        if name not in self.python_folders:
            return False
        # Folders inside a package are not needed, because the editable installation refers only to the
        # package itself.
        if any(parent in self.packages for parent in _iterate_parents(name)):
            return False
        top_folder, _, _ = name.partition("/")
        return self._may_hold_packages(top_folder)

    def _may_hold_packages(self, top_folder: str) -> bool:
        """Return whether the build backend may look for packages in a top-level folder of the project.

        If the project has no folder ``src``, any folder may hold packages. Otherwise ``src`` holds them, and
        another folder counts only if the project's configuration refers to it.
        """
        if top_folder == "src" or "src" not in self.python_folders:
            return True
        if "." in self.configuration_texts:  # setuptools: where = ["."]
            return True
        # A text in the configuration may begin with the name of a top-level folder: "my_letters",
        # "my_letters.model", "my_letters/model" or "my_*".
        patterns = {re.split(r"[/.]", text)[0] for text in self.configuration_texts}
        return any(fnmatch.fnmatchcase(top_folder, pattern) for pattern in patterns)


def _list_configuration_texts(content: Mapping[str, Any], setup_cfg: str, setup_py: str) -> frozenset[str]:
    """Return all texts in a project's configuration for the build backend, as normalised paths.

    Any of them may name a file or package that the backend needs. Texts that are no names do no harm, because
    at worst the skeleton becomes larger.
    """
    texts = {*_list_backend_texts(content), *re.split(r"[\s,=]+", setup_cfg)}
    texts.update(_list_texts_in_python(setup_py))
    return frozenset(posixpath.normpath(text) for text in texts if text)


def _collect_parents(names: Iterable[str]) -> frozenset[str]:
    """Return the folders above all of `names`."""
    return frozenset(folder for name in names for folder in _iterate_parents(name))


def _is_init(name: str) -> bool:
    """Return whether the file `name` is the ``__init__.py`` of a package."""
    return posixpath.basename(name) == "__init__.py"


def _iterate_parents(name: str) -> Iterator[str]:
    """Yield the folders above `name`, and last the project's folder, ``.``.

    ``a/b/c`` gives ``a/b``, ``a``, ``.``.
    """
    while name not in ("", "."):
        name = posixpath.dirname(name) or "."
        yield name


def _read_text(path: Path) -> str:
    """Return the text of a file in the project, or "" if the file does not exist or cannot be read."""
    try:
        return files.read_text(path, most_bytes=_MOST_BYTES, errors="replace")
    except (OSError, ValueError):
        return ""


def _read_toml(project: Path) -> Mapping[str, Any]:
    """Return the content of pyproject.toml.

    If the file is missing or damaged, the result is empty. A check of the recipe reports that problem.
    """
    try:
        content: Mapping[str, Any] = problems.parse_toml(_read_text(project / PYPROJECT))
    except ValueError:
        return {}
    return content


def _table(content: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the table at `keys` of a TOML file, or an empty mapping if the file has no table there."""
    table: Any = content
    for key in keys:
        table = table.get(key)
        if not isinstance(table, dict):
            return {}
    return cast("Mapping[str, Any]", table)


def _get_backend(content: Mapping[str, Any]) -> object:
    """Return the build backend that pyproject.toml names. pip uses setuptools if it names none (PEP 517)."""
    return _table(content, "build-system").get("build-backend", _SETUPTOOLS)


def _get_metadata(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata of the project. Values in ``project`` override those in Poetry's own table."""
    return {**_table(content, "tool", "poetry"), **_table(content, "project")}


def _list_backend_texts(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield every key and text in the tables that a build backend reads."""
    tools = _table(content, "tool")
    hatch = _table(content, "tool", "hatch")
    tables = [content.get("project")]
    tables += [tools.get(tool) for tool in _TOOLS]
    tables += [hatch.get(key) for key in ("version", "build", "metadata")]
    tables.append(_table(content, "tool", "uv").get("build-backend"))
    yield from _list_texts(tables)


def _list_texts(value: object) -> Iterator[str]:
    """Yield every key and text in `value`, which may be nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from _list_texts(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _list_texts(item)


def _list_license_patterns(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the patterns that match the project's license files."""
    for table in (_table(content, "project"), _table(content, "tool", "setuptools")):
        patterns = table.get("license-files", [])
        if isinstance(patterns, list):
            yield from (pattern for pattern in patterns if isinstance(pattern, str))
    yield from _LICENSES


def _list_setuptools_version_modules(content: Mapping[str, Any], setup_cfg: str) -> Iterator[str]:
    """Yield the modules from which setuptools may read the version, as paths without a suffix.

    For example, ``letters/version`` for the attribute ``letters.version.__version__``. `content` is that of
    pyproject.toml.
    """
    attributes = _SETUP_CFG_VERSION.findall(setup_cfg)
    version = _table(content, "tool", "setuptools", "dynamic", "version").get("attr")
    if isinstance(version, str):
        attributes.append(version)
    for attribute in attributes:  # "letters.version.__version__"
        module, _, _ = attribute.rpartition(".")
        yield module.replace(".", "/")


def _list_flit_version_modules(content: Mapping[str, Any], module_name: str) -> Iterator[str]:
    """Yield the module from which flit reads the version and the description: the main module of the project.

    It is a path without a suffix. Nothing is yielded for a project with another backend, or if pyproject.toml
    has both values. `module_name` is the name of the project in the form of a module name.
    """
    if _get_backend(content) != _FLIT:
        return
    dynamic = _table(content, "project").get("dynamic", [])
    if "version" in dynamic or "description" in dynamic:
        flit_module = _table(content, "tool", "flit", "module").get("name", module_name)
        yield str(flit_module).replace(".", "/")


def _is_declarative(setup_py: str) -> bool:
    """Return whether a setup.py does nothing but call ``setup`` of setuptools with literal values."""
    try:
        tree = ast.parse(setup_py)
    except (SyntaxError, ValueError):
        return False
    return all(_is_declarative_node(node) for node in ast.walk(tree))


def _is_declarative_node(node: ast.AST) -> bool:
    """Return whether a node in the syntax tree of a setup.py may be part of a plain call of ``setup``.

    Imports of setuptools, names such as ``find_packages``, and keywords that do not compile code are allowed.
    Nodes of any other kind are allowed, because the names and keywords in them are nodes of their own.
    """
    if isinstance(node, ast.Import):
        return [item.name for item in node.names] == ["setuptools"]
    if isinstance(node, ast.ImportFrom):
        return node.module == "setuptools"
    if isinstance(node, ast.Name):
        return node.id in _DECLARATIVE_NAMES
    return not (isinstance(node, ast.keyword) and node.arg in _COMPILING_KEYWORDS)


def _list_texts_in_python(text: str) -> Collection[str]:
    """Return the texts in a declarative setup.py, which only calls ``setup``."""
    texts = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    return texts
