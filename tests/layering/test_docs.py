"""Documents agree with the code: messages, variables, exit codes, links, JSON examples, generated tables."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TROUBLE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### (.+)$", TROUBLE, re.MULTILINE)
"""The titles of the sections about one message each."""
PLACE = "…"
"""Stands in a title for what the code puts into the message."""


def load(name: str) -> ModuleType:
    """A module of the site's own tools."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_ext" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources() -> Iterator[Path]:
    for folder in ("builder", "entrypoints"):
        yield from (ROOT / folder).rglob("*.py")


def texts(path: Path) -> Iterator[str]:
    """Every string of a module; an f-string with `PLACE` for each of its values."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else PLACE for part in node.values
            )


def says(title: str, known: str) -> bool:
    """Whether the code's text `known` contains `title`."""
    return " ".join(title.split()) in " ".join(known.split())


@pytest.fixture(scope="module")
def messages() -> list[str]:
    return [text for path in sources() for text in texts(path) if len(text) > 10]


@pytest.mark.parametrize("title", MESSAGES)
def test_title_of_a_section_is_a_message_of_the_code(title: str, messages: list[str]) -> None:
    # Nothing but placeholders would match anything.
    assert len(title.replace(PLACE, "").replace(" ", "")) >= 6, title
    assert any(says(title, known) for known in messages), f"no message says: {title}"


def test_each_message_has_one_section() -> None:
    assert len(MESSAGES) > 30
    assert len(MESSAGES) == len(set(MESSAGES))


@pytest.mark.parametrize(
    ("title", "code", "same"),
    [
        ("no image …", 'f"no image {path}"', True),
        ("no image …", 'f"no file {path}"', False),
        ("a: … of …", '(f"a: {x} "\nf"of {y}, b")', True),
        ("a GPU's memory is full", '"a GPU\'s memory is full"', True),
    ],
)
def test_placeholders_stand_for_values(tmp_path: Path, title: str, code: str, same: bool) -> None:
    (tmp_path / "code.py").write_text(f"x = {code}\n")
    assert any(says(title, known) for known in texts(tmp_path / "code.py")) is same


def named_pages(path: Path) -> Iterator[str]:
    """Pages of the documentation that a message or comment of the code names."""
    yield from re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))


def test_pages_that_the_code_names_exist() -> None:
    named = {(path, page) for path in sources() for page in named_pages(path)}
    assert len(named) > 5
    assert [(str(path), page) for path, page in sorted(named) if not (ROOT / page).is_file()] == []


def test_missing_page_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text('HINT = "see docs/guides/none.md"\n')
    assert list(named_pages(tmp_path / "code.py")) == ["docs/guides/none.md"]


def shape(value: object) -> object:
    """The keys of a JSON object, without the keys of mappings whose keys are data."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in ("env", "limits", "partitions")}
    return [shape(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


@pytest.mark.parametrize(
    "command",
    [
        "imgkit list --json",
        "imgkit list --systems --json",
        "imgkit list --bases --json",
        "imgkit doctor --json",
    ],
)
def test_example_of_json_has_the_keys_of_the_code(command: str) -> None:
    example = json.loads((DOCS / "_ext/json_examples.json").read_text(encoding="utf-8"))[command]
    words = [sys.executable, "-m", "imgkit_builder", *command.split()[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert shape(json.loads(done.stdout)) == shape(example)


def test_every_verb_with_json_has_an_example() -> None:
    generated = load("generated")
    examples = json.loads((DOCS / "_ext/json_examples.json").read_text(encoding="utf-8"))
    sections = re.findall(r"^## (imgkit \w+)$(.*?)^```$", generated.verbs_page(), re.MULTILINE | re.DOTALL)
    verbs = {verb for verb, text in sections if "--json" in text}
    # They print a command or the scheduler's answer, or need a registry; `wait` prints what `status` does.
    without = {"imgkit cancel", "imgkit logs", "imgkit push", "imgkit wait"}
    assert verbs - {" ".join(command.split()[:2]) for command in examples} == without
    assert "## imgkit sif ./mine.yaml --json\n\n```json\n" in generated.json_page()


def test_every_variable_of_the_code_is_in_the_table() -> None:
    from imgkit_entrypoints.cli import options
    from imgkit_entrypoints.cli.commands import COMMANDS

    table = set(re.findall(r"\bIMGKIT_[A-Z_]+\b", (DOCS / "reference/environment.md").read_text()))
    for_developers = {"IMGKIT_REQUIRE", "IMGKIT_UPDATE_GOLDEN"}
    parser = options.launch_parser(COMMANDS[0], {})
    flags = [
        action.option_strings[0]
        for group in parser._action_groups
        for action in group._group_actions
        if (group.title or "").startswith("launch options") and action.help != argparse.SUPPRESS
    ]
    used = {f"IMGKIT_{flag.strip('-').upper().replace('-', '_')}" for flag in flags}
    assert len(used) > 10
    templates = (path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".j2", ".sh"))
    for path in (*sources(), *templates):
        used |= set(re.findall(r"\bIMGKIT_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    # A name inside a file, and a mark between two processes of dist-doctor.
    internal = {"IMGKIT_OBJECT", "IMGKIT_DECIDED"}
    missing = {name for name in used - internal if name not in table}
    assert missing == set()
    assert table - used == for_developers


def mentioned(page: Path) -> Iterator[tuple[str, str]]:
    """Each command that a page shows, with each long option behind it; `--` begins the next command."""
    text = page.read_text(encoding="utf-8")
    shown = [*re.findall(r"^    (\S.*)$", text, re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
    for line in shown:
        for part in re.split(r" -- | && | \| |; ", line.partition(" #")[0]):
            words = part.split()
            starts = [
                number for number, word in enumerate(words) if re.fullmatch(r"imgkit|dist-[a-z]+", word)
            ]
            if not starts:
                continue
            words = words[starts[-1] :]
            command = " ".join(words[:2]) if words[0] == "imgkit" else words[0]
            if command == "dist-run":  # behind the script they are the script's own
                words = words[: next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))]
            if re.fullmatch(r"imgkit [a-z]+|dist-[a-z]+", command):
                yield from ((command, word.partition("=")[0]) for word in words if word.startswith("--"))


def test_options_on_the_pages_exist() -> None:
    generated = load("generated")
    helps: dict[str, str] = {}
    for text in (generated.verbs_page(), generated.commands_page()):
        for name, below in re.findall(r"^##+ (.*?)$(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            # dist-train export: dist-train; imgkit remote add: imgkit remote
            command = " ".join(name.split()[: 2 if name.startswith("imgkit") else 1])
            helps[command] = helps.get(command, "") + below
    pages = [ROOT / "README.md", *(path for path in DOCS.rglob("*.md") if "generated" not in path.parts)]
    found = [(page, *pair) for page in pages for pair in mentioned(page)]
    assert len(found) > 100
    wrong = [
        f"{page.relative_to(ROOT)}: {command} {option}"
        for page, command, option in found
        if not re.search(rf"{re.escape(option)}(?![\w-])", helps.get(command, ""))
    ]
    assert wrong == []


def test_table_of_exit_codes_is_that_of_the_code() -> None:
    from imgkit_builder.cli.app import INTERRUPTED
    from imgkit_entrypoints import errors

    wanted = {0, INTERRUPTED} | {getattr(errors, name) for name in dir(errors) if name.startswith("EXIT_")}
    rows = re.findall(r"^\| (\d+) \|", (DOCS / "reference/exit-codes.md").read_text(), re.MULTILINE)
    assert {int(row) for row in rows} == wanted


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as the repository's pages and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_link_of_a_page_outside_the_site_leads_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = ROOT / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in headings(target), f"{page}: {link}"


def test_generated_table_has_every_key_of_a_recipe() -> None:
    from imgkit_builder.recipe.model import Document
    from imgkit_builder.recipe.validation import key_paths

    generated = load("generated")
    rows = re.findall(r"^\| `([\w.]+)` \|", generated.keys_page(generated.recipe_schema()), re.MULTILINE)
    keys = {path[-1] for path in key_paths(Document) if path[:2] != ("image", "constraints")} | {"extends"}
    assert keys <= set(rows)


def test_every_key_of_a_recipe_has_a_meaning() -> None:
    generated = load("generated")
    lines = generated.keys_page(generated.recipe_schema()).splitlines()
    assert [line for line in lines if line.startswith("| `") and line.endswith("|  |")] == []


def test_generated_pages_have_every_command() -> None:
    from imgkit_builder.cli.app import VERBS
    from imgkit_entrypoints.cli.commands import COMMANDS

    generated = load("generated")
    verbs, commands = generated.verbs_page(), generated.commands_page()
    assert [verb for verb in VERBS if f"## imgkit {verb}\n\n```text\nUsage: imgkit {verb}" not in verbs] == []
    assert [known.name for known in COMMANDS if f"## {known.name}\n\n```text\nusage: " not in commands] == []


def test_sections_of_docstrings_become_fields() -> None:
    lines = [
        "What it does.",
        "",
        "Raises",
        "------",
        "NoPlan : two lines",
        "    of text.",
        "",
        "Notes",
        "-----",
        "So.",
    ]
    text = "\n".join(load("docstrings").fields(lines))
    assert ":raises NoPlan: two lines\n    of text." in text
    assert ".. rubric:: Notes\n\nSo." in text
    assert "---" not in text


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="no.html">x</a>', "no page or file for no.html"),
        ('<a href="#no">x</a>', "no heading for #no"),
        ('<script src="https://cdn.example/x.js"></script>', "loads https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', "loads //fonts.example/x.css"),
    ],
)
def test_bad_link_of_the_site_is_found(tmp_path: Path, html: str, problem: str) -> None:
    check_site = load("check_site")
    (tmp_path / "a.html").write_text(f'<h1 id="top">A</h1><a href="#top">up</a>{html}')
    assert list(check_site.problems(tmp_path)) == [f"a.html: {problem}"]


def test_font_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text("<style>@font-face { src: url(https://cdn.example/f.woff) }</style>")
    assert list(load("check_site").problems(tmp_path)) == ["a.svg: loads from elsewhere: url(http"]


def test_citation_is_valid() -> None:
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format"]
    done = subprocess.run([*words, str(ROOT / "CITATION.cff")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hooks_run_tools_that_ci_runs() -> None:
    import yaml

    check = (ROOT / "ci/check").read_text(encoding="utf-8")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0][
        "hooks"
    ]
    programs = [hook["entry"].split()[0] for hook in hooks if hook["language"] == "system"]
    tools = {program.removeprefix(".venv/bin/") for program in programs} - {"ci/check"}
    assert tools == {"ruff", "mypy", "shellcheck"}
    assert [tool for tool in tools if tool not in check] == []


def merge_markers(folder: Path) -> list[str]:
    """Lines that git leaves in a file where two changes meet; files that git ignores do not count."""
    pattern = r"^([<>|]{7}( |$)|={7}$)"
    found = subprocess.run(
        ["git", "grep", "--untracked", "-InE", pattern],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert found.returncode in (0, 1), found.stderr
    return found.stdout.splitlines()


def test_no_file_has_markers_of_a_merge() -> None:
    assert merge_markers(ROOT) == []


def test_markers_of_a_merge_are_found(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    lines = ("<" * 7 + " HEAD", "one", "=" * 7, "other", ">" * 7 + " 31eeac2 (a change)", "=" * 9)
    (tmp_path / "page.md").write_text("\n".join(lines))
    assert [line.split(":")[1] for line in merge_markers(tmp_path)] == ["1", "3", "5"]
