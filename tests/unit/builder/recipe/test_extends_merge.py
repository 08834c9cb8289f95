"""``extends``: maps merge, lists of packages and steps append, everything else overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_builder.recipe.load import APPENDED, ATOMIC, load, merge
from imgkit_builder.recipe.problems import KeyPath, Position, RecipeErrors
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, YamlNode, to_data

Write = Callable[..., Path]


def tree(data: Any, name: str = "") -> YamlNode:
    """Return the node of `data`. With a name of a file, the node is from that file, and so is every text."""
    position = Position(file=Path(name), line=1, column=1)
    if isinstance(data, dict):
        entries = {key: tree(value, name) for key, value in data.items()}
        return Table(position=position, entries=entries, keys=dict.fromkeys(data, position))
    if isinstance(data, list):
        return Items(position=position, items=tuple(tree(item, name) for item in data))
    return Scalar(position=position, text=name or data)


def reference(parent: Any, child: Any, path: KeyPath) -> Any:
    """The rule in its shortest form, on plain data."""
    if isinstance(parent, dict) and isinstance(child, dict) and path not in ATOMIC:
        return {
            key: reference(parent[key], child[key], (*path, key))
            if key in parent and key in child
            else child.get(key, parent.get(key))
            for key in parent | child
        }
    if isinstance(parent, list) and isinstance(child, list) and path in APPENDED:
        return parent + child
    return child


KEYS = st.sampled_from(["image", "system", "apt", "run", "env", "constraints", "runtime", "binds", "drop"])
DATA = st.recursive(
    st.sampled_from(["a", "b"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=4),
    max_leaves=12,
)
LISTS = st.lists(st.sampled_from(["a", "b"]), max_size=3)
MAPS = st.dictionaries(KEYS, st.sampled_from(["a", "b"]), max_size=3)
# Shaped like recipes, so that the special places are met often; any of them may hold something else instead.
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "image": st.fixed_dictionaries(
            {}, optional={"apt": LISTS | DATA, "constraints": MAPS | DATA, "env": MAPS | DATA, "drop": LISTS}
        )
        | DATA,
        "system": st.fixed_dictionaries(
            {}, optional={"runtime": st.fixed_dictionaries({}, optional={"binds": LISTS, "env": MAPS}) | DATA}
        ),
        "extra": DATA,
    },
)


@given(first=TABLES, second=TABLES, third=TABLES)
def test_merge_agrees_with_the_rule(first, second, third):
    both = merge(tree(first), tree(second), ())
    expected = reference(first, second, ())
    assert to_data(both) == expected
    assert to_data(merge(both, tree(third), ())) == reference(expected, third, ())


@given(parent=TABLES, child=TABLES)
def test_every_value_keeps_the_place_that_states_it(parent, child):
    merged = merge(tree(parent, "old"), tree(child, "new"), ())
    nodes = [node for _, node in merged.walk()]
    assert all(node.text == node.position.file.name for node in nodes if isinstance(node, Scalar))


def test_child_adds_packages_and_overrides_the_rest(write):
    write(
        """
        description: the parent
        image:
          base: python:3.11-slim
          platform: amd64
          apt: [git]
          env: {A: one, B: two}
          constraints: {drop: [numpy]}
        system:
          runtime: {binds: [/a], options: [--nv]}
          queue: {required: [account, time], options: [--x]}
        """,
        "parent.yaml",
    )
    recipe = load(
        write("""
            extends: parent.yaml
            image:
              platform: [arm64]
              apt: [curl]
              env: {B: three}
              constraints: {drop: [scipy]}
            system:
              runtime: {binds: [/b]}
              queue: {required: [time]}
        """)
    )
    assert recipe.name == "mine"
    assert recipe.description == "the parent"
    assert recipe.image.base == "python:3.11-slim"
    assert recipe.image.platforms == ("linux/arm64",)
    assert recipe.image.apt == ("git", "curl")
    assert recipe.image.env == {"A": "one", "B": "three"}
    assert recipe.image.constraints.drop == ("scipy",)
    assert recipe.system.runtime.binds == ("/a", "/b")
    assert recipe.system.runtime.options == ("--nv",)
    assert recipe.system.queue.required == ("time",)
    assert recipe.system.queue.options == ("--x",)
    assert recipe.where("image", "apt", 0) == "parent.yaml:6"
    assert recipe.where("image", "apt", 1) == "mine.yaml:5"
    assert recipe.where("image", "env", "B") == "mine.yaml:6"


def test_chain_may_leave_and_enter_the_shipped(write):
    write("extends: mn5\nimage: {apt: [git]}\n", "middle.yaml")
    recipe = load(write("extends: ./middle.yaml\nimage: {apt: [curl]}\n"))
    assert recipe.image.apt == ("git", "curl")
    assert recipe.image.base.startswith("nvcr.io/nvidia/pytorch:")


def test_child_cannot_hide_a_parents_secret_warning(write):
    write("image: {base: 'python:3', env: {MY_TOKEN: abc}}\n", "parent.yaml")
    (warning,) = load(write("extends: parent.yaml\n")).warnings
    assert warning.position.file.name == "parent.yaml"


def test_recipe_outside_without_a_fault_is_extended(write):
    write("image: {base: 'python:3'}\n", "shared/base.yaml")
    assert load(write("extends: ../shared/base.yaml\n", "own/mine.yaml")).image.base == "python:3"


@pytest.mark.parametrize("prefix", ["", "system: {scheduler: slurm}\n"])
def test_long_chain_is_refused(write, prefix):
    for number in range(60):
        write(f"extends: ./r{number + 1}.yaml\n", f"r{number}.yaml")
    with pytest.raises(RecipeErrors, match="more than 50 files extend each other"):
        load(write(f"{prefix}extends: ./r0.yaml\n"))
