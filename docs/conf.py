"""Sphinx configuration of the documentation site; `ci/docs` builds it."""

from __future__ import annotations

import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

import docstrings  # noqa: E402  (needs the line above)
import generated  # noqa: E402

from imgkit_entrypoints import __version__  # noqa: E402

project = "imgkit"
copyright = "the imgkit authors, Apache-2.0"
version = release = __version__

# A block that names no language is commands or output, not Python.
highlight_language = "text"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",  # [source] beside each name of the Python API
    "sphinx_copybutton",
    "sphinx_design",  # tabs
]
exclude_patterns = ["_build", "_ext", "_static"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
# Quotes and dashes of commands and messages stay as they are typed.
smartquotes = False
nitpicky = True
nitpick_ignore_regex = [
    # Annotations name modules of the standard library and private aliases: there is no page to link to.
    ("py:.*", r"(collections|contextlib|pathlib|typing|types|enum|argparse|os|_io)\..*"),
    ("py:.*", r"(Path|Mapping|Sequence|Callable|Iterable|Iterator|Any|Literal|NoneType|optional|default.*)"),
    ("py:class", r"torch\..*"),
    # Parts of the results of the Python API that have no section on its page.
    ("py:class", r"imgkit_builder\.(data|jobs|oci|sif|recipe\.model)\..*"),
    ("py:class", "Options|AnyRequest|Origin|Format(Name)?|CompressionChoice|ProjectFile"),
    ("py:exc", "LargeContext"),
    ("py:class", r"imgkit_entrypoints\.(rules|known_issues)\..*|Rule\(\)"),
    ("py:class", r"imgkit_entrypoints\.run\.program\..*"),
    ("py:class", r"tuple\[.*|.*\]"),
]
suppress_warnings = ["myst.xref_ambiguous"]

autodoc_typehints = "signature"
autodoc_mock_imports = ["torch"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"imgkit {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["reference/generated/schemas"]
html_copy_source = False
html_show_sphinx = False
HOMEPAGE = metadata("imgkit-hpc").get("Project-URL", "").removeprefix("Homepage, ")
html_theme_options = {
    # "View this page" on each page leads to its source, as soon as the project has an address.
    "source_repository": HOMEPAGE,
    "source_branch": "main",
    "source_directory": "docs/",
    "light_css_variables": {"color-brand-primary": "#1d5fa8", "color-brand-content": "#1d5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db4f0", "color-brand-content": "#7db4f0"},
}


def source_without_links(app: Sphinx, module: str) -> tuple[str, dict[str, object]] | None:
    """Return the source of a module that Sphinx 9 cannot parse: it has an f-string in an annotation."""
    if module != "imgkit_builder.recipe.model":
        return None
    return (HERE.parent / f"builder/{module.replace('.', '/')}.py").read_text(encoding="utf-8"), {}


def setup(app: Sphinx) -> None:
    """Write the pages that are generated from the code before Sphinx looks for pages."""
    generated.write(HERE / "reference/generated")
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("viewcode-find-source", source_without_links)
