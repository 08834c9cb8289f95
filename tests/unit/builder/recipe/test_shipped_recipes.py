from __future__ import annotations

import re

import pytest

from imgkit_builder.recipe.load import load
from imgkit_entrypoints import system
from imgkit_recipes import FOLDER, recipe_names, recipe_path

BASES = {
    "mn5": ("nvcr.io/nvidia/pytorch:24.03-py3", ("linux/amd64",), "slurm", "infiniband"),
    "mn5-llm": ("nvcr.io/nvidia/pytorch:24.03-py3", ("linux/amd64",), "slurm", "infiniband"),
    "rcp": ("nvcr.io/nvidia/pytorch:24.03-py3", ("linux/amd64",), "runai", "roce"),
    "mlo": ("nvcr.io/nvidia/pytorch:24.03-py3", ("linux/amd64",), "runai", "roce"),
    "lambda": ("nvcr.io/nvidia/pytorch:24.03-py3", ("linux/amd64",), "mpi", "tcp"),
    "olivia": ("nvcr.io/nvidia/pytorch:26.03-py3", ("linux/arm64",), "slurm", "slingshot"),
    "olivia-eap": ("nvcr.io/nvidia/pytorch:26.03-py3", ("linux/arm64",), "pbs", "slingshot"),
    "cpu": ("python:3.11-slim-bookworm", ("linux/amd64", "linux/arm64"), "standalone", "tcp"),
}


def test_shipped_recipes_are_these():
    assert set(recipe_names()) == set(BASES)


@pytest.mark.parametrize("name", sorted(BASES))
def test_shipped_recipe_says_what_it_should(name):
    recipe = load(name)
    values = (recipe.image.base, recipe.image.platforms, recipe.system.scheduler, recipe.system.fabric.kind)
    assert values == BASES[name]
    assert recipe.description
    assert recipe.warnings == ()
    assert load(recipe_path(name)) == recipe
    assert system.from_json(system.to_json(recipe.system)) == recipe.system


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_fact_has_its_source(file):
    """The source is on the fact's line, or above it in the same block."""
    lines = file.read_text().splitlines()
    assert lines[0].startswith("#")
    for number, line in enumerate(lines):
        if not re.match(r" +(?:base|gpus|cpus|nics|line_rate_Gbps|required|sif|host|chunk|[A-Z_]+):", line):
            continue
        indent = len(line) - len(line.lstrip())
        block = [line]
        for above in reversed(lines[:number]):
            if len(above) - len(above.lstrip()) < indent:
                break
            block.append(above)
        assert any("#" in text for text in block), line


def test_llm_stack_is_the_hands_ons():
    recipe = load("mn5-llm")
    first, second = recipe.image.pip
    assert first.requirements is not None
    assert "deepspeed==0.13.1" in first.requirements.read_text().split()
    assert second.packages == ("flash-attn==2.5.5",)
    assert second.options == ("--no-build-isolation",)


@pytest.mark.parametrize("name", ["olivia", "olivia-eap"])
def test_slingshot_recipes_carry_the_guard(name):
    env = load(name).system.env
    assert env["NCCL_PROTO"] == "^LL128"
    assert {env[f"FI_CXI_RDZV_{end}"] for end in ("EAGER_SIZE", "GET_MIN", "THRESHOLD")} == {"0"}


def test_no_recipe_bakes_tuning_or_names_devices():
    recipes = [load(name) for name in recipe_names()]
    for recipe in recipes:
        assert recipe.image.env == {}
        assert recipe.system.env.keys().isdisjoint({"NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_NET"})
    assert len({recipe.sha256 for recipe in recipes}) == len(recipes)
