"""The rendered Dockerfile under the real classic builder: values come out as they went in."""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

import pytest
from labkit import docker, output

from imgkit_builder.image import context
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import Constraints, CopyStep, Image, PipStep, Recipe, RunCommand
from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.system import SystemFacts

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("classic")]

NASTY = {
    "SPACES": "two  spaces and\ta tab",
    "DOLLAR": "$HOME ${PATH} $$",
    "QUOTES": 'it\'s "quoted" `id`',
    "BACKSLASH": "\\n \\ end\\",
    "HASH": "# no comment",
    "EQUALS": "a=b=c",
    "EMPTY": "",
    "ACCENTS": "grüße 日本",
}
ODD = '/odd $x "q" it\'s \\b'


def build(packed, tag):
    """Build as the command line's classic builder does; its output."""
    with packed.open() as source:
        result = subprocess.run(
            ["docker", "build", "--force-rm", "-t", tag, "-"],
            input=source.read(),
            env={"DOCKER_BUILDKIT": "0", "PATH": "/usr/local/bin:/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    assert result.returncode == 0, result.stdout.decode()
    return result.stdout.decode()


def recipe(standin, code, **image):
    values = {
        "base": standin,
        "pip": (PipStep(packages=("numpy>=1.26,<3",), options=("--no-index",)),),
        "constraints": Constraints(policy="drop", drop=("NumPy",)),
        "env": NASTY,
        "workdir": ODD,
        "copy": (CopyStep(source=code, target=f"{ODD}/code", ignore=("*.csv",)),),
        "run": (
            RunCommand(command='echo "$DOLLAR|$QUOTES" > /ran && pwd >> /ran'),
            RunCommand(command="[ -s /ran ] # <<EOF"),
        ),
        "labels": {"nasty.label": '\\ $HOME "q" it\'s', "two words": "x"},
        **image,
    }
    return Recipe(
        name="nasty",
        image=Image(**values),  # type: ignore[arg-type]
        system=SystemFacts(title="test"),
        file=Path("/nasty.yaml"),
        sha256="0" * 64,
        positions={},
    )


def packed(recipe):
    base = BaseImage(name=recipe.image.base, standin=True)
    return context.pack_context(recipe, base=base, platform="linux/amd64", revision="")


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nasty") / "code"
    (folder / "sub dir").mkdir(parents=True)
    (folder / "sub dir" / "a b.sh").write_text("#!/bin/sh\necho copied\n")
    (folder / "sub dir" / "a b.sh").chmod(0o700)
    (folder / ".hidden").write_text("")
    (folder / "left-out.csv").write_text("")
    (folder / "link").symlink_to("sub dir/a b.sh")
    return folder


@pytest.fixture(scope="module")
def image(standin, code):
    """An image with every value that builders are known to mistake."""
    tag = f"imgkit-test-{secrets.token_hex(4)}:nasty"
    build(packed(recipe(standin, code)), tag)
    yield tag
    docker("image", "rm", tag)


def inside(image, *argv):
    return output("docker", "run", "--rm", "--entrypoint", argv[0], image, *argv[1:])


def test_values_are_exact(image):
    config = json.loads(docker("image", "inspect", image))[0]["Config"]
    env = dict(entry.split("=", 1) for entry in config["Env"])
    assert {key: env[key] for key in NASTY} == NASTY
    assert env["PYTHONNOUSERSITE"] == "1"
    assert config["WorkingDir"] == ODD
    assert config["Labels"]["nasty.label"] == '\\ $HOME "q" it\'s'
    assert config["Labels"]["two words"] == "x"
    assert config["Labels"]["imgkit.standin"] == "1"


def test_run_steps_see_env_and_workdir(image):
    assert inside(image, "cat", "/ran") == f"{NASTY['DOLLAR']}|{NASTY['QUOTES']}\n{ODD}\n"


def test_copied_files_are_exact(image):
    text = inside(image, "find", f"{ODD}/code", "-mindepth", "1", "-printf", "%P %m %u %l\n")
    assert sorted(text.splitlines()) == [
        ".hidden 644 root ",
        "link 777 root sub dir/a b.sh",
        "sub dir 755 root ",
        "sub dir/a b.sh 755 root ",
    ]
    assert inside(image, f"{ODD}/code/link") == "copied\n"


def test_commands_are_on_path(image):
    names = [command.name for command in COMMANDS]
    assert inside(image, "sh", "-c", 'for c; do command -v "$c"; done', "-", *names).count("\n") == len(names)
    assert "usage" in inside(image, "dist-train", "--help")
    assert json.loads(inside(image, "dist-env", "--json"))
    assert "No broken requirements" in inside(image, "python3", "-m", "pip", "check")


def test_constraints_hold_and_drop(image):
    assert inside(image, "cat", "/opt/imgkit/constraint.txt").startswith("torch==")
    constraint = inside(image, "cat", "/opt/imgkit/base-constraint.txt")
    assert "torch==" in constraint
    assert "numpy==" not in constraint


def test_baked_files_are_readable_by_all(image):
    listing = inside(image, "find", "/opt/imgkit", "-printf", "%m %f\n").splitlines()
    assert {line.split()[0] for line in listing} == {"755", "644"}
    assert json.loads(inside(image, "cat", "/opt/imgkit/system.json"))["title"] == "test"


def test_touched_sources_change_no_layer(image, standin, code):
    for path in code.rglob("*"):
        if not path.is_symlink():
            path.touch()
    output = build(packed(recipe(standin, code)), image)
    steps = output.count("\nStep ") + output.startswith("Step ")
    assert output.count("Using cache") == steps - 1  # every one but FROM


def test_pip_cannot_replace_the_bases_torch(standin, code):
    """Not even where the recipe ignores the base's own constraint file."""
    step = PipStep(packages=("torch==1.0",), options=("--no-index",))
    conflicting = packed(recipe(standin, code, pip=(step,), constraints=Constraints(policy="ignore")))
    with pytest.raises(AssertionError, match=r"The user requested \(constraint\) torch=="):
        build(conflicting, f"imgkit-test-{secrets.token_hex(4)}:torch")
