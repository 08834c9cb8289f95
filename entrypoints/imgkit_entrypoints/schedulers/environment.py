"""Values read from the environment, with errors that name the variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.hostlist import expand_nodelist
from imgkit_entrypoints.schedulers.placement import Read, Size

NODES = "IMGKIT_NODES"


def present(env: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """Those of `names` that are set and not empty: training operators set unused ones to the empty string."""
    return tuple(name for name in names if env.get(name))


def first(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of `names` that is set and not empty; empty if none is."""
    return next((name for name in names if env.get(name)), "")


def variable(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of `names` that is set; if none is, the first of all, for an error message."""
    return first(env, names) or names[0]


def number(env: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """The whole number in variable `name`.

    Raises
    ------
    NoPlan : the variable is not set, not a whole number, or below `least`.
    """
    text = env.get(name, "").strip()
    if not text:
        raise NoPlan(f"{name} is not set", where=name, hint="start the container without --cleanenv")
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise NoPlan(f"{text!r} is not a whole number of at least {least}", where=name)
    return int(text)


def size_in(env: Mapping[str, str], name: str) -> Size | None:
    """The size of a run in variable `name`; None where it is not set.

    Raises
    ------
    NoPlan : the text is no size.
    """
    text = env.get(name, "")
    try:
        return Size.parse(text) if text.strip() else None
    except ValueError as error:
        raise NoPlan(str(error), where=name, hint="give a number of nodes, MIN:MAX or N+SPARES") from None


def given_nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Hosts of IMGKIT_NODES in their order, each once; empty if it is not set.

    A list with brackets is read as Slurm's compact form. Repeats are dropped: a PBS node file has a line for
    each process of a host.
    """
    text = env.get(NODES, "")
    if "[" in text or "]" in text:
        return unique(expand_nodelist(text, where=NODES))
    return unique(text.replace(",", " ").split())


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Each name once, in the order of first appearance."""
    return tuple(dict.fromkeys(names))


def short(name: str) -> str:
    """A host name without its domain; addresses stay whole."""
    return name if name.replace(".", "").isdigit() or ":" in name else name.split(".", 1)[0]


def hostname(read: Read) -> str:
    """Name of this machine; empty where /proc does not show it."""
    return (read("/proc/sys/kernel/hostname") or "").strip()


def named_hosts(
    env: Mapping[str, str], nnodes: int, found: tuple[str, ...], found_from: str
) -> tuple[tuple[str, ...], str]:
    """Hosts and where they come from: IMGKIT_NODES wins over the launcher.

    On clusters where each node has a second name on the fast network, IMGKIT_NODES holds those names.

    Raises
    ------
    NoPlan : IMGKIT_NODES has another number of hosts than the launcher started.
    """
    given = given_nodes(env)
    if not given or nnodes == 1:
        return found, found_from
    if len(given) != nnodes:
        raise NoPlan(
            f"{NODES} has {len(given)} hosts ({', '.join(given[:8])}), but the launcher started {nnodes}",
            where=NODES,
            hint=f"leave {NODES} out, or list the {nnodes} hosts in the order of their ranks",
        )
    return given, NODES


def head_of(
    env: Mapping[str, str], nnodes: int, hosts: tuple[str, ...], hosts_from: str, *others: str
) -> tuple[str, str]:
    """Address of node 0 and where it comes from: IMGKIT_HEAD, the first host, then the variables `others`.

    Both are empty where none of them is known, and on one node.
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
    """Port in variable `name`; None where it is not set.

    Raises
    ------
    NoPlan : the text is not a number from 1 to 65535.
    """
    if not env.get(name):
        return None
    port = number(env, name, least=1)
    if port > 65535:
        raise NoPlan(f"{port} is not a port number from 1 to 65535", where=name)
    return port


def listed_hosts(env: Mapping[str, str], read: Read) -> tuple[tuple[str, ...], str]:
    """Hosts of IMGKIT_NODES, else of PBS' node file, with the variable's name; empty if none is visible."""
    if given := given_nodes(env):
        return given, NODES
    # Most containers do not show the file.
    text = read(env["PBS_NODEFILE"]) if env.get("PBS_NODEFILE") else None
    found = unique((text or "").split())
    return (found, "PBS_NODEFILE") if found else ((), "")
