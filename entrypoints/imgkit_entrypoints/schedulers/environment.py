"""Variables and files that say which node of its job this process is on, with the errors for wrong values.

Many methods of `Environment` return a value together with the variable that it comes from. The variable
appears in a dry run and in error messages, so that the user knows which one to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.hostlist import expand_nodelist

Read = Callable[[str], "str | None"]
"""Function that returns the content of the file at an absolute path, or None if it cannot be read."""

# The hosts of the job in the order of the node ranks: "n1,n2", "n1 n2" or "n[1-2]".
NODES = "IMGKIT_NODES"


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return each name once, in the order of first appearance."""
    return tuple(dict.fromkeys(names))


def short_host(name: str) -> str:
    """Return a host name without its domain: ``n1.example.org`` -> ``n1``. Addresses stay complete."""
    # An IPv4 address has only digits and dots, and an IPv6 address has colons.
    if name.replace(".", "").isdigit() or ":" in name:
        return name
    return name.partition(".")[0]


class Environment(dict[str, str]):
    """The variables of this process, and a function that reads files.

    An empty variable counts as not set, since training operators set variables that they do not use to the
    empty string.
    """

    def __init__(self, variables: Mapping[str, str], read: Read = lambda path: None) -> None:
        super().__init__(variables)
        self.read = read

    def present(self, *names: str) -> tuple[str, ...]:
        """Return those of `names` that are set."""
        return tuple(name for name in names if self.get(name))

    def first(self, names: Sequence[str]) -> str:
        """Return the first of `names` that is set, or an empty text if none is."""
        return next((name for name in names if self.get(name)), "")

    def variable(self, names: Sequence[str]) -> str:
        """Return the first of `names` that is set. If none is, return the first name for an error message."""
        return self.first(names) or names[0]

    def quote(self, *names: str) -> str:
        """Return those of `names` that are set for an error message, as ``NAME=VALUE, NAME=VALUE``."""
        return ", ".join(f"{name}={self[name]}" for name in self.present(*names))

    def number(self, name: str, *, least: int = 0) -> int:
        """Return the whole number in variable `name`.

        Raises
        ------
        NoPlan : the variable is not set, not a whole number, or below `least`.
        """
        text = self.get(name, "").strip()
        if not text:
            raise NoPlan(f"{name} is not set", hint="start the container without --cleanenv")
        value = parse_digits(text) if len(text) < 10 else None  # no count or rank has ten digits
        if value is None or value < least:
            raise NoPlan(f"{text!r} is not a whole number of at least {least}", where=name)
        return value

    def port(self, name: str) -> int | None:
        """Return the port in variable `name`, or None if it is not set.

        Raises
        ------
        NoPlan : the text is not a number from 1 to 65535.
        """
        if not self.get(name):
            return None
        port = self.number(name, least=1)
        if port > 65535:
            raise NoPlan(f"{port} is not a port number from 1 to 65535", where=name)
        return port

    def hostname(self) -> str:
        """Return the name of this machine, or an empty text if /proc does not show it."""
        return (self.read("/proc/sys/kernel/hostname") or "").strip()

    def position_in(self, hosts: Sequence[str]) -> int | None:
        """Return the index of this machine in `hosts`, or None if it is not there exactly once.

        Host names are compared without their domains.
        """
        name = short_host(self.hostname())
        positions = [index for index, host in enumerate(hosts) if name and short_host(host) == name]
        return positions[0] if len(positions) == 1 else None

    def node_rank(self, hosts: Sequence[str], *variables: str) -> tuple[int | None, str]:
        """Return the rank of this node and its source: the first of `variables` that is set, or ``hostname``.

        The rank is None if no variable is set and this machine is not in `hosts`.
        """
        name = self.first(variables)
        if name:
            return self.number(name), name
        position = self.position_in(hosts)
        return position, "" if position is None else "hostname"

    def requested_nodes(self) -> tuple[str, ...]:
        """Return the hosts of IMGKIT_NODES in their order, each once. Empty if the variable is not set.

        A list with brackets is read as Slurm's compact form: ``n[1-2]`` -> n1, n2. Otherwise commas and
        spaces separate the hosts. Repeats are dropped, since a PBS node file has a line for each process of a
        host.
        """
        text = self.get(NODES, "")
        if "[" in text or "]" in text:
            return unique_names(expand_nodelist(text, where=NODES))
        return unique_names(text.replace(",", " ").split())

    def listed_hosts(self) -> tuple[tuple[str, ...], str]:
        """Return the hosts of IMGKIT_NODES, or else of PBS' node file, and the name of the variable.

        Both are empty if neither is known.
        """
        requested = self.requested_nodes()
        if requested:
            return requested, NODES
        node_file = self.get("PBS_NODEFILE")
        text = self.read(node_file) if node_file else None
        if not text or not text.strip():  # in most containers, the path of the file does not exist
            return (), ""
        return unique_names(text.split()), "PBS_NODEFILE"

    def named_hosts(
        self, nnodes: int, hosts: tuple[str, ...], hosts_from: str
    ) -> tuple[tuple[str, ...], str]:
        """Return the hosts and their source. IMGKIT_NODES takes precedence over the launcher's `hosts`.

        On some clusters, each node has a second name on the fast network. IMGKIT_NODES then holds those
        names.

        Raises
        ------
        NoPlan : IMGKIT_NODES has another number of hosts than the launcher started.
        """
        requested = self.requested_nodes()
        if not requested or nnodes == 1:
            return hosts, hosts_from
        if len(requested) != nnodes:
            raise NoPlan(
                f"{len(requested)} hosts ({', '.join(requested[:8])}), but the launcher started {nnodes}",
                where=NODES,
                hint=f"leave {NODES} out, or list the {nnodes} hosts in the order of their ranks",
            )
        return requested, NODES

    def head(self, nnodes: int, hosts: tuple[str, ...], hosts_from: str, *variables: str) -> tuple[str, str]:
        """Return the address of node 0 and its source.

        The source is IMGKIT_HEAD, that of `hosts` for their first one, or one of `variables`, in this order.
        Both are empty on one node, and if nothing says where node 0 is.
        """
        if nnodes == 1:
            return "", ""
        if self.get("IMGKIT_HEAD"):
            return self["IMGKIT_HEAD"], "IMGKIT_HEAD"
        if hosts:
            return hosts[0], hosts_from
        name = self.first(variables)
        return self.get(name, ""), name
