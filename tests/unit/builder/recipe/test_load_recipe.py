"""What a recipe's file becomes, and which files are refused; cli/refusals has more.

Each recipe in ``malformed`` is refused with its message in ``malformed.txt``. No switch rewrites that file:
whoever changes a message edits it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Constraints, PipStep
from imgkit_builder.recipe.problems import RecipeErrors
from imgkit_builder.recipe.yaml_tree import MAX_BYTES
from imgkit_entrypoints.errors import UsageError

Write = Callable[..., Path]
SMALLEST = "image: {base: 'python:3.11-slim'}\n"
MALFORMED = Path(__file__).parent / "malformed"
CASES = sorted(path.name for path in MALFORMED.glob("*.yaml"))


def problems(file: Path | str) -> list[str]:
    with pytest.raises(RecipeErrors) as caught:
        load(file)
    return [str(problem).split("\n")[0].partition("mine.yaml:")[2] for problem in caught.value.problems]


# ---- what comes out


def test_smallest_recipe_has_defaults(write):
    recipe = load(write(SMALLEST))
    assert recipe.name == "mine"
    assert recipe.image.platforms == ("linux/amd64",)
    assert recipe.image.constraints == Constraints(policy="keep")
    assert recipe.image.workdir == "/workspace"
    assert recipe.system.scheduler == "standalone"
    assert recipe.warnings == ()
    assert ("image", "base") in recipe.positions
    assert ("image", "workdir") not in recipe.positions


def test_short_forms_become_full_values(write):
    text = "image: {base: 'python:3', platform: [arm64, linux/amd64], constraints: {drop: [numpy]}}"
    image = load(write(text)).image
    assert image.platforms == ("linux/arm64", "linux/amd64")
    assert image.constraints == Constraints(policy="drop", drop=("numpy",))


def test_each_list_item_keeps_its_line(write):
    recipe = load(
        write("""\
            image:
              base: python:3.11-slim
              apt:
                - git
                - curl
        """)
    )
    assert recipe.where("image", "apt", 1) == "mine.yaml:5"
    assert recipe.where("image", "apt", 7) == "mine.yaml:4"  # the list itself, where it begins
    assert recipe.where("system", "title") == "mine.yaml"


def test_paths_are_taken_from_the_stating_file(write):
    write("numpy\n", "parent/req.txt")
    write("x = 1\n", "parent/code/x.py")
    write(
        """
        image:
          base: python:3.11-slim
          pip: [{requirements: req.txt}]
          copy: [{source: code}]
        """,
        "parent/parent.yaml",
    )
    child = write("extends: parent/parent.yaml\n")
    recipe = load(child)
    assert recipe.image.pip == (PipStep(requirements=child.parent / "parent/req.txt"),)
    assert recipe.image.copy[0].source == child.parent / "parent/code"


def test_anchors_expand(write):
    recipe = load(
        write("""\
            image:
              base: python:3.11-slim
              env: &common
                A: one
                B: two
              labels: *common
        """)
    )
    assert recipe.image.labels == {"A": "one", "B": "two"}
    assert recipe.where("image", "labels", "A") == "mine.yaml:4"


def test_quoted_and_tagged_text_stays_text(write):
    entries = '{A: "24.10", B: !!str 3:00:00, C: \'0022\', D: "yes"}'
    recipe = load(write(f"image: {{base: 'python:3', env: {entries}}}"))
    assert recipe.image.env == {"A": "24.10", "B": "3:00:00", "C": "0022", "D": "yes"}


def test_windows_line_ends_and_mark_are_read(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"\xef\xbb\xbfimage:\r\n  base: python:3.11-slim\r\n  apt: [Git]\r\n")
    assert problems(file)[0].startswith("3:9: image.apt[0]: 'Git'")


def test_column_counts_characters_not_bytes(write):
    file = write("image: {base: 'python:3', labels: {été: x, b: 1}}\n")
    assert [text.partition(" ")[0] for text in problems(file)] == ["1:36:", "1:47:"]


# ---- sha256


def test_sha256_ignores_comments_and_place(write):
    recipe = load(write(SMALLEST))
    copied_recipe = load(write(f"# a comment\n\n{SMALLEST}", "elsewhere/mine.yaml"))
    assert recipe.sha256 == copied_recipe.sha256


@pytest.mark.parametrize(
    "text",
    [
        "image: {base: 'python:3.12-slim'}",
        "image: {base: 'python:3.11-slim', env: {A: y}}",
        "image: {base: 'python:3.11-slim', workdir: /x}",
    ],
)
def test_sha256_follows_every_value(write, text):
    assert load(write(text, "b/mine.yaml")).sha256 != load(write(SMALLEST)).sha256


def test_sha256_follows_the_requirements_file(write):
    write("numpy\n", "req.txt")
    file = write("image: {base: 'python:3', pip: [{requirements: req.txt}]}\n")
    before = load(file)
    write("numpy==2.0\n", "req.txt")
    assert load(file).sha256 != before.sha256


# ---- warnings


def test_secret_in_env_is_a_warning(write):
    recipe = load(
        write(f"""\
            image:
              base: python:3.11-slim
              env:
                HF_TOKEN: abc
                DB_PASSWORD: hunter2
                MY_API_KEY: abc
                AWS_SECRET_ACCESS_KEY: abc
                A: hf_{"a" * 34}
                B: ghp_{"a" * 36}
                C: AKIA{"A" * 16}
                D: https://me:hunter2@x.org
                TOKENIZERS_KIND: fast
                MAX_TOKENS: '4096'
                GOOGLE_APPLICATION_CREDENTIALS: /run/key.json
                URL: https://x.org/a@b
        """)
    )
    assert [warning.position.line for warning in recipe.warnings] == [*range(4, 12)]
    assert all("looks like" in warning.what for warning in recipe.warnings)


def test_secret_in_run_and_options_is_a_warning(write):
    recipe = load(
        write("""
            image:
              base: python:3.11-slim
              run: ["curl https://me:hunter2@x.org"]
              pip:
                - packages: [x]
                  options: [--index-url, "https://me:hunter2@x.org/simple"]
        """)
    )
    assert {warning.key for warning in recipe.warnings} == {"image.run[0]", "image.pip[0].options[1]"}


def test_literal_token_is_warned_about_and_not_shown(write):
    (write("x", "r.txt")).write_text("git+https://ghp_" + "a1" * 18 + "@github.com/group/repo\n")
    url = "https://0123456789abcdef0123@example.org/simple"
    file = write(
        f"image: {{base: 'python:3', pip: [{{requirements: r.txt, options: [--index-url, '{url}']}}]}}\n"
    )
    warnings = load(file).warnings
    assert sorted(warning.what for warning in warnings) == [
        "this looks like a GitHub token",
        "this looks like a URL with a token",
    ]
    for warning in warnings:
        assert "secrets: [{id: mine, env: NAME}]" in warning.hint
        assert not re.search("0123456789abcdef|ghp_a1", str(warning))


def test_secret_without_a_step_is_a_warning(write):
    (warning,) = load(write("image: {base: 'python:3', secrets: [{id: x, file: ~/x}]}\n")).warnings
    assert warning.what == "no step uses the secret x"


def test_file_of_a_secret_may_be_anywhere(write):
    text = "image: {base: 'python:3', run: [{command: a, secrets: [x, y, z]}], secrets: [{id: x, file: ~/x}, "
    file = write(text + "{id: y, file: /etc/y}, {id: z, file: ../z}]}\n", "below/mine.yaml")
    recipe = load(file)
    assert [secret.file for secret in recipe.image.secrets] == [
        Path.home() / "x",
        Path("/etc/y"),
        file.parent / "../z",
    ]
    assert not recipe.warnings


def test_variable_in_env_is_a_warning(write):
    text = "image: {base: 'python:3', env: {PATHS: '/x:$PATH'}}\nsystem: {env: {A: $SCRATCH/x}}\n"
    (warning,) = load(write(text)).warnings
    assert (warning.key, warning.what) == ("image.env.PATHS", "variables are not expanded: the $ stays")


# ---- refusals of files

ANCHORS = ["image:", "  base: python:3.11-slim", "x0: &x0 [a, a, a, a, a, a, a, a, a, a]"]
for level in range(1, 12):
    ANCHORS.append(f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 10)}]")
HOSTILE_FILES = {
    "binary": (b"image:\n  base: \xffx\n", "2:9: not UTF-8: byte 0xff; save the file as UTF-8"),
    "alias bomb": (
        "\n".join(ANCHORS).encode(),
        "1:1: more than 10000 values after its anchors are expanded; recipes are small",
    ),
    "deep": (
        b"image: " + b"[" * 5000 + b"]" * 5000,
        "1:1: nested too deeply; recipes need five levels at most",
    ),
    "large": (b"#" * (MAX_BYTES + 1), "1:1: cannot be read: it has more than 1048576 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_file_is_refused(tmp_path, name):
    content, message = HOSTILE_FILES[name]
    (tmp_path / "mine.yaml").write_bytes(content)
    assert problems(tmp_path / "mine.yaml") == [message]


def recorded_messages() -> dict[str, str]:
    """Return the message of each case; a section has a line ``== NAME``, and an empty line at its end."""
    text = MALFORMED.with_suffix(".txt").read_text(encoding="utf-8")
    sections = text.removeprefix("== ").removesuffix("\n").split("\n\n== ")
    return dict(section.split("\n", 1) for section in sections)


@pytest.mark.parametrize("case", CASES)
def test_all_problems_are_named_at_their_places(case, monkeypatch):
    monkeypatch.chdir(MALFORMED)
    with pytest.raises(RecipeErrors) as caught:
        load(f"./{case}")
    message = str(caught.value).replace(str(MALFORMED), "FOLDER")
    assert message == recorded_messages()[case]


def test_every_message_has_its_case():
    assert list(recorded_messages()) == CASES


def test_fifo_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "mine.yaml")
    assert problems(tmp_path / "mine.yaml") == ["1:1: cannot be read: it is not a regular file"]


def test_link_circle_is_refused(write):
    file = write("image: {base: 'python:3', copy: [{source: link}]}\n")
    (file.parent / "link").symlink_to("link")
    (problem,) = problems(file)
    assert problem.startswith("1:43: image.copy[0].source: 'link' cannot be checked: ")


def test_name_with_a_null_character_is_refused():
    with pytest.raises(UsageError) as caught:
        load("a\0b.yaml")
    assert caught.value.what == "there is no file a\0b.yaml"


def test_loading_imports_nothing_heavy():
    code = (
        "import sys; from imgkit_builder.recipe.load import load; load('mn5');"
        "print(sorted({'docker','jinja2','rich','typer','spython','torch'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_run_may_be_written_as_a_block(write):
    recipe = load(
        write("""
            image:
              base: python:3.11-slim
              run:
                - |
                  echo one
                - >
                  echo two &&
                  echo three
        """)
    )
    commands = [step.command.strip() for step in recipe.image.run]
    assert commands == ["echo one", "echo two && echo three"]
