"""Read from variables and files on which node of its job this process is, and raise errors for wrong values.

Many methods of `Environment` return a value together with the variable that contains it. A dry run and error
messages show the variable, so that the user knows which one to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.hostlist import expand_nodelist

Read = Callable[[str], "str | None"]
"""Function that returns the content of the file at an absolute path, or None if it cannot be read."""

# Variable with the hosts of the job in the order of the node ranks: "n1,n2", "n1 n2" or "n[1-2]".
NODES = "IMGKIT_NODES"
MAX_DIGITS = 9
"""Largest number of digits of a count or a rank."""


class HostList(NamedTuple):
    """The hosts of a job, and the variable that contains them. Both are empty if there is no list."""

    names: tuple[str, ...] = ()
    variable: str = ""


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` without duplicates, in the order of their first appearance."""
    return tuple(dict.fromkeys(names))


def short_host(name: str) -> str:
    """Return a host name without its domain, such as ``n1`` for ``n1.example.org``.

    Addresses stay complete.
    """
    # An IPv4 address has only digits and dots, and an IPv6 address has colons.
    if name.replace(".", "").isdigit() or ":" in name:
        return name
    return name.partition(".")[0]


class Environment(dict[str, str]):
    """The variables of this process, and a function that reads files.

    An empty variable counts as not set, because training operators set variables that they do not use to the
    empty string.
    """

    def __init__(self, variables: Mapping[str, str], read: Read = lambda path: None) -> None:
        super().__init__(variables)
        self.read = read

    def find_set(self, *names: str) -> tuple[str, ...]:
        """Return the variables among `names` that are set."""
        return tuple(name for name in names if self.get(name))

    def has_all(self, names: Sequence[str]) -> bool:
        """Return whether all variables `names` are set."""
        return len(self.find_set(*names)) == len(names)

    def find_first_set(self, names: Sequence[str]) -> str:
        """Return the first variable among `names` that is set, or "" if none is."""
        for name in names:
            if self.get(name):
                return name
        return ""

    def choose_name(self, names: Sequence[str]) -> str:
        """Return the first variable among `names` that is set.

        If none is set, return the first of `names`, so that an error can name it.
        """
        return self.find_first_set(names) or names[0]

    def quote(self, *names: str) -> str:
        """Return the variables among `names` that are set, as ``NAME=VALUE, NAME=VALUE`` for an error."""
        return ", ".join(f"{name}={self[name]}" for name in self.find_set(*names))

    def read_number(self, name: str, *, least: int = 0) -> int:
        """Return the whole number in the variable `name`.

        Raises
        ------
        NoPlan : the variable is not set, is not a whole number, or is below `least`.
        """
        number_text = self.get(name, "").strip()
        if not number_text:
            raise NoPlan(f"{name} is not set", hint="start the container without --cleanenv")
        number = parse_digits(number_text)
        if number is None or number < least or len(number_text) > MAX_DIGITS:
            raise NoPlan(f"{number_text!r} is not a whole number of at least {least}", where=name)
        return number

    def read_port(self, name: str) -> int | None:
        """Return the port in the variable `name`, or None if it is not set.

        Raises
        ------
        NoPlan : the text is not a number from 1 to 65535.
        """
        if not self.get(name):
            return None
        port = self.read_number(name, least=1)
        if port > 65535:
            raise NoPlan(f"{port} is not a port number from 1 to 65535", where=name)
        return port

    def hostname(self) -> str:
        """Return the name of this machine, or "" if /proc does not show it."""
        return (self.read("/proc/sys/kernel/hostname") or "").strip()

    def find_position(self, hosts: Sequence[str]) -> int | None:
        """Return the index of this machine in `hosts`, or None unless it is there exactly once.

        Host names are compared without their domains, because some launchers omit the domain.
        """
        name = short_host(self.hostname())
        short_names = [short_host(host) for host in hosts]
        if not name or short_names.count(name) != 1:
            return None
        return short_names.index(name)

    def find_node_rank(
        self, nnodes: int, nnodes_from: str, hosts: HostList, *variables: str
    ) -> tuple[int | None, str]:
        """Return the rank of this node and its source, such as ``(2, "PBS_NODENUM")``.

        The rank is the value of the first of `variables` that is set. If none is set, it is the position of
        this machine in `hosts`, and the source is ``hostname``. If that is unknown as well, return ``(None,
        "")``. In a run on one node, the rank is 0, and its source is `nnodes_from`.

        Parameters
        ----------
        nnodes : number of nodes of the run.
        nnodes_from : the variable that contains the number of nodes.
        hosts : the hosts of the job.
        variables : variables that may contain the rank.
        """
        if nnodes == 1:
            return 0, nnodes_from
        name = self.find_first_set(variables)
        if name:
            return self.read_number(name), name
        position = self.find_position(hosts.names)
        if position is None:
            return None, ""
        return position, "hostname"

    def requested_nodes(self) -> tuple[str, ...]:
        """Return the hosts in IMGKIT_NODES, each once and in their order, or () if the variable is not set.

        A list with brackets is in Slurm's compact form: ``n[1-2]`` means n1 and n2. Otherwise commas and
        spaces separate the hosts. A host may appear several times, because a PBS node file has a line for
        each process on a host.
        """
        text = self.get(NODES, "")
        if "[" in text or "]" in text:
            return unique_names(expand_nodelist(text, where=NODES))
        return unique_names(text.replace(",", " ").split())

    def find_hosts(self) -> HostList:
        """Return the hosts of the job from IMGKIT_NODES. If it is not set, read the node file of PBS."""
        requested = self.requested_nodes()
        if requested:
            return HostList(requested, NODES)
        node_file = self.get("PBS_NODEFILE")
        text = self.read(node_file) if node_file else None
        if not text or not text.strip():  # most containers do not contain the node file
            return HostList()
        return HostList(unique_names(text.split()), "PBS_NODEFILE")

    def choose_hosts(self, nnodes: int, launcher_hosts: HostList) -> HostList:
        """Return the hosts of the run: those in IMGKIT_NODES if it is set, otherwise those of the launcher.

        On some clusters, each node has a second name on the fast network. The user then lists these names in
        IMGKIT_NODES. In a run on one node, its hosts are not used.

        Parameters
        ----------
        nnodes : number of nodes on which the launcher has started the command.
        launcher_hosts : the hosts that the launcher names.

        Raises
        ------
        NoPlan : the number of hosts in IMGKIT_NODES differs from `nnodes`.
        """
        requested = self.requested_nodes()
        if not requested:
            return launcher_hosts
        if nnodes == 1:  # no other node connects to this one, and the list may be for a run on more nodes
            return launcher_hosts
        if len(requested) != nnodes:
            raise NoPlan(
                f"{len(requested)} hosts ({', '.join(requested[:8])}), but the launcher started {nnodes}",
                where=NODES,
                hint=f"leave {NODES} out, or list the {nnodes} hosts in the order of their ranks",
            )
        return HostList(requested, NODES)

    def find_head(self, nnodes: int, hosts: HostList, *variables: str) -> tuple[str, str]:
        """Return the address of node 0 (the head), and the variable that contains it.

        The address comes from IMGKIT_HEAD, or else it is the first of `hosts`, or else the value of the first
        of `variables` that is set. Return ``("", "")`` in a run on one node, and if the address is unknown.
        """
        if nnodes == 1:
            return "", ""
        if self.get("IMGKIT_HEAD"):
            return self["IMGKIT_HEAD"], "IMGKIT_HEAD"
        if hosts.names:
            return hosts.names[0], hosts.variable
        name = self.find_first_set(variables)
        return self.get(name, ""), name
