"""What differs between runtimes or schedulers is in their classes, and no code asks for a name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

from imgkit_builder.jobs.job import RuntimeKind
from imgkit_builder.jobs.systems import MODULES

BUILDER = Path(__file__).resolve().parents[2] / "builder/imgkit_builder"
CLASSES = ("jobs/runtimes/", "jobs/systems/")
NAMES = {*get_args(RuntimeKind), *MODULES}
EXCEPTIONS = {
    "cli/build.py": 2,  # docker is the program that builds: --with docker
    "examine/doctor.py": 1,  # is below `jobs`
    "recipe/check.py": 1,  # a rule of the recipe's own kind
    "recipe/systems.py": 1,  # a rule of the recipe's own kind
}
"""Files with comparisons that are right, and how many."""


def compared_names(text):
    """Yield the names of runtimes and schedulers that a program compares with something, with the line."""
    for node in ast.walk(ast.parse(text)):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        for operand in operands:
            elements = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            for element in elements:
                if isinstance(element, ast.Constant) and element.value in NAMES:
                    yield element.value, element.lineno


def test_no_code_compares_names_of_runtimes_or_schedulers():
    comparisons: dict[str, int] = {}
    for path in sorted(BUILDER.rglob("*.py")):
        file = path.relative_to(BUILDER).as_posix()
        names = list(compared_names(path.read_text(encoding="utf-8")))
        if names and not file.startswith(CLASSES):
            comparisons[file] = len(names)
    assert comparisons == EXCEPTIONS


def test_comparison_with_a_name_is_noticed():
    text = (
        "kind == 'docker' or 'host' in kinds or kind not in ('pyxis', 'other')\n"
        "match system:\n    case 'slurm' | 'none':\n        pass\n"
        "start('docker')"
    )
    names = [("docker", 1), ("host", 1), ("pyxis", 1), ("slurm", 3)]
    assert sorted(compared_names(text)) == sorted(names)
