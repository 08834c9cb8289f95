"""Known issues: a fixture of each row that matches, and one that is near it; rows of a site, and wrong rows.

The fixtures are in known_issues.json beside this file: a machine by its name in the table of trees, changed
facts, variables and nodes. ``miss`` changes one thing of ``match``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imgkit_entrypoints import fabric, known_issues
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts.host_facts import HostFacts, Library
from imgkit_entrypoints.known_issues import KnownIssue, Value
from imgkit_entrypoints.system import Node, SystemFacts

Machine = Callable[..., HostFacts]
CASES: Mapping[str, Any] = json.loads(Path(__file__).with_name("known_issues.json").read_text())
ROWS = {issue.id: issue for issue in known_issues.read_issues(known_issues.SHIPPED_FILE)}
SITE = {"id": "site", "message": "the site says so", "when": ["arch contains 64"], "effect": "warn"}


def choose(machine: Machine, case: Mapping[str, Any], env: Mapping[str, str] | None = None):
    env = {**case.get("env", {}), **(env or {})}
    changes = dict(case.get("facts", {}))
    if "libraries" in changes:
        changes["libraries"] = tuple(Library(**library) for library in changes["libraries"])
    host = replace(machine(case["tree"], env=env), **changes)
    system = SystemFacts(node=Node(gpu_model=case["gpu_model"])) if "gpu_model" in case else None
    return fabric.choose_fabric(host, system, env, nnodes=case.get("nodes", 2))


def near_miss(name: str) -> dict[str, Any]:
    match, miss = CASES[name]["match"], CASES[name]["miss"]
    return {**match, **miss, "facts": {**match.get("facts", {}), **miss.get("facts", {})}}


def state(plan: fabric.FabricPlan, name: str) -> str:
    return next(result.state for result in plan.issues if result.issue.id == name)


def lookup(**values: str) -> Callable[[str], Value]:
    return lambda name: Value(values.get(name.lstrip("$"), ""), f"{name}={values.get(name.lstrip('$'))}")


def row(**changes: object) -> KnownIssue:
    return KnownIssue(**{**SITE, "when": tuple(SITE["when"]), **changes})  # type: ignore[arg-type]


def test_each_row_has_its_fixtures_a_source_and_a_date():
    assert set(CASES) == set(ROWS)
    assert all(issue.source and len(issue.date) == 10 for issue in ROWS.values())


@pytest.mark.parametrize("name", CASES)
def test_row_matches_and_acts(machine, name):
    plan, issue = choose(machine, CASES[name]["match"]), ROWS[name]
    assert state(plan, name) == "match"
    assert {key: plan.env.get(key) for key in issue.env} == issue.env
    findings = {"warn": plan.warnings, "refuse": plan.refusals, "set": ()}[issue.effect]
    assert any(f"known issue {name}" in str(finding) for finding in findings) == (issue.effect != "set")


@pytest.mark.parametrize("name", CASES)
def test_near_miss_does_not_match(machine, name):
    plan = choose(machine, near_miss(name))
    assert state(plan, name) == "no match"
    assert not any(f"known issue {name}" in str(item) for item in (*plan.warnings, *plan.refusals))


@pytest.mark.parametrize("name", [name for name, issue in ROWS.items() if issue.effect == "set"])
def test_value_of_the_user_is_kept(machine, name):
    (variable,) = ROWS[name].env
    plan = choose(machine, CASES[name]["match"], {variable: "mine"})
    (decision,) = [item for item in plan.decisions if item.variable == variable]
    assert (decision.value, decision.origin, variable in plan.env) == ("mine", "user", False)
    assert "imgkit would set" in decision.reason


def test_guard_against_ll128_holds_for_an_unknown_nccl(machine):
    case = {"tree": "cxi4", "facts": {"nccl_version": ""}}
    assert choose(machine, case).env["NCCL_PROTO"] == "^LL128"


@pytest.mark.parametrize(
    ("condition", "values", "expected"),
    [
        ("nccl < 2.29.3", {"nccl": "2.9"}, "match"),
        ("nccl < 2.29.3", {"nccl": "2.29.3"}, "no match"),
        ("nccl >= 2.29", {"nccl": "2.29.2+cuda12"}, "match"),
        ("nccl >= 2.29", {}, "unknown"),
        ("nccl >= 2.29 or nccl is unknown", {}, "match"),
        ("driver < {cuda_driver}", {"driver": "570.1", "cuda_driver": "580"}, "match"),
        ("driver < {cuda_driver}", {"driver": "570.1"}, "unknown"),
        ("torch >= 2.3", {"torch": "main"}, "unknown"),
        ("arch in x86_64, aarch64", {"arch": "AARCH64"}, "match"),
        ("$NCCL_PROTO allows LL128", {"NCCL_PROTO": "^LL"}, "match"),
        ("$NCCL_PROTO allows LL128", {}, "no match"),
        ("$NCCL_PROTO != LL128", {}, "match"),
        ("$NCCL_PROTO is unset", {"NCCL_PROTO": ""}, "match"),
        ("$OPENMPI >= 4", {"OPENMPI": "four"}, "no match"),
        (r"$NCCL_IB_HCA matches :[^,:]*:", {"NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1"}, "no match"),
        (r"gpu matches \bH[12]00\b", {"gpu": "NVIDIA h200"}, "match"),
    ],
)
def test_condition_compares_a_value(condition, values, expected):
    assert known_issues.evaluate_issue(row(when=(condition,)), lookup(**values)).state == expected


def test_issue_of_a_variable_that_only_a_node_knows_is_unknown():
    values = {"$A": Value("1", is_requested=None), "$B": Value("", is_known=False)}
    for condition, name in (("$A is requested", "$A"), ("$B != 0", "$B"), ("$B is unset", "$B")):
        result = known_issues.evaluate_issue(row(when=(condition,)), values.__getitem__)
        assert (result.state, result.reason) == ("unknown", f"unknown: {name}")


def test_unknown_fact_is_named_unless_another_condition_fails():
    issue = row(when=("libfabric < 2.0", "arch == aarch64"))
    assert known_issues.evaluate_issue(issue, lookup(arch="aarch64")).reason == "unknown: libfabric version"
    assert (
        known_issues.evaluate_issue(issue, lookup(arch="x86_64")).reason
        == "needs arch == aarch64 (arch=x86_64)"
    )


def test_site_replaces_and_ignores_rows(machine, tmp_path):
    file = tmp_path / "rows.json"
    ignored = {"id": "nccl-hca-unused", "message": "meant so here", "effect": "ignore"}
    file.write_text(json.dumps([SITE, ignored]))
    case, env = CASES["nccl-hca-unused"]["match"], {known_issues.SITE_FILE_VARIABLE: str(file)}
    plan = choose(machine, case, env)
    assert [str(item).partition(" (")[0] for item in plan.warnings if "known issue" in str(item)] == [
        "the site says so"
    ]
    system = SystemFacts(known_issues=(row(message="of the system"),))
    plan = fabric.choose_fabric(machine("none"), system, {})
    assert any(item.what.startswith("of the system (architecture ") for item in plan.warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"when": ["nccl ~ 2"]}, "rows[1].when[0]: 'nccl ~ 2' is not a condition"),
        ({"when": ["arch == x86_64", "nckl < 2"]}, "rows[1].when[1]: 'nckl' is not a fact"),
        ({"when": ["nccl < {nckl}"]}, "'nckl' is not a fact"),
        ({"when": ["nccl < new"]}, "'new' is not a version"),
        ({"when": ["gpu matches ("]}, "'(' is not a regular expression: missing )"),
        ({"when": ["nccl is set"]}, "'set' is none of unknown"),
        ({"when": ["$A is unknown"]}, "'unknown' is none of set, unset, requested"),
        ({"when": []}, "rows[1].when: has no condition"),
        ({"when": "nccl < 2"}, 'rows[1].when is "nccl < 2", not a list'),
        ({"effect": "stop"}, 'rows[1].effect is "stop", not set or warn'),
        ({"effect": "set"}, "rows[1].env: belongs to the effect set"),
        ({"env": {"A": "1"}}, "rows[1].env: belongs to the effect set"),
        (
            {"env": {"A;touch x;B": "1"}},
            "rows[1].env: 'A;touch x;B' is not a variable name; allowed: letters, ",
        ),
        ({"env": {"A=B": "1"}}, "rows[1].env: 'A=B' is not a variable name"),
        ({"env": {"": "1"}}, "rows[1].env: '' is not a variable name"),
        ({"env": {"A": "a\0b"}}, "rows[1].env.A: contains the control character U+0000; delete it"),
        ({"env": {"A": "\ud800"}}, "rows[1].env.A: contains the invisible character U+D800; delete it"),
        ({"message": ""}, "rows[1].message: is empty; remove it"),
        ({"message": 5}, "rows[1].message is 5, not text"),
        ({"mesage": "x"}, "rows[1].mesage is an unknown key"),
    ],
)
def test_malformed_row_is_refused_with_its_key(tmp_path, changes, message):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([SITE, {**SITE, **changes}]))
    with pytest.raises(UsageError) as error:
        known_issues.load_issues((), {known_issues.SITE_FILE_VARIABLE: str(file)})
    assert message in error.value.what
    assert error.value.where == str(file)


@pytest.mark.parametrize("content", [None, "{}", "[", "[5]"])
def test_file_without_rows_is_refused(tmp_path, content):
    file = tmp_path / "rows.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match="known issues cannot be read"):
        known_issues.load_issues((), {known_issues.SITE_FILE_VARIABLE: str(file)})
