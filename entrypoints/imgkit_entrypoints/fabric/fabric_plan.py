"""The plan with a node's network decisions, and the builder that collects them.

Only this module decides which of several values of a variable wins. The order is: the user's environment, an
nccl.conf file, the recipe, the facts of the node, and last the image. A variable counts as the image's if it
has the value that the image's manifest states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.known_issues import IssueResult
from imgkit_entrypoints.system import PARTITION, FabricKind, SystemFacts

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
UNKNOWN_IMAGE = "/opt/imgkit/manifest.json states no variables of an image, so they count as set by the user"

Origin = Literal["user", "recipe", "facts", "image"]
"""Who decided a value, in the order of precedence."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about one variable: its value and the reason, also for a value that is not set."""

    variable: str
    value: str
    reason: str
    """A sentence with its evidence, which is a path with its content, or a variable."""
    used: bool = True
    """False if the value is only reported, and workers do not get it."""
    origin: Origin = "facts"
    """Who set `value`."""

    def __str__(self) -> str:
        return f"{self.variable}={self.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A setting or a part of this machine that is slow, dangerous or useless."""

    what: str
    """The problem and its evidence, as one sentence without a period."""
    fix: str
    """What the user can do about it, such as a variable to set or a command to run."""
    check: str = "network"
    """Name of the check under which dist-doctor lists the finding."""
    is_failure: bool = False
    """True if the check of dist-doctor fails; otherwise it is a warning there."""

    def __str__(self) -> str:
        return f"{self.what}. {self.fix[:1].upper()}{self.fix[1:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricPlan:
    """Every network decision for a launch on this node."""

    kind: FabricKind
    reason: str
    """Evidence for `kind`: ``/sys/class/infiniband/mlx5_0/ports/1/link_layer: InfiniBand``."""
    env: Mapping[str, str]
    """Variables to set, without those that the user has set."""
    decisions: tuple[Decision, ...]
    unset: tuple[str, ...] = ()
    """Variables of the recipe or the image that workers on this node must not get."""
    warnings: tuple[Finding, ...] = ()
    """Settings that are slow or dangerous; the run may go on."""
    blockers: tuple[Finding, ...] = ()
    """Reasons why NCCL would fail or hang between nodes; they do not matter on one node or with gloo."""
    issues: tuple[IssueResult, ...] = ()
    """Result of every row of known issues, also of those that do not match."""
    devices: tuple[str, ...] = ()
    """Devices that carry the traffic: ``mlx5_0:1``, ``cxi0``, ``eth0``."""
    line_rate_Gbps: float | None = None
    """Rate of all `devices` together, in 1e9 bit/s; None if one rate is unknown."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Libraries of the host that workers load: the file in the container by the name that programs open."""
    image: str = ""
    """Why the image's variables count as set by the user. Empty if the image's manifest states them."""

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """Return the known issues for which a run with GPUs must not start."""
        return issue_findings(self.issues, "refuse")


def issue_findings(results: Iterable[IssueResult], effect: str) -> tuple[Finding, ...]:
    """Return a finding for each known issue that this node has, and whose effect is `effect`.

    Parameters
    ----------
    results : the comparison of this node with each row of the table of known issues.
    effect : ``warn`` or ``refuse``; see `known_issues.Issue`.
    """
    findings = []
    for result in results:
        if result.state == "match" and result.issue.effect == effect:
            hint = result.issue.hint
            findings.append(Finding(result.message, hint, "known issue", is_failure=effect == "refuse"))
    return tuple(findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A value that a variable has before imgkit decides anything."""

    value: str
    source: str
    """Text for messages: ``set by the user in /etc/nccl.conf``, ``from the recipe``, ``from the image``."""
    location: str = ""
    """File or part of the recipe that sets it; empty for the environment."""
    origin: Origin

    @property
    def is_users(self) -> bool:
        """Return whether the user has set the value, which is then never replaced."""
        return self.origin == "user"


class Carriers(NamedTuple):
    """The devices that carry the traffic, for example two InfiniBand ports of 200 Gbit/s."""

    devices: tuple[str, ...]
    """``("mlx5_0:1", "mlx5_1:1")``"""
    rate_Gbps: float | None
    """Rate of all devices together; None if unknown."""


@dataclass(slots=True, kw_only=True)
class FabricPlanBuilder:
    """Collects the decisions of a `FabricPlan`, and knows which value of a variable wins."""

    facts: HostFacts
    system: SystemFacts
    env: Mapping[str, str]
    """The environment, without variables that have exactly the recipe's value."""
    recipe: Mapping[str, str]
    """The recipe's variables, with the interfaces of the job's partition."""
    nnodes: int
    head: str = ""
    """Address of node 0; empty if unknown."""
    partition: str = ""
    """The Slurm partition whose interfaces are in `recipe`; empty if the recipe lists none for it."""
    kind: FabricKind = "tcp"
    """The fabric of this node."""
    decisions: list[Decision] = field(default_factory=list)
    worker_env: dict[str, str] = field(default_factory=dict)
    """Variables to set for the workers."""
    dropped: list[str] = field(default_factory=list)
    """Variables that workers must not inherit from the recipe or the image."""
    links: dict[str, str] = field(default_factory=dict)
    """`FabricPlan.links`."""
    warnings: list[Finding] = field(default_factory=list)
    blockers: list[Finding] = field(default_factory=list)

    @property
    def has_several_nodes(self) -> bool:
        """Return whether the run has more than one node."""
        return self.nnodes > 1

    def preset(self, variable: str) -> Preset | None:
        """Return the value that `variable` has before imgkit decides about it, or None if nobody has set it.

        The user's value comes first, then that of an nccl.conf file, the recipe and the image. A value that
        `drop_variable` has left out does not count, and neither does an image's value that `set_variable` has
        replaced.
        """
        image_sets = self.image_sets(variable)
        if variable in self.env and not image_sets:
            return Preset(value=self.env[variable], source="set by the user", origin="user")
        for setting in self.facts.nccl_settings:
            if setting.name == variable:
                # NCCL reads an nccl.conf only for variables that the environment lacks. Setting the variable
                # would therefore override the user's file.
                source = f"set by the user in {setting.path}"
                return Preset(value=setting.value, source=source, location=setting.path, origin="user")
        if variable in self.dropped:
            return None
        if variable in self.recipe:
            return self._recipe_preset(variable)
        if image_sets and variable not in self.worker_env:
            return Preset(value=self.env[variable], source="from the image", origin="image")
        return None

    def _recipe_preset(self, variable: str) -> Preset:
        """Return the recipe's value of a variable."""
        source, location = "from the recipe", "the recipe's system.env"
        if self.partition and variable in INTERFACES:
            source = f"from the recipe, for {PARTITION}={self.partition}"
            location = f"the recipe's system.partitions.{self.partition}"
        return Preset(value=self.recipe[variable], source=source, location=location, origin="recipe")

    def image_sets(self, variable: str) -> bool:
        """Return True if the environment has the value of `variable` that the image's manifest states.

        A user who exports exactly the image's value cannot be told apart from the image.
        """
        image = self.facts.image_env
        return image is not None and variable in self.env and image.get(variable) == self.env[variable]

    def requested_preset(self, variable: str) -> Preset | None:
        """Return the value of the user or the recipe, who chose it for this run or system.

        Returns None if only the image sets the variable, or nobody does.
        """
        preset = self.preset(variable)
        return None if preset is None or preset.origin == "image" else preset

    def image_preset(self, variable: str) -> Preset | None:
        """Return the image's value, or None if the user or the recipe sets the variable or nobody does."""
        preset = self.preset(variable)
        return preset if preset is not None and preset.origin == "image" else None

    def variable_names(self) -> tuple[str, ...]:
        """Return the names of all variables in the environment, in nccl.conf files and in the recipe."""
        settings = (setting.name for setting in self.facts.nccl_settings)
        return tuple(dict.fromkeys((*self.env, *settings, *self.recipe)))

    def worker_value(self, variable: str) -> str | None:
        """Return the value that workers would get after the decisions so far, or None if there is none."""
        preset = self.preset(variable)
        return preset.value if preset else self.worker_env.get(variable)

    def describe(self, variable: str) -> str:
        """Return a value with its source for a message: ``NCCL_IB_HCA='mlx5' (from the recipe)``."""
        preset = self.preset(variable)
        return f"{variable}={preset.value!r} ({preset.source})" if preset else f"{variable}=''"

    def unset_hint(self, variable: str) -> str:
        """Return what a user must do to get rid of the value of `variable`, for a hint.

        It is ``unset NCCL_NET`` for a variable of the environment, and names the file for one in an nccl.conf
        file.
        """
        preset = self.preset(variable)
        # The container sets the image's variables again, so they can only be replaced.
        if preset is not None and preset.origin == "image":
            return f"set another {variable} (--env, or the recipe's system.env)"
        if preset is None or not preset.location:
            return f"unset {variable}"
        return f"remove {variable} from {preset.location}"

    def add_warning(self, problem: str, fix: str, *, failed_check: str = "") -> None:
        """Add a warning about something slow or dangerous to the plan.

        Parameters
        ----------
        problem : what is wrong, with its evidence.
        fix : what the user can do about it.
        failed_check : name of the check of dist-doctor that fails for this reason. Empty for a mere warning.
        """
        self.warnings.append(Finding(problem, fix, failed_check or "network", bool(failed_check)))

    def add_blocker(self, problem: str, fix: str) -> None:
        """Add a reason why NCCL would fail or hang between nodes, and what the user can do about it."""
        self.blockers.append(Finding(problem, fix))

    def add_decision(
        self, variable: str, value: str, reason: str, *, used: bool = False, origin: Origin = "facts"
    ) -> None:
        """Add a decision to the report. This does not change what workers get."""
        self.decisions.append(Decision(variable, value, reason, used, origin))

    def set_variable(self, variable: str, value: str, reason: str) -> None:
        """Set `variable` for the workers, unless the user or the recipe has set it already.

        A value of the user or the recipe is kept, and the report names both values. The image's value is
        replaced.
        """
        preset = self.preset(variable)
        if preset is not None and preset.value == value:
            self._keep_preset(variable, preset, f"{preset.source}; imgkit would set the same: {reason}")
        elif preset is not None and preset.origin != "image":
            self._keep_preset(variable, preset, f"{preset.source}; imgkit would set {value!r}: {reason}")
        else:
            if preset is not None:
                reason += f"; replaces the image's {preset.value!r}"
            self.replace_variable(variable, value, reason)

    def replace_variable(self, variable: str, value: str, reason: str) -> None:
        """Set `variable` for the workers, whoever has set it before."""
        self.worker_env[variable] = value
        self.add_decision(variable, value, reason, used=True)

    def report_unset(self, variable: str, value: str, reason: str) -> None:
        """Report that imgkit does not set `variable`, with the value that it could have and the reason.

        A value that is already set is kept.
        """
        preset = self.preset(variable)
        if preset is None:
            self.add_decision(variable, value, reason)
        else:
            self._keep_preset(variable, preset, f"{preset.source}; not needed: {reason}")

    def _keep_preset(self, variable: str, preset: Preset, reason: str) -> None:
        """Keep and report the value that a variable has already.

        Workers inherit values of the environment. All others are passed to them: those of the recipe, and
        those of an nccl.conf file that the image's value would hide from NCCL.
        """
        image_sets = self.image_sets(variable)
        # NCCL would not read the user's nccl.conf for a variable that has the image's value.
        is_from_conf = preset.is_users and image_sets
        if preset.origin == "recipe" or is_from_conf:
            self.worker_env[variable] = preset.value
        if image_sets and self.env[variable] != preset.value:
            reason = f"{reason}; replaces the image's {self.env[variable]!r}"
        self.add_decision(variable, preset.value, reason, used=True, origin=preset.origin)

    def drop_variable(self, variable: str, reason: str) -> None:
        """Keep a value of the recipe or the image from the workers, because it is wrong on this node.

        A value of the user is kept. `reason` is for the report.
        """
        preset = self.preset(variable)
        if preset is not None and not preset.is_users:
            self.dropped.append(variable)
            reason = f"{preset.source}, not used: {reason}"
            self.add_decision(variable, preset.value, reason, origin=preset.origin)

    def drop_image_variable(self, variable: str, reason: str) -> None:
        """Keep a value of the image from the workers, because it is wrong on this node.

        A value of the user or the recipe is kept.
        """
        if self.image_preset(variable):
            self.drop_variable(variable, reason)

    def keep_undecided_variables(self) -> None:
        """Keep and report the settings of the recipe and of nccl.conf files about which nothing was decided.

        Call this after all decisions. Without it, workers would not get the recipe's further variables.
        """
        decided = {decision.variable for decision in self.decisions}
        for variable, value in self.recipe.items():
            preset = self.preset(variable)
            if variable in decided or preset is None:
                continue
            decided.add(variable)
            if preset.is_users:
                self._keep_preset(variable, preset, f"{preset.source}; the recipe's {value!r} is not used")
            else:
                self._keep_preset(variable, preset, preset.source)
        for setting in self.facts.nccl_settings:
            preset = self.preset(setting.name)
            if setting.name not in decided and preset is not None and preset.location:
                self._keep_preset(setting.name, preset, preset.source)

    def build(self, reason: str, carriers: Carriers, issues: tuple[IssueResult, ...]) -> FabricPlan:
        """Return the plan with all decisions.

        Parameters
        ----------
        reason : the evidence for the fabric.
        issues : the results of all known issues.
        """
        return FabricPlan(
            kind=self.kind,
            reason=reason,
            env=self.worker_env,
            decisions=tuple(self.decisions),
            unset=tuple(name for name in dict.fromkeys(self.dropped) if name not in self.worker_env),
            warnings=tuple(self.warnings),
            blockers=tuple(self.blockers),
            issues=issues,
            devices=carriers.devices,
            line_rate_Gbps=carriers.rate_Gbps,
            links=self.links,
            image=UNKNOWN_IMAGE if self.facts.image_env is None else "",
        )
