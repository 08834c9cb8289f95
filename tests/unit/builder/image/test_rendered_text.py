"""The Dockerfile and the definition file as text: order, quoting, traces, and what they refuse."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.image import render
from imgkit_builder.recipe.model import BuildSecret, Constraints, CopyStep, PipStep, Recipe, RunCommand
from imgkit_entrypoints.errors import UsageError

MakeRecipe = Callable[..., Recipe]

BUILDKIT_ONLY = r"<<|--mount|--link|--chmod|--platform|^# *syntax"


@pytest.fixture
def full_text(make_recipe: MakeRecipe) -> str:
    """The Dockerfile of a recipe with something of each kind."""
    recipe = make_recipe(
        apt=("git", "vim=2:9*"),
        pip=(PipStep(packages=("numpy>=1.26,<2",)), PipStep(requirements=Path("/recipes/r.txt"))),
        constraints=Constraints(policy="drop", drop=("flash-attn",)),
        env={"A": "1"},
        run=("make",),
        copy=(CopyStep(source=Path("/recipes/code"), target="/workspace"),),
        labels={"team": "x"},
    )
    return render.render_dockerfile(recipe)


def instructions(text: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", text)
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


def kinds(text: str) -> str:
    return " ".join(line.split()[0] for line in instructions(text))


def test_layers_ordered_by_change_rate(full_text):
    assert kinds(full_text) == "FROM RUN RUN RUN RUN COPY RUN ENV WORKDIR RUN COPY RUN COPY COPY LABEL"


def test_only_what_classic_builders_know(full_text):
    assert not re.search(BUILDKIT_ONLY, full_text, re.MULTILINE)


def test_every_instruction_below_its_trace(full_text):
    lines = full_text.splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"[A-Z]+ ", line)]
    assert len(starts) == 15
    assert all(render.TRACE.fullmatch(lines[number - 1]) for number in starts)


def test_minimal_recipe_has_no_pip_layers(make_recipe):
    text = render.render_dockerfile(make_recipe())
    assert "apt-get" not in text
    assert "constraint.txt" not in text
    assert 'ENV PYTHONNOUSERSITE="1"\n' in text


def test_hash_seed_changes_no_byte():
    code = (
        "from imgkit_builder.image import render; from imgkit_builder.recipe.load import load; "
        "print(render.render_dockerfile(load('mn5-llm')))"
    )
    argv = [sys.executable, "-c", code]
    first, second = (subprocess.check_output(argv, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2"))
    assert first == second


def test_origin_names_recipe_line(make_recipe):
    lines = {("image", "run", 0): 41, ("image", "run", 1): 42}
    lines |= {("image", "apt", number): line for number, line in enumerate((7, 8, 9, 12))}
    recipe = make_recipe(run=("make", "make install"), apt=("a", "b", "c", "d"), lines=lines)
    text = render.render_dockerfile(recipe)

    def origin(line: str) -> str:
        head, _, _ = text.partition(line)
        return render.find_origin(text, head.count("\n") + 1)

    assert origin("RUN make install\n") == "mine.yaml:42"
    assert origin("        c \\\n") == "mine.yaml:7-9, mine.yaml:12"
    assert origin(" --force-reinstall ").startswith("imgkit: ")
    assert origin("# mine for linux/amd64") == ""


def test_base_override_traced_as_option(make_recipe):
    text = render.render_dockerfile(make_recipe(), base="imgkit.local/standin:1")
    assert "# --base (instead of example.org/base:1, mine.yaml:3)\nFROM imgkit.local/standin:1\n" in text


def test_recipes_own_base_is_no_override(make_recipe):
    recipe = make_recipe()
    assert render.render_dockerfile(recipe, base="example.org/base:1") == render.render_dockerfile(recipe)


@pytest.mark.parametrize(
    ("policy", "prefix"),
    [
        ("keep", "PIP_ROOT_USER_ACTION=ignore python3"),
        ("ignore", "PIP_CONSTRAINT='' python3"),
        ("drop", "PIP_CONSTRAINT=/opt/imgkit/base-constraint.txt python3"),
    ],
)
def test_constraint_policy_sets_pips_variable(make_recipe, policy, prefix):
    constraints = Constraints(policy=policy, drop=("x",))
    recipe = make_recipe(pip=(PipStep(packages=("numpy",)),), constraints=constraints)
    step = next(line for line in instructions(render.render_dockerfile(recipe)) if line.endswith("numpy"))
    assert prefix in step
    assert "--constraint /opt/imgkit/constraint.txt" in step


def test_own_labels_beat_the_recipes(make_recipe):
    labels = {"imgkit.recipe": "forged", "org.opencontainers.image.version": "7"}
    text = render.render_dockerfile(make_recipe(labels=labels))
    assert "forged" not in text
    assert 'org.opencontainers.image.version="7"' in text


@pytest.mark.parametrize("command", ["--mount=type=cache make", '["make"]', "cat <<EOF", "echo \\"])
def test_docker_syntax_in_commands_is_inert(make_recipe, command):
    text = render.render_dockerfile(make_recipe(run=(command,)))
    assert any(line.startswith('RUN ["/bin/sh", "-c", ') for line in text.splitlines())


@pytest.mark.parametrize(
    ("image", "key"),
    [
        ({"env": {"A": "1\n2"}}, "image.env.A"),
        ({"labels": {"a": "1\r"}}, "image.labels.a"),
        ({"apt": ("git", "vim\nRUN id")}, "image.apt.1"),
        ({"pip": (PipStep(packages=("numpy\n",)),)}, "image.pip.0.packages.0"),
        ({"run": ("true\0false",)}, "image.run.0.command"),
        ({"workdir": "/a\0b"}, "image.workdir"),
    ],
)
def test_line_end_in_value_refused(make_recipe, image, key):
    with pytest.raises(UsageError, match=f"^mine.yaml:2: {re.escape(key)}: a line end"):
        render.render_dockerfile(make_recipe(**image))


def test_drop_of_a_pattern_refused(make_recipe):
    constraints = Constraints(policy="drop", drop=("torch/d;s/.*//e",))
    with pytest.raises(UsageError, match="is not the name of a distribution"):
        render.render_dockerfile(make_recipe(pip=(PipStep(packages=("numpy",)),), constraints=constraints))


def test_command_after_copy_stands_behind_it(make_recipe):
    late = RunCommand(command="make -C /workspace", after="copy")
    code = CopyStep(source=Path("/recipes/code"))
    lines = {("image", "run", 0): 9, ("image", "run", 1): 10}
    recipe = make_recipe(run=(late, "make"), copy=(code,), lines=lines)
    steps = instructions(render.render_dockerfile(recipe))
    early, copied, last = map(
        steps.index, ("RUN make", 'COPY ["copy/0/", "/workspace/"]', f"RUN {late.command}")
    )
    assert early < copied < last
    assert steps[last + 1].startswith('COPY ["imgkit/system.json"')  # which changes with every commit
    assert f"\n# mine.yaml:9\nRUN {late.command}\n" in render.render_dockerfile(recipe)


def test_variables_of_a_pip_step_stay_there(make_recipe):
    steps = (PipStep(packages=("a",), env={"MAX_JOBS": "8", "FLAGS": "-O2 $x"}), PipStep(packages=("b",)))
    first, second = (
        line
        for line in instructions(render.render_dockerfile(make_recipe(pip=steps)))
        if "pip install" in line and "--no-index" not in line
    )
    assert "MAX_JOBS=8 FLAGS='-O2 $x' python3 -m pip install" in first
    assert "MAX_JOBS" not in second


def test_authorities_come_before_the_network(make_recipe):
    recipe = make_recipe(ca=(Path("/recipes/a.crt"), Path("/recipes/b.crt")), apt=("git",))
    assert kinds(render.render_dockerfile(recipe)).startswith("FROM COPY COPY RUN ENV RUN")
    post = render.render_definition(recipe).partition("%post")[2]
    certificates, variable = post.index("update-ca-certificates"), post.index("export CURL_CA_BUNDLE")
    assert 0 < certificates < variable < post.index("apt-get")


def test_project_is_installed_late_its_needs_early(make_recipe):
    pip_steps = (
        PipStep(project=Path("/recipes/a")),
        PipStep(project=Path("/recipes"), editable="/work space/b/"),
    )
    recipe = make_recipe(pip=pip_steps, run=("make",), copy=(CopyStep(source=Path("/recipes/code")),))
    lines = [
        line.rpartition("--constraint /opt/imgkit/constraint.txt ")[2]
        for line in instructions(render.render_dockerfile(recipe))
    ]
    expected = [
        "--requirement /opt/imgkit/requirements-0.txt",
        "--requirement /opt/imgkit/requirements-1.txt",
        "RUN make",
        'COPY ["project/0/", "/opt/imgkit/project/0/"]',
        "/opt/imgkit/project/0 && rm -rf /opt/imgkit/project",
        'COPY ["project/1/", "/work space/b/"]',
        "--editable '/work space/b'",
        'COPY ["copy/0/", "/workspace/"]',
    ]
    assert [line for line in lines if line in expected] == expected
    post = render.render_definition(recipe).partition("%post")[2]
    copy = "cp -RP -- /opt/imgkit/project/1/. '/work space/b'"
    assert 0 < post.index(copy) < post.index("--editable '/work space/b'")


def with_secrets(make_recipe: MakeRecipe) -> Recipe:
    return make_recipe(
        secrets=(
            BuildSecret(id="github", env="GITHUB_TOKEN"),
            BuildSecret(id="netrc", file=Path("/x/netrc")),
        ),
        pip=(PipStep(packages=("a",), secrets=("github",)), PipStep(packages=("b",))),
        run=(
            RunCommand(command="git clone https://$GITHUB_TOKEN@x && [ 1 ]", secrets=("github", "netrc")),
            "make",
        ),
    )


def test_step_with_secrets_mounts_only_its_own(make_recipe):
    lines = instructions(render.render_dockerfile(with_secrets(make_recipe)))
    pip, run = [line for line in lines if "--mount" in line]
    assert re.findall(r"type=secret,id=(\w+)", pip) == ["github"]
    assert re.findall(r"type=secret,id=(\w+)", run) == ["github", "netrc"]
    wrapper = "/run/imgkit/with-secrets"
    script = f"--mount=type=bind,source=imgkit/with-secrets,target={wrapper} sh {wrapper}"
    assert f"{script} github=GITHUB_TOKEN -- env PYTHONDONTWRITEBYTECODE=1 " in pip
    assert f"{script} github=GITHUB_TOKEN netrc -- sh -c 'git clone https://$GITHUB_TOKEN@x" in run


# ---- the definition file


def section(text: str, name: str) -> list[str]:
    body = text.split(f"\n%{name}\n", 1)[1].split("\n%", 1)[0]
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_sections_from_the_same_model(make_recipe):
    recipe = make_recipe(apt=("git",), env={"A": "1"}, labels={"team": "x"})
    text = render.render_definition(recipe)
    assert "\nBootstrap: docker\n# mine.yaml:3\nFrom: example.org/base:1\n" in text
    assert section(text, "environment") == ["export PYTHONNOUSERSITE=1", "export A=1"]
    assert "team x" in section(text, "labels")
    assert section(text, "post")[0] == "set -e"


def test_nasty_variables_survive_the_shell(make_recipe):
    value = 'it\'s $HOME "q" \\ `id` # x'
    lines = section(render.render_definition(make_recipe(env={"A": value})), "environment")
    assert shlex.split(lines[-1]) == ["export", f"A={value}"]


def test_files_are_context_members(make_recipe):
    recipe = make_recipe(
        pip=(PipStep(requirements=Path("/r.txt")),), copy=(CopyStep(source=Path("/x"), target="/a b/"),)
    )
    text = render.render_definition(recipe)
    files = {"imgkit/requirements-0.txt /opt/imgkit/requirements-0.txt", "copy/0 /opt/imgkit/copy/0"}
    assert files <= set(section(text, "files"))
    assert "cp -RP -- /opt/imgkit/copy/0/. '/a b'" in section(text, "post")


def test_run_steps_keep_to_themselves(make_recipe):
    post = section(render.render_definition(make_recipe(run=("cd / && exit 0",), workdir="/w")), "post")
    assert "(cd -- /w && sh -c 'cd / && exit 0')" in post


def test_braces_of_a_build_argument_stay_in_a_dockerfile(make_recipe):
    assert "echo {{ name }}" in render.render_dockerfile(make_recipe(run=("echo {{ name }}",)))


def test_label_with_a_space_in_its_name_is_refused(make_recipe):
    with pytest.raises(UsageError) as caught:
        render.render_definition(make_recipe(labels={"two words": "x"}))
    reason = "white space in its name or around its value cannot appear in a definition file"
    assert caught.value.what == f"label 'two words': {reason}"
