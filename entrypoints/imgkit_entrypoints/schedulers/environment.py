"""Values out of an environment, with errors that name the variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.hostlist import expand_nodelist
from imgkit_entrypoints.schedulers.placement import Read

NODES = "IMGKIT_NODES"


def present(env: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """Those of `names` that are set and not empty: operators send empty ones for "not used"."""
    return tuple(name for name in names if env.get(name))


def first(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of `names` that is set and not empty; empty if none is."""
    return next((name for name in names if env.get(name)), "")


def variable(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of `names` that is set, else the first of all: the one to ask for."""
    return first(env, names) or names[0]


def number(env: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """The whole number in variable `name`.

    Raises
    ------
    NoPlan : it is not set, no whole number, or below `least`.
    """
    text = env.get(name, "").strip()
    if not text:
        raise NoPlan(f"{name} is not set", where=name, hint="was the container started with --cleanenv?")
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise NoPlan(f"{text!r} is not a whole number from {least}", where=name)
    return int(text)


def node_range(env: Mapping[str, str], name: str) -> tuple[int | None, int | None]:
    """MIN and MAX of ``MIN:MAX`` in variable `name`; one number is MAX alone, both are None if it is not set.

    Raises
    ------
    NoPlan : it is neither.
    """
    text = env.get(name, "").strip()
    if not text:
        return None, None
    if ":" not in text:
        return None, number(env, name, least=1)
    bounds = dict(zip(("MIN", "MAX"), text.split(":", 1), strict=True))
    least, most = (number(bounds, bound, least=1) for bound in ("MIN", "MAX"))
    if least > most:
        raise NoPlan(f"{text!r} is no range MIN:MAX", where=name)
    return (least, most) if least < most else (None, most)


def given_nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of IMGKIT_NODES in their order, each once; empty if it is not set.

    A list with brackets is read as Slurm's compact form. Repeats are dropped, the first place counts: a PBS
    node file has a line for each of a host's processes.
    """
    text = env.get(NODES, "")
    if "[" in text or "]" in text:
        return unique(expand_nodelist(text, where=NODES))
    return unique(text.replace(",", " ").split())


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Each name once, in the order of first appearance."""
    return tuple(dict.fromkeys(names))


def short(name: str) -> str:
    """A host's name without its domain; addresses stay whole."""
    return name if name.replace(".", "").isdigit() or ":" in name else name.split(".", 1)[0]


def hostname(read: Read) -> str:
    """This machine's name; empty where /proc does not say."""
    return (read("/proc/sys/kernel/hostname") or "").strip()


def named_hosts(
    env: Mapping[str, str], nnodes: int, found: tuple[str, ...], found_from: str
) -> tuple[tuple[str, ...], str]:
    """The hosts and where they come from: IMGKIT_NODES before what the launcher says.

    Clusters with a second name for each node on the fast network give those names there.

    Raises
    ------
    NoPlan : IMGKIT_NODES has another number of hosts.
    """
    given = given_nodes(env)
    if not given or nnodes == 1:
        return found, found_from
    if len(given) != nnodes:
        raise NoPlan(
            f"{NODES} has {len(given)} hosts ({', '.join(given[:8])}), the launcher started {nnodes} nodes",
            where=NODES,
            hint=f"leave {NODES} out, or list the {nnodes} hosts in the order of their ranks",
        )
    return given, NODES


def head_of(
    env: Mapping[str, str], nnodes: int, hosts: tuple[str, ...], hosts_from: str, *others: str
) -> tuple[str, str]:
    """The address of node 0 and where it comes from: IMGKIT_HEAD, the first host, then the variables
    `others`.

    Both are empty where nothing says it, and on one node.
    """
    if nnodes == 1:
        return "", ""
    if env.get("IMGKIT_HEAD"):
        return env["IMGKIT_HEAD"], "IMGKIT_HEAD"
    if hosts:
        return hosts[0], hosts_from
    name = first(env, others)
    return env.get(name, ""), name


def port_in(env: Mapping[str, str], name: str) -> int | None:
    """The port in variable `name`; None where it is not set.

    Raises
    ------
    NoPlan : it is no number from 1 to 65535.
    """
    if not env.get(name):
        return None
    port = number(env, name, least=1)
    if port > 65535:
        raise NoPlan(f"{port} is no port: 1 to 65535", where=name)
    return port


def node_file(env: Mapping[str, str], read: Read) -> tuple[str, ...]:
    """The hosts of PBS' node file, each once; empty where it is not visible, as in most containers."""
    text = read(env["PBS_NODEFILE"]) if env.get("PBS_NODEFILE") else None
    return unique((text or "").split())
