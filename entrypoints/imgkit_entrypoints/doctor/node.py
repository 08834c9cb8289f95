"""``dist-doctor`` on this node.

It reports problems that would break or slow down a distributed run, each with what the user can do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from imgkit_entrypoints import __version__, fabric, facts, terminal
from imgkit_entrypoints.arguments import Option, add_options, parse_positive
from imgkit_entrypoints.doctor.checks import CHECKS, Check, CheckedNode, Verdict
from imgkit_entrypoints.errors import EXIT_NO
from imgkit_entrypoints.fabric import FabricPlan, library_path
from imgkit_entrypoints.facts import HostFacts, Reader
from imgkit_entrypoints.known_issues import IssueResult
from imgkit_entrypoints.system import SystemFacts

# Version of the format of the JSON documents.
SCHEMA = 1
DECIDED = "IMGKIT_DECIDED"
"""Variable that lists the variables which the node agent has set, and not the user: ``NCCL_NET,...``.

The node agent is imgkit's process on each node that starts the workers.
"""
OPTIONS = (
    Option("--strict", "treat warnings as errors", action="store_true"),
    Option(
        "--known-issues",
        "list every known issue with the values that match on this node, or the condition that does not",
        action="store_true",
    ),
    Option("--timeout", "time limit of a collective in seconds", parse_positive, "S", default=60),
)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options of dist-doctor, with ``--json``, from `argv` or from this process' command line."""
    parser = argparse.ArgumentParser(prog="dist-doctor", allow_abbrev=False)
    add_options(parser, (*OPTIONS, Option("--json", "print one JSON object", action="store_true")))
    return parser.parse_args(argv)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Check this node, print the report, and return the exit code, which is 1 if a check fails.

    Raises
    ------
    UsageError : ``IMGKIT_ROOT``, ``IMGKIT_NCCL_VERSION`` or the image's system facts cannot be read.
    """
    options = parse_options(argv)
    host = facts.gather(env=env)
    system = facts.system_facts(env=env)
    if options.known_issues:
        _print_issues(host.hostname, _choose_plan(host, system, env).issues, as_json=options.json)
        return 0
    # The root is not "/" if the facts come from a saved tree of files (IMGKIT_ROOT).
    checks = examine(host, system, env, reader=Reader(root=facts.root_of(env)))
    has_passed = passed(checks, strict=options.strict)
    if options.json:
        rows = [dataclasses.asdict(check) for check in checks]
        print_json({"host": host.hostname, "passed": has_passed, "checks": rows})
    else:
        terminal.print_results(*table(checks), summary(checks))
        # Without --strict, the node would have passed. So the report shows no failure, and needs a reason.
        if not has_passed and passed(checks):
            terminal.print_results("FAILED: --strict counts warnings as failures")
    return 0 if has_passed else EXIT_NO


def _print_issues(host: str, results: Sequence[IssueResult], *, as_json: bool) -> None:
    """Print the result for every known issue, as ``--known-issues`` requests."""
    if as_json:
        print_json({"host": host, "known_issues": issue_rows(results)})
    else:
        terminal.print_results(*issues_table(results))


def examine(
    host: HostFacts,
    system: SystemFacts | None,
    env: Mapping[str, str],
    *,
    reader: Reader,
    has_several_nodes: bool = False,
) -> tuple[Check, ...]:
    """Run every check on this node, and return the results.

    A check may have several results. If a check does not apply to this node, it has none.

    Parameters
    ----------
    host : the facts that were read on this machine.
    system : what the image's recipe says about the cluster, or None if the image has no recipe.
    env : the environment of this process.
    reader : reads files that are needed only by dist-doctor and are not part of `host`.
    has_several_nodes : True if a problem of NCCL between nodes is a failure, because the run has several
        nodes. Otherwise, such a problem is only a warning.
    """
    node = CheckedNode(
        facts=host,
        has_recipe=system is not None,
        system=system or SystemFacts(),
        env=_remove_decided_variables(env),
        plan=_choose_plan(host, system, env),
        has_several_nodes=has_several_nodes,
        reader=reader,
    )
    results: list[Check] = []
    # Each check is a generator function, so a check without results adds nothing.
    for run_check in CHECKS:
        results += run_check(node)
    return tuple(results)


def _remove_decided_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables that the node agent (imgkit's process on each node) has set."""
    # LD_LIBRARY_PATH is kept, because it also contains folders of the user. `library_path` can distinguish
    # these from the folders that the node agent has added.
    decided = set(env.get(DECIDED, "").split(",")) - {library_path.VARIABLE}
    return {name: value for name, value in env.items() if name not in decided}


def _choose_plan(host: HostFacts, system: SystemFacts | None, env: Mapping[str, str]) -> FabricPlan:
    """Return the network plan for a run on two nodes, even if this run has another number of nodes.

    Users run dist-doctor on one node to learn whether a run on several nodes would work.
    """
    return fabric.choose_fabric(host, system, _remove_decided_variables(env), nnodes=2)


def passed(checks: Sequence[Check], *, strict: bool = False) -> bool:
    """Return whether no check has failed. With `strict`, a warning also counts as a failure."""
    failing_verdicts = ("fail", "warn") if strict else ("fail",)
    return not any(check.verdict in failing_verdicts for check in checks)


def print_json(values: Mapping[str, Any]) -> None:
    """Print `values` as a JSON document, after the versions of the document's format and of imgkit."""
    document = {"schema": SCHEMA, "imgkit": __version__, **values}
    terminal.print_document(json.dumps(document, indent=2) + "\n")


def table(checks: Sequence[Check]) -> Iterator[str]:
    """Yield the lines of the report: one line for each check, followed by a line with its fix, if any."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        yield f"{check.verdict:7}  {check.name:{width}}  {check.evidence}"
        if check.fix:
            yield f"{'':7}  {'':{width}}  -> {check.fix}"


def issues_table(results: Sequence[IssueResult]) -> Iterator[str]:
    """Yield the lines of ``--known-issues``, which show the result for each known issue.

    If an issue affects this node (``match``), its line shows the effect and the message, and further lines
    show the hint and the source. Otherwise, the line shows why the issue does not affect this node.
    """
    width = max(len(result.issue.id) for result in results)
    for result in results:
        issue = result.issue
        start = f"{result.state:8}  {issue.id:{width}}"
        if result.state != "match":
            yield f"{start}  {result.reason}"
            continue
        yield f"{start}  {issue.effect}: {issue.message} ({result.reason})"
        for detail in (issue.hint, issue.source):
            if detail:
                yield f"{'':8}  {'':{width}}  -> {detail}"


def issue_rows(results: Sequence[IssueResult]) -> list[dict[str, Any]]:
    """Return the results for ``--known-issues --json``, with all columns of the table of known issues."""
    rows = []
    for result in results:
        rows.append({"state": result.state, "reason": result.reason, **dataclasses.asdict(result.issue)})
    return rows


def summary(checks: Sequence[Check]) -> str:
    """Return the last line of the report, which counts the checks by verdict: ``12 ok, 1 warn``."""
    counts = Counter(check.verdict for check in checks)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])


CLOCKS_APART_S = 1.0
"""Difference between clocks in seconds that causes a warning.

With a wrong clock, tickets and certificates may be refused, and the lines of logs are in a wrong order.
"""


def clock_remark(time_s: float, all_s: Sequence[float]) -> str:
    """Return a remark if a node's clock differs from the median of all clocks, or "" if it does not.

    For example ``its clock is 2.5 s ahead of the median of all nodes``.

    Parameters
    ----------
    time_s : time on this node, in seconds since the epoch.
    all_s : times on all nodes, read at the same moment.
    """
    ahead_s = time_s - statistics.median(all_s)
    if abs(ahead_s) < CLOCKS_APART_S:
        return ""
    # The median is not affected by a few wrong clocks, unlike the mean.
    direction = "ahead of" if ahead_s > 0 else "behind"
    return f"its clock is {abs(ahead_s):.1f} s {direction} the median of all nodes"
