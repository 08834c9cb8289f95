"""The plan with a node's network decisions, and the builder that collects them.

Several parties may set the same variable. Only this module decides whose value wins. The order is: the user's
environment, an nccl.conf file, the recipe, the value that imgkit derives from the facts of the node, and last
the image. A variable counts as set by the image if it has exactly the value in the image's manifest.
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
    """A decision about one variable: the value and the reason for it.

    Some decisions are only reported, such as the value that imgkit would set if the user had not set another.
    """

    variable: str
    value: str
    reason: str
    """A sentence with its evidence: a variable, or a file with its content."""
    used: bool = True
    """False if the value is only reported and workers do not get it."""
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
    """Settings that are slow or dangerous. They do not keep a run from starting."""
    blockers: tuple[Finding, ...] = ()
    """Reasons why NCCL would fail or hang between nodes. They do not matter on one node or with Gloo."""
    issues: tuple[IssueResult, ...] = ()
    """The result for every row in the table of known issues, including rows that do not match this node."""
    devices: tuple[str, ...] = ()
    """Devices that carry the traffic: ``mlx5_0:1``, ``cxi0``, ``eth0``."""
    line_rate_Gbps: float | None = None
    """Rate of all `devices` together, in 1e9 bit/s; None if one rate is unknown."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Libraries of the host that workers load.

    Keys are the names that programs open, such as ``libfabric.so.1``. Values are paths in the container.
    """
    image: str = ""
    """Why the image's variables count as set by the user. Empty if the image's manifest states them."""

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """Return the known issues for which a run with GPUs must not start."""
        return issue_findings(self.issues, "refuse")


def issue_findings(results: Iterable[IssueResult], effect: str) -> tuple[Finding, ...]:
    """Return a finding for each known issue that affects this node and has the given effect.

    Parameters
    ----------
    results : the result for each row in the table of known issues.
    effect : ``warn``, or ``refuse`` for an issue that must keep a run from starting (`known_issues.Issue`).
    """
    findings = []
    for result in results:
        if result.state == "match" and result.issue.effect == effect:
            hint = result.issue.hint
            findings.append(Finding(result.message, hint, "known issue", is_failure=effect == "refuse"))
    return tuple(findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The value that a variable has before imgkit decides about it, and who has set that value."""

    value: str
    source: str
    """Text for messages: ``set by the user in /etc/nccl.conf``, ``from the recipe``, ``from the image``."""
    location: str = ""
    """The file or the section of the recipe that sets the value; empty if the environment has it."""
    origin: Origin

    @property
    def is_from_user(self) -> bool:
        """Return whether the user has set the value, which is then never replaced."""
        return self.origin == "user"

    @property
    def is_from_conf_file(self) -> bool:
        """Return whether the user has set the value in an nccl.conf file and not in the environment."""
        return self.is_from_user and self.location != ""


class Carriers(NamedTuple):
    """The devices that carry the traffic, for example two InfiniBand ports of 200 Gbit/s."""

    devices: tuple[str, ...]
    """``("mlx5_0:1", "mlx5_1:1")``"""
    rate_Gbps: float | None
    """Rate of all devices together; None if unknown."""


@dataclass(slots=True, kw_only=True)
class FabricPlanBuilder:
    """Collects the decisions for a `FabricPlan`, and determines which value of a variable wins.

    The functions that decide about a fabric call `set_variable`, `drop_variable` or `leave_variable`. These
    methods respect the values of the user and the recipe, so that callers need not look at them.
    """

    facts: HostFacts
    system: SystemFacts
    env: Mapping[str, str]
    """The environment without the variables that have exactly the recipe's value."""
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
        """Return the value that somebody else than imgkit has set for `variable`, or None if there is none.

        The user's value comes first, in the environment or else in an nccl.conf file. The recipe's value and
        the image's come after it, in this order. They do not count any more if `drop_variable` has dropped
        the variable. The image's value does not count either if `set_variable` has replaced it.
        """
        users_preset = self._find_users_preset(variable)
        if users_preset is not None:
            return users_preset
        if variable in self.dropped:  # by `drop_variable`, which never drops a value of the user
            return None
        if variable in self.recipe:
            return self._make_recipe_preset(variable)
        # A variable in `worker_env` has a value of imgkit, which has replaced the image's.
        if self.is_set_by_image(variable) and variable not in self.worker_env:
            return Preset(value=self.env[variable], source="from the image", origin="image")
        return None

    def _find_users_preset(self, variable: str) -> Preset | None:
        """Return the user's value of a variable, from the environment or else an nccl.conf file, or None."""
        # `env` does not have the recipe's values, so a value that is not the image's is the user's.
        if variable in self.env and not self.is_set_by_image(variable):
            return Preset(value=self.env[variable], source="set by the user", origin="user")
        for setting in self.facts.nccl_settings:
            if setting.name == variable:
                # NCCL reads nccl.conf only for variables that are missing in the environment. If imgkit set
                # the variable, it would override the user's file.
                source = f"set by the user in {setting.path}"
                return Preset(value=setting.value, source=source, location=setting.path, origin="user")
        return None

    def _make_recipe_preset(self, variable: str) -> Preset:
        """Return the recipe's value of a variable, with the section of the recipe that sets it.

        The recipe can list network interfaces for each Slurm partition, so these have a section of their own.
        """
        source, location = "from the recipe", "the recipe's system.env"
        if self.partition and variable in INTERFACES:
            source = f"from the recipe, for {PARTITION}={self.partition}"
            location = f"the recipe's system.partitions.{self.partition}"
        return Preset(value=self.recipe[variable], source=source, location=location, origin="recipe")

    def is_set_by_image(self, variable: str) -> bool:
        """Return whether the value of `variable` in the environment comes from the image.

        This is assumed if the value equals the one in the image's manifest. A user who exports exactly this
        value cannot be distinguished from the image.
        """
        image = self.facts.image_env
        return image is not None and variable in self.env and image.get(variable) == self.env[variable]

    def requested_preset(self, variable: str) -> Preset | None:
        """Return the value that the user chose for this run, or the recipe for this cluster.

        Return None if only the image sets the variable, or if it is not set at all.
        """
        preset = self.preset(variable)
        return None if preset is None or preset.origin == "image" else preset

    def image_preset(self, variable: str) -> Preset | None:
        """Return the image's value of `variable`, or None.

        The result is None if the image does not set the variable, or if a value of the user or the recipe
        takes precedence.
        """
        preset = self.preset(variable)
        return preset if preset is not None and preset.origin == "image" else None

    def variable_names(self) -> tuple[str, ...]:
        """Return the names of all variables in the environment, in nccl.conf files and in the recipe."""
        settings = (setting.name for setting in self.facts.nccl_settings)
        return tuple(dict.fromkeys((*self.env, *settings, *self.recipe)))

    def worker_value(self, variable: str) -> str | None:
        """Return the value that workers would get after the decisions so far, or None if it is not set."""
        preset = self.preset(variable)
        return preset.value if preset else self.worker_env.get(variable)

    def describe(self, variable: str) -> str:
        """Return the value of a variable and its source for a message.

        For example ``NCCL_IB_HCA='mlx5' (from the recipe)``.
        """
        preset = self.preset(variable)
        return f"{variable}={preset.value!r} ({preset.source})" if preset else f"{variable}=''"

    def unset_hint(self, variable: str) -> str:
        """Return a hint that tells the user how to remove the value of `variable`.

        For a variable of the environment, the hint is ``unset NCCL_NET``. For a variable in an nccl.conf file
        or in the recipe, the hint names the file or the section.
        """
        preset = self.preset(variable)
        # Unsetting an image's variable has no effect, because every container sets it again.
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
        failed_check : name of the check that fails in dist-doctor for this reason. If the name is empty,
            dist-doctor shows only a warning.
        """
        self.warnings.append(Finding(problem, fix, failed_check or "network", bool(failed_check)))

    def add_blocker(self, problem: str, fix: str) -> None:
        """Add a reason why a run on several nodes must not start, and what the user can do about it.

        NCCL would fail or hang between the nodes.
        """
        self.blockers.append(Finding(problem, fix))

    def add_decision(
        self, variable: str, value: str, reason: str, *, used: bool = False, origin: Origin = "facts"
    ) -> None:
        """Add a decision to the report. This does not change the variables of the workers.

        If `used` is True, the caller has already made sure that workers get `value`.
        """
        self.decisions.append(Decision(variable, value, reason, used, origin))

    def set_variable(self, variable: str, value: str, reason: str) -> None:
        """Set `variable` for the workers, unless the user or the recipe has set it already.

        If the user or the recipe has set it, that value is kept and the report names both values. If only the
        image has set it, the image's value is replaced.
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
        """Set `variable` for the workers, even if the user or the recipe has set it."""
        self.worker_env[variable] = value
        self.add_decision(variable, value, reason, used=True)

    def leave_variable(self, variable: str, reason: str, *, right_value: str = "") -> None:
        """Leave `variable` as it is, and report the reason why imgkit does not set it.

        If the user, the recipe or the image has set it, workers get that value. Otherwise it remains unset,
        and `right_value` is only shown in the report, as the value that would be right on this node.
        """
        preset = self.preset(variable)
        if preset is None:
            self.add_decision(variable, right_value, reason)
        else:
            self._keep_preset(variable, preset, f"{preset.source}; not needed: {reason}")

    def _keep_preset(self, variable: str, preset: Preset, reason: str) -> None:
        """Make sure that workers get the value that a variable already has, and report it.

        Workers inherit values from the environment, so these need no action. Two kinds of values are set for
        the workers explicitly. The first kind is a value of the recipe. The second kind is a value of an
        nccl.conf file if the image sets the same variable.
        """
        has_image_value = self.is_set_by_image(variable)
        # NCCL ignores nccl.conf for variables in the environment, so the image's value would hide the file's.
        is_hidden_by_image = preset.is_from_conf_file and has_image_value
        if preset.origin == "recipe" or is_hidden_by_image:
            self.worker_env[variable] = preset.value
        if has_image_value and self.env[variable] != preset.value:
            reason = f"{reason}; replaces the image's {self.env[variable]!r}"
        self.add_decision(variable, preset.value, reason, used=True, origin=preset.origin)

    def drop_variable(self, variable: str, reason: str) -> None:
        """Remove a value of the recipe or the image from the workers, because it is wrong on this node.

        A value of the user is kept. `reason` says in the report why the value is wrong.
        """
        preset = self.preset(variable)
        if preset is not None and not preset.is_from_user:
            self.dropped.append(variable)
            reason = f"{preset.source}, not used: {reason}"
            self.add_decision(variable, preset.value, reason, origin=preset.origin)

    def drop_image_variable(self, variable: str, reason: str) -> None:
        """Remove a value of the image from the workers, because it is wrong on this node.

        A value of the user or the recipe is kept.
        """
        if self.image_preset(variable):
            self.drop_variable(variable, reason)

    def keep_undecided_variables(self) -> None:
        """Keep and report the variables of the recipe and of nccl.conf files without a decision so far.

        Call this after all decisions. It passes the recipe's remaining variables to the workers.
        """
        # This order: a variable that both set is reported once, with a reason that names the recipe.
        self._keep_recipe_variables()
        self._keep_conf_file_variables()

    def _keep_recipe_variables(self) -> None:
        """Keep and report the variables of the recipe without a decision so far."""
        decided = {decision.variable for decision in self.decisions}
        for variable, value in self.recipe.items():
            preset = self.preset(variable)  # None: the recipe's value was dropped on purpose
            if variable in decided or preset is None:
                continue
            reason = preset.source
            if preset.is_from_user:
                reason += f"; the recipe's {value!r} is not used"
            self._keep_preset(variable, preset, reason)

    def _keep_conf_file_variables(self) -> None:
        """Keep and report the variables of nccl.conf files without a decision so far."""
        decided = {decision.variable for decision in self.decisions}
        for setting in self.facts.nccl_settings:
            preset = self.preset(setting.name)
            if setting.name in decided or preset is None:
                continue
            # Otherwise the environment has another value, which overrides the file.
            if preset.is_from_conf_file:
                self._keep_preset(setting.name, preset, preset.source)

    def build(self, reason: str, carriers: Carriers, issues: tuple[IssueResult, ...]) -> FabricPlan:
        """Return the plan with all decisions.

        Parameters
        ----------
        reason : the evidence for the fabric.
        carriers : the devices that carry the traffic, and their total rate.
        issues : the results of all known issues.
        """
        return FabricPlan(
            kind=self.kind,
            reason=reason,
            env=self.worker_env,
            decisions=tuple(self.decisions),
            # A dropped variable may have been set to another value later. dict.fromkeys removes duplicates.
            unset=tuple(name for name in dict.fromkeys(self.dropped) if name not in self.worker_env),
            warnings=tuple(self.warnings),
            blockers=tuple(self.blockers),
            issues=issues,
            devices=carriers.devices,
            line_rate_Gbps=carriers.rate_Gbps,
            links=self.links,
            image=UNKNOWN_IMAGE if self.facts.image_env is None else "",
        )
