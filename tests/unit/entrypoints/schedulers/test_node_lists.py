"""Slurm's compact lists: checked by an independent expander, and refused with a caret under the place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.hostlist import expand_counts, expand_nodelist, fold_hosts, number_ranges

# Right-hand sides are the output of `scontrol show hostnames` of Slurm 22.05, which refuses text after a
# bracket; newer versions write such text.
LISTS = """
n1 -> n1
n1.dom,gpu-2 -> n1.dom gpu-2
node-[42,49-51] -> node-42 node-49 node-50 node-51
rack[0-1]n[1-2] -> rack0n1 rack0n2 rack1n1 rack1n2
n[098-101] -> n098 n099 n100 n101
n[8-12] -> n8 n9 n10 n11 n12
n[1,03] -> n1 n03
a,b[1-2],c -> a b1 b2 c
n[3,1-2],n1 -> n3 n1 n2 n1
x[10,2,9] -> x10 x2 x9
n[1-2]a[3-4]b[5-6] -> n1a3b5 n1a3b6 n2a3b5 n2a3b6 n1a4b5 n1a4b6 n2a4b5 n2a4b6
cn[0001-0003]i -> cn0001i cn0002i cn0003i
gpu[1-2]-hsn0 -> gpu1-hsn0 gpu2-hsn0
[1-2] -> 1 2
"""


@pytest.mark.parametrize("line", LISTS.strip().splitlines())
def test_known_lists_expand(line):
    text, _, hosts = line.partition(" -> ")
    assert expand_nodelist(text) == tuple(hosts.split())


# Each list, and below it the caret of the error and a part of the reason.
MALFORMED = """
n[1-2
 ^ [ without ]
n[
 ^ [ without ]
n[1,
 ^ [ without ]
a,n[1-
   ^ [ without ]
n[[1]]
 ^ [ without ]
n1]
  ^ ] without [
n[1-2]]
      ^ ] without [
n[]
  ^ a number was expected
n[1,]
    ^ a number was expected
n[-3]
  ^ a number was expected
a,,b
  ^ a host name is missing
,a
^ a host name is missing
a,
  ^ a host name is missing
n[5-1]
  ^ goes down
n[099-1]
  ^ goes down
n[1-5:2]
     ^ only numbers
bgl[000x133]
       ^ only numbers
n[1 ]
   ^ only numbers
n[0-65536]
  ^ more than 65536 hosts
n[0-99999999999]
  ^ more than 65536 hosts
n[1-300]m[1-300]
         ^ more than 65536 hosts
n[0-65535],m
           ^ more than 65536 hosts
a b
 ^ a host name cannot contain
a,(null)
  ^ a host name cannot contain
""".strip("\n").splitlines()


@pytest.mark.parametrize(("text", "error"), [*zip(MALFORMED[::2], MALFORMED[1::2], strict=True)])
def test_malformed_lists_are_pointed_at(text, error):
    expected_caret, _, reason = error.partition("^ ")
    with pytest.raises(NoPlan) as caught:
        expand_nodelist(text, where="SLURM_STEP_NODELIST")
    _, line, caret = str(caught.value.hint).split("\n")
    assert reason in caught.value.what
    assert (line, caret) == (text, f"{expected_caret}^")
    assert caught.value.where == "SLURM_STEP_NODELIST"


@pytest.mark.parametrize("text", ["", " ", "(null)"])
def test_lists_without_hosts_are_refused(text):
    with pytest.raises(NoPlan, match="names no host"):
        expand_nodelist(text)


def test_caret_of_long_list_stays_in_view():
    text = ",".join(f"host{number}" for number in range(500)) + ",bad[3-1]"
    with pytest.raises(NoPlan) as caught:
        expand_nodelist(text)
    _, line, caret = str(caught.value.hint).split("\n")
    assert len(line) < 110
    assert line[caret.index("^") :].startswith("3-1]")


def split(text: str) -> list[str]:
    """Items between the commas outside brackets."""
    items, depth = [""], 0
    for char in text:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return items


def numbers(inside: str) -> list[str]:
    texts = []
    for part in inside.split(","):
        low, _, high = part.partition("-")
        texts += [str(value).zfill(len(low)) for value in range(int(low), int(high or low) + 1)]
    return texts


def rewritten(text: str) -> list[str]:
    """Replace every bracket, the rightmost in the outermost loop, as Slurm does with a prefix."""
    if "[" not in text:
        return [text]
    opened = text.rindex("[")
    closed = text.index("]", opened)
    return [
        host
        for number in numbers(text[opened + 1 : closed])
        for host in rewritten(text[:opened] + number + text[closed + 1 :])
    ]


def reference(text: str) -> list[str]:
    """Expand the list in another way: replace text step by step, without a parser."""
    hosts: list[str] = []
    for item in split(text):
        if "[" not in item:
            hosts.append(item)
            continue
        opened = item.rindex("[")
        closed = item.index("]", opened)
        for prefix in rewritten(item[:opened]):
            hosts += [prefix + number + item[closed + 1 :] for number in numbers(item[opened + 1 : closed])]
    return hosts


@st.composite
def ranges(draw: st.DrawFn) -> str:
    low = draw(st.integers(0, 1100))
    text = str(low).zfill(draw(st.integers(0, 5)))
    return text if draw(st.booleans()) else f"{text}-{low + draw(st.integers(0, 12))}"


brackets = st.lists(ranges(), min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
plain = st.text("abn0123456789-._", min_size=1, max_size=4)
items = st.lists(st.one_of(plain, brackets), min_size=1, max_size=4).filter(
    lambda parts: sum(part[0] == "[" for part in parts) <= 3
)
compact = st.lists(items.map("".join), min_size=1, max_size=4).map(",".join)


@given(compact)
def test_any_list_matches_the_reference(text):
    assert list(expand_nodelist(text)) == reference(text)


@given(st.text("n[]1-,0", max_size=12))
def test_any_text_expands_or_is_refused(text):
    try:
        hosts = expand_nodelist(text)
    except NoPlan:
        return
    assert list(hosts) == reference(text)
    assert all(hosts)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20)), min_size=1, max_size=5))
def test_counts_of_tasks_expand(runs):
    text = ",".join(f"{count}(x{repeats})" if repeats > 1 else str(count) for count, repeats in runs)
    assert expand_counts(text) == tuple(count for count, repeats in runs for _ in range(repeats))


@pytest.mark.parametrize(
    ("text", "column"), [("2(x", 0), ("1,x2", 2), ("", 0), ("2(x3),", 6), ("1(x99999)", 0)]
)
def test_malformed_counts_are_pointed_at(text, column):
    with pytest.raises(NoPlan) as caught:
        expand_counts(text)
    assert str(caught.value.hint).split("\n")[2] == " " * column + "^"


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("node003 node004 node005 node007", "node[003-005,007]"),
        ("n8 n9 n10 n11", "n[8-11]"),
        ("n098 n099 n100", "n[098-100]"),
        ("n1 n01", "n[1,01]"),
        ("b2 a1 b1 login b", "b[1-2],a1,login,b"),
        ("as07r3b12 as07r3b13", "as07r3b[12-13]"),
        ("n1.cluster2.org n2.cluster2.org", "n[1-2].cluster2.org"),
        ("10.0.0.8 10.0.0.9", "10.0.0.[8-9]"),
        ("n4 n4", "n4"),
    ],
)
def test_hosts_fold_into_ranges(hosts, text):
    assert fold_hosts(hosts.split()) == text


NAMES = st.from_regex(r"[a-z]{1,2}[0-9]{1,3}(-ib|\.x)?|[a-z]{1,3}", fullmatch=True)


@given(hosts=st.lists(NAMES, min_size=1, max_size=30, unique=True))
def test_folded_hosts_expand_to_the_same(hosts):
    assert sorted(expand_nodelist(fold_hosts(hosts))) == sorted(hosts)


def test_ranges_of_numbers_ascend():
    assert number_ranges(["10", "3", "4", "1", "5"]) == "1,3-5,10"
