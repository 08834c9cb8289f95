"""Documents agree with the code: messages, variables, exit codes, links, JSON, tables, guarantees."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from imgkit_builder.cli.app import INTERRUPTED, VERBS
from imgkit_builder.recipe.model import Document
from imgkit_builder.recipe.validation import key_paths
from imgkit_entrypoints import errors
from imgkit_entrypoints.cli import options
from imgkit_entrypoints.cli.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TITLES = re.findall(r"^### (.+)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
"""Each is a message, with … for what the code puts into it."""
JSON_EXAMPLES = json.loads((DOCS / "_ext/json_examples.json").read_text(encoding="utf-8"))
SOURCES = [path for folder in ("builder", "entrypoints") for path in (ROOT / folder).rglob("*.py")]


def run(*argv):
    return subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, timeout=60)


@functools.cache
def site_tool(name):
    """Load one of the site's own tools, which are no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def messages_in(code):
    """Yield each string of a program on one line; an f-string has … for its values."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield " ".join("".join(map(str, parts)).split())


def test_titles_of_sections_are_messages_of_the_code():
    assert len(TITLES) > 25
    assert len(TITLES) == len(set(TITLES))
    messages = [message for path in SOURCES for message in messages_in(path.read_text(encoding="utf-8"))]
    # Placeholders alone would match anything.
    assert [title for title in TITLES if len(re.sub("[… ]", "", title)) < 6] == []
    text = "\n".join(message for message in messages if len(message) > 10)
    assert [title for title in TITLES if title not in text] == []


def test_values_of_a_message_are_placeholders():
    code = '(f"a: {x} "\nf"of {y}, b", f"no file {path}")'
    assert {"a: … of …, b", "no file …"} <= set(messages_in(code))


def shape(value):
    """Return the keys of a JSON object, without the keys of mappings whose keys are data."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in ("env", "limits", "partitions")}
    return [shape(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


@pytest.mark.parametrize("arguments", ["list", "list --systems", "list --bases", "doctor"])
def test_example_of_json_has_the_keys_of_the_code(arguments):
    output = run("imgkit_builder", *arguments.split(), "--json").stdout
    assert shape(json.loads(output)) == shape(JSON_EXAMPLES[f"imgkit {arguments} --json"])


def test_every_verb_with_json_has_an_example():
    generated = site_tool("generated")
    sections = re.findall(r"^## (imgkit \w+)$(.*?)^```$", generated.verbs_page(), re.MULTILINE | re.DOTALL)
    verbs = {verb for verb, text in sections if "--json" in text}
    examples = {" ".join(command.split()[:2]) for command in JSON_EXAMPLES}
    assert verbs - examples == {"imgkit resume"}  # it prints what `run` does
    assert "## imgkit sif ./mine.yaml --json\n\n```json\n" in generated.json_page()


def test_every_variable_of_the_code_is_in_the_table():
    table = set(re.findall(r"\bIMGKIT_[A-Z_]+\b", (DOCS / "reference/environment.md").read_text()))
    flags = [
        action.option_strings[0]
        for group in options.launch_parser(COMMANDS[0], {})._action_groups
        for action in group._group_actions
        if (group.title or "").startswith("launch options") and action.help != argparse.SUPPRESS
    ]
    variables = {f"IMGKIT_{flag.strip('-').upper().replace('-', '_')}" for flag in flags}
    assert len(variables) > 10
    templates = (path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".j2", ".sh"))
    for path in (*SOURCES, *templates):
        variables.update(re.findall(r"\bIMGKIT_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    # A name inside a file, and a mark between two processes of dist-doctor.
    variables -= {"IMGKIT_OBJECT", "IMGKIT_DECIDED"}
    for_developers = {"IMGKIT_REQUIRE", "IMGKIT_UPDATE_GOLDEN"}
    assert table == variables | for_developers


def options_on(page):
    """Yield each command that a page shows, with each long option behind it; `--` begins the next command."""
    text = page.read_text(encoding="utf-8")
    lines = [*re.findall(r"^    (\S.*)$", text, re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
    for line in lines:
        for part in re.split(r" -- | && | \| |; ", line.partition(" #")[0]):
            start = re.search(r".*(?<!\S)(imgkit(?= )|dist-[a-z]+(?!\S))", part)
            if start is None:
                continue
            argv = part[start.start(1) :].split()
            command = " ".join(argv[:2]) if argv[0] == "imgkit" else argv[0]
            for argument in argv[1:]:
                if command == "dist-run" and argument.endswith(".py"):
                    break  # behind the script they are the script's own
                if argument.startswith("--") and not command.startswith("imgkit -"):
                    yield command, argument.partition("=")[0]


def test_options_on_the_pages_exist():
    generated = site_tool("generated")
    helps: dict[str, str] = {}
    for text in (generated.verbs_page(), generated.commands_page()):
        for name, section in re.findall(r"^##+ (.*?)$(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            # dist-train export: dist-train; imgkit remote add: imgkit remote
            command = " ".join(name.split()[: 2 if name.startswith("imgkit") else 1])
            helps[command] = helps.get(command, "") + section
    pages = [ROOT / "README.md", *(path for path in DOCS.rglob("*.md") if "generated" not in path.parts)]
    uses = [(page.name, command, option) for page in pages for command, option in options_on(page)]
    assert len(uses) > 100
    unknown = [use for use in uses if not re.search(rf"{use[2]}(?![\w-])", helps.get(use[1], ""))]
    assert unknown == []


def test_table_of_exit_codes_is_that_of_the_code():
    codes = {getattr(errors, name) for name in dir(errors) if name.startswith("EXIT_")}
    rows = re.findall(r"^\| (\d+) \|", (DOCS / "reference/json.md").read_text(), re.MULTILINE)
    assert {int(row) for row in rows} == {0, INTERRUPTED} | codes


def anchors(page):
    """Return the anchors of a page's headings, as the repository's pages and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_link_of_a_page_outside_the_site_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = ROOT / (name or page)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_generated_table_explains_every_key_of_a_recipe():
    generated = site_tool("generated")
    page = generated.keys_page(generated.recipe_schema())
    rows = re.findall(r"^\| `([\w.]+)` \|(?:.*\|)? *(.*?) *\|$", page, re.MULTILINE)
    keys = {path[-1] for path in key_paths(Document) if path[:2] != ("image", "constraints")} | {"extends"}
    assert keys <= {key for key, _ in rows}
    assert [key for key, meaning in rows if not meaning] == []


def test_generated_pages_have_every_command():
    verbs, commands = site_tool("generated").verbs_page(), site_tool("generated").commands_page()
    assert [verb for verb in VERBS if f"## imgkit {verb}\n\n```text\nUsage: imgkit {verb}" not in verbs] == []
    names = [command.name for command in COMMANDS]
    assert [name for name in names if f"## {name}\n\n```text\nusage: " not in commands] == []


def test_sections_of_docstrings_become_fields():
    docstring = "What it does.\n\nRaises\n------\nNoPlan : two lines\n    of text.\n\nNotes\n-----\nSo."
    text = "\n".join(site_tool("docstrings").fields(docstring.split("\n")))
    assert ":raises NoPlan: two lines\n    of text." in text
    assert ".. rubric:: Notes\n\nSo." in text
    assert "---" not in text


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.html", '<a href="no.html">x</a>', "no page or file for no.html"),
        ("a.html", '<a href="#no">x</a>', "no heading for #no"),
        ("a.html", '<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ("a.html", '<link rel="stylesheet" href="//f.example/x.css">', "loads //f.example/x.css"),
        ("a.svg", "<style>@font-face { src: url(https://f.example/f) }", "loads from elsewhere: url(http"),
    ],
)
def test_bad_link_of_the_site_is_noticed(tmp_path, name, text, problem):
    (tmp_path / name).write_text(f'<h1 id="top">A</h1><a href="#top">up</a>{text}')
    assert list(site_tool("check_site").problems(tmp_path)) == [f"{name}: {problem}"]


def test_citation_is_valid():
    schema = ("--builtin-schema", "vendor.citation-file-format")
    result = run("check_jsonschema", *schema, str(ROOT / "CITATION.cff"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_hooks_run_tools_that_ci_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0][
        "hooks"
    ]
    programs = {hook["entry"].split()[0] for hook in hooks if hook["language"] == "system"}
    assert programs == {".venv/bin/ruff", ".venv/bin/mypy", ".venv/bin/shellcheck", "ci/check"}


def merge_markers(folder):
    """Return the lines that git leaves in a file where two changes meet. Ignored files do not count."""
    argv = ["git", "grep", "--untracked", "-InE", r"^([<>|]{7}( |$)|={7}$)"]
    return subprocess.run(argv, cwd=folder, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def test_no_file_has_markers_of_a_merge(tmp_path):
    assert merge_markers(ROOT) == []
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    lines = ("<" * 7 + " HEAD", "one", "=" * 7, "other", ">" * 7 + " 31eeac2 (a change)", "=" * 9)
    (tmp_path / "page.md").write_text("\n".join(lines))
    assert [line.split(":")[1] for line in merge_markers(tmp_path)] == ["1", "3", "5"]


def test_every_guarantee_names_tests_that_exist():
    text = (ROOT / "tests/guarantees.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^def (test_\w+)\(", code, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 20
    assert named - tests == set()
    subjects = {path.name for path in (ROOT / "tests").rglob("refusals/*.yaml")}
    assert set(re.findall(r"`refusals/(\w+\.yaml)`", text)) <= subjects
    rows = [
        row
        for row in re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
        if not row.startswith(("guarantee", "---"))
    ]
    assert [row for row in rows if not re.search(r"`test_\w+`$", row)] == []
