"""The MPI launchers Open MPI, Cray PALS and Hydra: how they start a command, and how a rank finds its node.

An MPI launcher starts ranks. It tells each rank how many ranks run on its node, but hardly anything else
about nodes. With one rank per node, the rank runs the node agent, and torchrun starts the workers. With
several ranks per node, every process already is a worker (direct mode).

Notes
-----
No launcher passes on a list of hosts or the address of node 0. So the user must pass on IMGKIT_NODES or
IMGKIT_HEAD, unless PBS' node file can be read. The launcher must not bind its processes to processors. By
default, it would bind all workers of a node to the same core.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers.environment import NODES, Environment, HostList
from imgkit_entrypoints.schedulers.placement import Direct, Placement, WrongStart


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVariables:
    """The variables that a launcher sets for its ranks.

    In each group, the first variable that is set is used.
    """

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node_rank: tuple[str, ...] = ()
    job_id: tuple[str, ...]
    """Variables that form the job id. All that are set are joined.

    They must be the same on every rank, because the port is computed from the job id.
    """

    @property
    def variables(self) -> tuple[str, ...]:
        """Return all variables of the launcher, which must be passed into a container."""
        ranks = (*self.rank, *self.world_size, *self.local_rank, *self.local_world_size)
        return (*ranks, *self.node_rank, *self.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiLauncher:
    """An MPI launcher: the variables that it sets for ranks, and the command line that starts it."""

    NAME: str
    """Name of the launcher. The field is in capitals, as `NAME` in the modules of other launchers.

    Both an `MpiLauncher` and such a module are a `Scheduler` (resolve.py).
    """
    fields: RankVariables
    shown_by: tuple[str, ...]
    """Variables, each of which shows that this launcher has started the process."""
    shown_with: tuple[str, ...] = ()
    """If not empty, at least one of these variables must be set in addition to `shown_by`."""
    forward: tuple[str, ...]
    """Variables that the command line of the launcher passes on if they are set."""
    program: str
    """The launcher's program, such as ``mpirun``."""
    count_option: str
    """Option before the number of processes, such as ``-n``."""
    once_per_node_options: tuple[str, ...]
    """Options that start one process on each node, without binding it to processors."""
    export: tuple[str, ...]
    """Options that set the variable {name} to {value} for the processes."""

    def claims(self, env: Environment) -> tuple[str, ...]:
        """Return the variables that show this launcher, or () if it has not started this process."""
        if self.shown_with and not env.find_set(*self.shown_with):
            return ()
        return env.find_set(*self.shown_by)

    def export_options(self, name: str, value: str) -> tuple[str, ...]:
        """Return the options that set a variable for all processes, such as ``-x NAME=VALUE``."""
        return tuple(part.format(name=name, value=value) for part in self.export)

    def start_argv(
        self,
        command: Sequence[str],
        *,
        nnodes: int,
        forward: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> tuple[str, ...]:
        """Return the argv that starts `command` once on each node.

        Parameters
        ----------
        forward : variables to set for the processes, with their values.
        options : further options of the launcher.
        """
        exports: list[str] = []
        for name, value in (forward or {}).items():
            exports += self.export_options(name, value)
        return (
            self.program,
            self.count_option,
            str(nnodes),
            *self.once_per_node_options,
            *exports,
            *options,
            *command,
        )

    def per_node_command(self, command: Sequence[str], *, nnodes: int, env: Environment) -> str:
        """Return the line that starts `command` on all nodes, for the error about a start on one node."""
        forward = {name: env[name] for name in env.find_set(*self.forward)}
        return shlex.join(self.start_argv(command, nnodes=nnodes, forward=forward))

    def find_placement(self, env: Environment) -> Placement:
        """Return the placement of this process, which is the node on which this launcher has started it.

        If the launcher has started several processes on each node, the placement also contains the rank of
        this process.

        Raises
        ------
        WrongStart : the command was started on one node, but the list of hosts contains several.
        NoPlan : no variable contains the address of node 0, or the numbers contradict each other.
        """
        hosts = env.find_hosts()
        ranks = self._read_ranks(env, len(hosts.names))
        nnodes = ranks.world_size // ranks.local_world_size
        self._check_hosts(env, nnodes, hosts)
        node_rank, node_rank_variable = self._find_node_rank(env, ranks, nnodes)
        head, head_variable = env.find_head(nnodes, hosts, "MASTER_ADDR")
        if nnodes > 1 and not head:
            raise self._make_head_error(env, nnodes, ranks.rank)
        job_id_variables = env.find_set(*self.fields.job_id)
        source = {
            "nnodes": self._list_size_variables(env, hosts),
            "node_rank": node_rank_variable,
            "head": head_variable,
            "hosts": hosts.variable,
            "job_id": ", ".join(job_id_variables),
        }
        port = None
        if head_variable == "MASTER_ADDR":  # MASTER_PORT belongs to MASTER_ADDR, so it is only used with it
            port = env.read_port("MASTER_PORT")
        if port is not None:
            source["port"] = "MASTER_PORT"
        return Placement(
            scheduler=self.NAME,
            nnodes=nnodes,
            node_rank=node_rank,
            hosts=hosts.names,
            head=head,
            port=port,
            job_id=".".join(env[name] for name in job_id_variables),
            source=source,
            direct=ranks if ranks.local_world_size > 1 else None,
        )

    def _make_hint(self, name: str, value: str) -> str:
        """Return a hint that shows how to set the variable `name` on the command line of the launcher."""
        return f"start it with `{' '.join((self.program, *self.export_options(name, value)))} ...`"

    def _make_head_error(self, env: Environment, nnodes: int, rank: int) -> NoPlan:
        """Return the error about the unknown address of node 0. On rank 0, the hint has its host name."""
        host = env.hostname() if rank == 0 else ""
        return NoPlan(
            f"the run has {nnodes} nodes, but {self.NAME} does not say which host has rank 0",
            where="IMGKIT_HEAD",
            hint=f"{self._make_hint('IMGKIT_HEAD', host or 'HOST')}: the host of rank 0, under a name "
            "that the other nodes can reach",
        )

    def _list_size_variables(self, env: Environment, hosts: HostList) -> str:
        """Return the variables from which the number of nodes was computed, separated by commas."""
        size_variable = env.find_first_set(self.fields.world_size) or hosts.variable
        local_size_variable = env.find_first_set(self.fields.local_world_size)
        return ", ".join(env.find_set(size_variable, local_size_variable))

    def _read_ranks(self, env: Environment, host_count: int) -> Direct:
        """Return the rank of this process, and the number of ranks in the job and on this node.

        If no variable contains one of these two numbers, it is computed from the number of hosts.

        Raises
        ------
        NoPlan : a number is unknown, or the numbers contradict each other.
        """
        local_size = self._read_local_size(env, host_count)
        world_size_variable = env.find_first_set(self.fields.world_size)
        size = local_size * host_count
        if world_size_variable:
            size = env.read_number(world_size_variable, least=1)
        rank_variable = env.choose_name(self.fields.rank)
        rank = env.read_number(rank_variable)
        local_rank = self._read_local_rank(env, local_size)
        if size % local_size:  # nnodes, the quotient of both, must be a whole number
            raise NoPlan(
                f"the job has {size} ranks, {local_size} of them on this node: nodes have different numbers "
                "of ranks",
                where=env.quote(world_size_variable, env.find_first_set(self.fields.local_world_size)),
                hint="start the same number of ranks on every node, preferably one: torchrun starts the "
                "workers",
            )
        if rank >= size:
            raise NoPlan(
                f"this is rank {rank}, but the job has only ranks 0 to {size - 1}",
                where=env.quote(rank_variable, world_size_variable),
            )
        return Direct(rank=rank, local_rank=local_rank, world_size=size, local_world_size=local_size)

    def _read_local_rank(self, env: Environment, local_size: int) -> int:
        """Return the rank of this process among the `local_size` ranks on this node.

        Raises
        ------
        NoPlan : no variable contains the local rank, although the node has several, or it is too large.
        """
        variable = env.find_first_set(self.fields.local_rank)
        if not variable and local_size == 1:
            return 0
        local_rank = env.read_number(env.choose_name(self.fields.local_rank))
        if local_rank >= local_size:
            problem = f"this is local rank {local_rank}, but the node has only ranks 0 to {local_size - 1}"
            raise NoPlan(problem, where=variable)
        return local_rank

    def _read_local_size(self, env: Environment, host_count: int) -> int:
        """Return the number of ranks on this node.

        If no variable contains it, it is the number of all ranks divided by the number of hosts.

        Raises
        ------
        NoPlan : the number of nodes, or of ranks on this node, is unknown.
        """
        fields = self.fields
        world_size_variable = env.find_first_set(fields.world_size)
        local_size_variable = env.find_first_set(fields.local_world_size)
        # Without a list of hosts, the number of nodes can only be computed from these two numbers.
        if host_count == 0 and not world_size_variable:
            raise self._make_number_error(env, "nodes", fields.world_size)
        if host_count == 0 and not local_size_variable:
            raise self._make_number_error(env, "nodes", fields.local_world_size)
        if local_size_variable:
            return env.read_number(local_size_variable, least=1)
        # From here on, there is a list of hosts.
        if world_size_variable:
            return max(1, env.read_number(world_size_variable) // host_count)
        # A launcher may set only the rank. Then assume one rank for each node if nothing contradicts it.
        if self._seems_alone(env):
            return 1
        variables = (*fields.local_world_size, *fields.world_size)
        raise self._make_number_error(env, "ranks on this node", variables)

    def _seems_alone(self, env: Environment) -> bool:
        """Return whether no variable contradicts that each node has one rank.

        With one rank on each node, the rank equals the index of the node, and the local rank is 0. With
        several, this is false for some of the ranks, which then end the run with an error.
        """
        rank = env.get(env.find_first_set(self.fields.rank))
        node_rank = env.get(env.find_first_set(self.fields.node_rank))
        if rank is None or rank != node_rank:  # None: no variable with the rank is set
            return False
        local_rank = env.get(env.find_first_set(self.fields.local_rank), "0")
        return local_rank == "0"

    def _make_number_error(self, env: Environment, counted: str, variables: Sequence[str]) -> NoPlan:
        """Return the error about a number that is unknown because none of `variables` is set.

        The hint tells the user to list the hosts.

        Parameters
        ----------
        counted : what the number counts, such as ``nodes``.
        """
        host_list_clause = "" if env.get(NODES) else ", and there is no host list"
        return NoPlan(
            f"the number of {counted} is unknown: none of {', '.join(variables)} is set{host_list_clause}",
            where=env.quote(*self.fields.variables, NODES) or self.NAME,
            hint=f"{self._make_hint(NODES, 'HOST,HOST,...')}, with the hosts in the order of their ranks, "
            "and the container without --cleanenv",
        )

    def _check_hosts(self, env: Environment, nnodes: int, hosts: HostList) -> None:
        """Raise an error if the list of hosts has another length than the number of started nodes.

        Raises
        ------
        WrongStart : only one node was started. The caller tells the user how to start all of them.
        NoPlan : any other number of nodes was started.
        """
        host_count = len(hosts.names)
        if host_count in (0, nnodes):  # 0: there is no list
            return
        names = ", ".join(hosts.names[:8])
        # The variable from which `nnodes` was computed.
        size_variable = env.find_first_set((*self.fields.world_size, *self.fields.local_world_size))
        where = f"{hosts.variable}, {size_variable}"
        if nnodes == 1:
            problem = f"{self.NAME} started this on 1 node, but the job has {host_count} ({names})"
            raise WrongStart(problem, where=where, nnodes=host_count)
        raise NoPlan(
            f"{self.NAME} started {nnodes} nodes, but {hosts.variable} lists {host_count}: {names}",
            where=where,
            hint=f"{self._make_hint(NODES, 'HOST,HOST,...')}, with the {nnodes} hosts in the order of their "
            "ranks",
        )

    def _find_node_rank(self, env: Environment, ranks: Direct, nnodes: int) -> tuple[int, str]:
        """Return the rank of this node, and the variable from which it was read or computed.

        If the launcher sets no variable with the node's rank, it is computed from the rank of this process.
        """
        node_rank_variable = env.find_first_set(self.fields.node_rank)
        if not node_rank_variable:
            return compute_node_rank(ranks, nnodes), env.find_first_set(self.fields.rank)
        node_rank = env.read_number(node_rank_variable)
        if node_rank >= nnodes:
            problem = f"this is node {node_rank}, but the job has only nodes 0 to {nnodes - 1}"
            raise NoPlan(problem, where=f"{node_rank_variable}={node_rank}")
        return node_rank, node_rank_variable


def compute_node_rank(ranks: Direct, nnodes: int) -> int:
    """Return the rank of the node on which a rank runs.

    A launcher either fills one node after another with ranks, or gives each node one rank in turn. For 2
    nodes and 4 ranks, these are the ranks of each node, in the order of the local ranks::

        filled      node 0: 0, 1    node 1: 2, 3
        in turn     node 0: 0, 2    node 1: 1, 3

    The local rank shows which order it is. If both are possible, as for rank 0, the nodes count as filled.
    """
    fills_nodes = ranks.rank % ranks.local_world_size == ranks.local_rank
    alternates = ranks.rank // nnodes == ranks.local_rank
    if alternates and not fills_nodes:
        return ranks.rank % nnodes
    return ranks.rank // ranks.local_world_size


OPENMPI = MpiLauncher(
    NAME="openmpi",
    # OMPI_COMM_WORLD_NODE_RANK is not used, because it is not the node's index but a rank among all jobs on a
    # node.
    fields=RankVariables(
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job_id=("PMIX_NAMESPACE",),
    ),
    shown_by=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # not PMIX_*, which srun sets as well
    forward=("IMGKIT_NODES", "IMGKIT_HEAD"),  # each with its own -x
    program="mpirun",
    count_option="-np",
    # By default, mpirun would bind torchrun, and so all workers of the node, to one core.
    once_per_node_options=("--map-by", "ppr:1:node", "--bind-to", "none"),
    export=("-x", "{name}={value}"),
)
"""Open MPI 4 and 5."""

PALS = MpiLauncher(
    NAME="pals",
    # PALS_PPN, PALS_CPU_BIND and PALS_DEPTH are settings that sites may preset, so they do not show that PALS
    # has started the process. Some systems do not set PALS_SIZE, so PMI_SIZE comes first, and the list of
    # hosts is the last resort. Slurm's Cray plugin sets PALS_* as well, but then Slurm determines the
    # placement (resolve.OVERLAPS).
    fields=RankVariables(
        rank=("PALS_RANKID",),
        world_size=("PMI_SIZE", "PALS_SIZE"),
        local_rank=("PALS_LOCAL_RANKID",),
        local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        job_id=("PBS_JOBID", "PALS_APID"),
    ),
    shown_by=("PALS_RANKID", "PALS_NODEID"),
    forward=("IMGKIT_NODES",),  # mpiexec passes the environment on, but the container may not
    program="mpiexec",
    count_option="-n",
    once_per_node_options=("--ppn", "1", "--cpu-bind", "none"),
    export=("--env", "{name}={value}"),
)
"""Cray PALS, the ``mpiexec`` of HPE systems with PBS."""

HYDRA_OWN: tuple[str, ...] = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Variables that only Hydra sets. PMI_* are also set by the launchers of Slurm and HPE."""

HYDRA = MpiLauncher(
    NAME="hydra",
    fields=RankVariables(
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job_id=("PBS_JOBID", "SLURM_JOB_ID"),
    ),
    shown_by=(*HYDRA_OWN, "PMI_RANK", "PMI_SIZE"),
    shown_with=("PMI_RANK",),
    forward=("IMGKIT_NODES", "IMGKIT_HEAD"),  # each with its own -genv
    program="mpiexec",
    count_option="-n",
    once_per_node_options=("-ppn", "1", "-bind-to", "none"),
    export=("-genv", "{name}", "{value}"),
)
"""MPICH and Intel MPI, whose launcher is called Hydra."""
