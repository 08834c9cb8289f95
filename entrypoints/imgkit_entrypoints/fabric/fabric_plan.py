"""The network decisions of a node, each with its reason, and the draft in which they are made.

Precedence is decided here alone: the user's environment and an nccl.conf, then the recipe, the facts, and
last the image. A variable comes from the image if its value is the one that the image's manifest states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.known_issues import IssueResult
from imgkit_entrypoints.system import PARTITION, FabricKind

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

Origin = Literal["user", "recipe", "facts", "image"]
"""Who decided a value, in the order of precedence."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One variable: its value, or why it is not set."""

    variable: str
    value: str
    reason: str
    """One sentence with its evidence: a path and its content, or a variable."""
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
    """Finding with its evidence."""
    fix: str
    """The variable, the file or the command that mends it."""
    check: str = "network"
    """What dist-doctor calls it."""
    is_failure: bool = False
    """True if NCCL does not use what it concerns, which is a failed check."""

    def __str__(self) -> str:
        return f"{self.what}. {self.fix[:1].upper()}{self.fix[1:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricPlan:
    """Network of a launch on this node."""

    kind: FabricKind
    reason: str
    """Why it is this kind."""
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
    """IssueResult of every row of known issues."""
    devices: tuple[str, ...] = ()
    """Devices that carry the traffic: ``mlx5_0:1``, ``cxi0``, ``eth0``."""
    line_rate_Gbps: float | None = None
    """Rate of all `devices` together, in 1e9 bit/s; None if one rate is unknown."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Libraries of the host that workers load: the file in the container by the name that programs open."""
    image: str = ""
    """Why a value that the image set counts as the user's; empty: the image's variables are known."""

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """Known issues for which a run with GPUs must not start."""
        return issue_findings(self.issues, "refuse")


def issue_findings(results: Iterable[IssueResult], effect: str) -> tuple[Finding, ...]:
    """Return what the rows with `effect` that match say to the user."""
    matches = (item for item in results if item.state == "match" and item.issue.effect == effect)
    return tuple(
        Finding(item.message, item.issue.hint, "known issue", effect == "refuse") for item in matches
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A value that was set before any decision."""

    value: str
    source: str
    """``set by the user``, with its file, ``from the recipe``, or ``from the image``."""
    location: str = ""
    """File or part of the recipe that sets it; empty for the environment."""
    origin: Origin

    @property
    def is_users(self) -> bool:
        """True for a value of the user, which is never replaced."""
        return self.origin == "user"


@dataclass(slots=True, kw_only=True)
class PlanDraft:
    """The `FabricPlan` while it is being decided; the only mutable value of this package."""

    facts: HostFacts
    env: Mapping[str, str]
    recipe: Mapping[str, str]
    nnodes: int
    head: str = ""
    """Address of node 0; empty if unknown."""
    nics: int | None = None
    """NICs of a node according to the recipe."""
    partition: str = ""
    """The Slurm partition for which the recipe states interfaces; `recipe` has them then."""
    decisions: list[Decision] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    """`FabricPlan.links`."""
    warnings: list[Finding] = field(default_factory=list)
    blockers: list[Finding] = field(default_factory=list)

    @property
    def several(self) -> bool:
        """True if the run has more than one node."""
        return self.nnodes > 1

    def preset(self, variable: str) -> Preset | None:
        """Return the value that is already set, unless it was refused or replaced."""
        image_sets = self.image_sets(variable)
        if variable in self.env and not image_sets:
            return Preset(value=self.env[variable], source="set by the user", origin="user")
        for setting in self.facts.nccl_settings:
            if setting.name == variable:
                # NCCL reads it only if the environment has none, so setting another would override it.
                source = f"set by the user in {setting.path}"
                return Preset(value=setting.value, source=source, location=setting.path, origin="user")
        if variable in self.recipe and variable not in self.unset:
            source, location = "from the recipe", "the recipe's system.env"
            if self.partition and variable in INTERFACES:
                source += f", for {PARTITION}={self.partition}"
                location = f"the recipe's system.partitions.{self.partition}"
            return Preset(value=self.recipe[variable], source=source, location=location, origin="recipe")
        if image_sets and variable not in self.unset and variable not in self.chosen:
            return Preset(value=self.env[variable], source="from the image", origin="image")
        return None

    def image_sets(self, variable: str) -> bool:
        """Return whether the environment has the value of `variable` that the image brings.

        A user who exports the same value looks the same.
        """
        image = self.facts.image_env
        return image is not None and variable in self.env and image.get(variable) == self.env[variable]

    def request(self, variable: str) -> Preset | None:
        """Return a value that somebody chose for this run or system, and not the image for all of them."""
        preset = self.preset(variable)
        return None if preset is None or preset.origin == "image" else preset

    def image_preset(self, variable: str) -> Preset | None:
        """Return the image's value, if nobody else has set one."""
        preset = self.preset(variable)
        return preset if preset is not None and preset.origin == "image" else None

    def names(self) -> tuple[str, ...]:
        """Return every variable that is already set."""
        settings = (setting.name for setting in self.facts.nccl_settings)
        return tuple(dict.fromkeys((*self.env, *settings, *self.recipe)))

    def value(self, variable: str) -> str | None:
        """Return the value that a worker will see according to the decisions so far."""
        preset = self.preset(variable)
        return preset.value if preset else self.chosen.get(variable)

    def warn(self, problem: str, fix: str, *, failed_check: str = "") -> None:
        """Report what is slow or dangerous, with its remedy; it may fail a check of dist-doctor."""
        self.warnings.append(Finding(problem, fix, failed_check or "network", bool(failed_check)))

    def block(self, problem: str, fix: str) -> None:
        """Report a reason why NCCL would fail or hang between nodes, with its remedy."""
        self.blockers.append(Finding(problem, fix))

    def quote(self, variable: str) -> str:
        """Return a value with its origin, as findings quote it."""
        preset = self.preset(variable)
        return f"{variable}={preset.value!r} ({preset.source})" if preset else f"{variable}=''"

    def how_to_unset(self, variable: str) -> str:
        """Return how to take away a value, by its origin."""
        preset = self.preset(variable)
        if preset is not None and preset.origin == "image":
            return f"set another {variable} (--env, or the recipe's system.env)"
        if preset is None or not preset.location:
            return f"unset {variable}"
        return f"remove {variable} from {preset.location}"

    def report(
        self, variable: str, value: str, reason: str, *, used: bool = False, origin: Origin = "facts"
    ) -> None:
        """Add a decision."""
        self.decisions.append(Decision(variable, value, reason, used, origin))

    def set(self, variable: str, value: str, reason: str) -> None:
        """Set `variable`; if the user or the recipe did, keep that value and report both."""
        preset = self.preset(variable)
        if preset is not None and (preset.origin != "image" or preset.value == value):
            same = "imgkit would set the same" if preset.value == value else f"imgkit would set {value!r}"
            self._keep(variable, preset, f"{preset.source}; {same}: {reason}")
            return
        self.chosen[variable] = value
        replaced = f"; replaces the image's {preset.value!r}" if preset else ""
        self.report(variable, value, f"{reason}{replaced}", used=True)

    def note(self, variable: str, value: str, reason: str) -> None:
        """Report a value without setting it; a value that is already set, also the image's, is kept."""
        preset = self.preset(variable)
        if preset is None:
            self.report(variable, value, reason)
        else:
            self._keep(variable, preset, f"{preset.source}; not needed: {reason}")

    def _keep(self, variable: str, preset: Preset, reason: str) -> None:
        """Report a value that is already set, and hand it to the workers unless it reaches them anyway."""
        image_sets = self.image_sets(variable)
        if preset.origin == "recipe" or (preset.is_users and image_sets):
            # In the second case the value is that of an nccl.conf, which the image's variable would hide.
            self.chosen[variable] = preset.value
        if preset.origin != "image" and image_sets and self.env[variable] != preset.value:
            reason = f"{reason}; replaces the image's {self.env[variable]!r}"
        self.report(variable, preset.value, reason, used=True, origin=preset.origin)

    def refuse(self, variable: str, reason: str) -> None:
        """Leave out a value of the recipe or the image that is wrong here; a value of the user stays."""
        preset = self.preset(variable)
        if preset is not None and not preset.is_users:
            self.unset.append(variable)
            reason = f"{preset.source}, not used: {reason}"
            self.report(variable, preset.value, reason, origin=preset.origin)

    def refuse_image(self, variable: str, reason: str) -> None:
        """Leave out a value of the image that is wrong here; a value of the user or the recipe stays."""
        if self.image_preset(variable):
            self.refuse(variable, reason)

    def report_rest(self) -> None:
        """Report variables without a decision: the recipe's other variables, and those of nccl.conf files."""
        decided = {decision.variable for decision in self.decisions}
        for variable, value in self.recipe.items():
            preset = self.preset(variable)
            if variable not in decided and preset is not None:
                unused = f"; the recipe's {value!r} is not used" if preset.is_users else ""
                self._keep(variable, preset, f"{preset.source}{unused}")
                decided.add(variable)
        for setting in self.facts.nccl_settings:
            preset = self.preset(setting.name)
            if setting.name not in decided and preset is not None and preset.location:
                self._keep(setting.name, preset, preset.source)
