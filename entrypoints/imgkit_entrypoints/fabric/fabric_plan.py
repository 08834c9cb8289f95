"""The network decisions of a node, each with its reason, and the draft in which they are made.

Precedence is decided here alone: the user's environment and an nccl.conf, then the recipe, the facts, and
last the image. A variable comes from the image if its value is the one that the image's manifest states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.system import PARTITION, FabricKind, SystemFacts

INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

Origin = Literal["user", "recipe", "facts", "image"]
"""Who decided a value, in the order of precedence."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A setting or a part of this machine that is slow, dangerous or useless."""

    what: str
    """Finding with its evidence."""
    fix: str
    """The variable, the file or the command that mends it."""

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
    devices: tuple[str, ...] = ()
    """Devices that carry the traffic: ``mlx5_0:1``, ``cxi0``, ``eth0``."""
    line_rate_Gbps: float | None = None
    """Rate of all `devices` together, in 1e9 bit/s; None if one rate is unknown."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Libraries of the host that workers load: the file in the container by the name that programs open."""
    image: str = ""
    """Why a value that the image set counts as the user's; empty: the image's variables are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value that was set before any decision."""

    value: str
    origin: str
    """``set by the user``, with its file, ``from the recipe``, or ``from the image``."""
    place: str
    """File or part of the recipe that sets it; empty for the environment."""
    by: Origin

    @property
    def mine(self) -> bool:
        """True for a value of the user, which is never replaced."""
        return self.by == "user"


@dataclass(slots=True, kw_only=True)
class PlanDraft:
    """The `FabricPlan` while it is being decided; the only mutable value of this room."""

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

    def given(self, variable: str) -> Given | None:
        """Value that is already set, and by whom; one that was refused or replaced no longer counts."""
        of_image = self.of_image(variable)
        if variable in self.env and not of_image:
            return Given(value=self.env[variable], origin="set by the user", place="", by="user")
        for setting in self.facts.nccl_settings:
            if setting.name == variable:
                # NCCL reads it only if the environment has none, so setting another would override it.
                return Given(
                    value=setting.value,
                    origin=f"set by the user in {setting.path}",
                    place=setting.path,
                    by="user",
                )
        if variable in self.recipe and variable not in self.unset:
            by_name = self.partition and variable in INTERFACES
            return Given(
                value=self.recipe[variable],
                origin=f"from the recipe, for {PARTITION}={self.partition}" if by_name else "from the recipe",
                place=f"the recipe's system.{f'partitions.{self.partition}' if by_name else 'env'}",
                by="recipe",
            )
        if of_image and variable not in self.unset and variable not in self.chosen:
            return Given(value=self.env[variable], origin="from the image", place="", by="image")
        return None

    def of_image(self, variable: str) -> bool:
        """Whether the environment has the value of `variable` that the image brings.

        A user who exports the same value looks the same.
        """
        known = self.facts.image_env
        return known is not None and variable in self.env and known.get(variable) == self.env[variable]

    def request(self, variable: str) -> Given | None:
        """A value that somebody chose for this run or system, and not the image for all of them."""
        known = self.given(variable)
        return None if known is None or known.by == "image" else known

    def from_image(self, variable: str) -> Given | None:
        """The image's value, if nobody else has set one."""
        known = self.given(variable)
        return known if known is not None and known.by == "image" else None

    def names(self) -> tuple[str, ...]:
        """Every variable that is already set."""
        settings = (setting.name for setting in self.facts.nccl_settings)
        return tuple(dict.fromkeys((*self.env, *settings, *self.recipe)))

    def value(self, variable: str) -> str | None:
        """Value that a worker will see according to the decisions so far."""
        known = self.given(variable)
        return known.value if known else self.chosen.get(variable)

    def warn(self, what: str, fix: str) -> None:
        """Report what is slow or dangerous, with its remedy."""
        self.warnings.append(Finding(what=what, fix=fix))

    def block(self, what: str, fix: str) -> None:
        """Report a reason why NCCL would fail or hang between nodes, with its remedy."""
        self.blockers.append(Finding(what=what, fix=fix))

    def said(self, variable: str) -> str:
        """A value with its origin, as findings quote it."""
        known = self.given(variable)
        return f"{variable}={known.value if known else ''!r}" + (f" ({known.origin})" if known else "")

    def unsetting(self, variable: str) -> str:
        """Words that take away a value, by its origin."""
        known = self.given(variable)
        if known is not None and known.by == "image":
            return f"set another {variable} (--env, or the recipe's system.env)"
        if known is None or not known.place:
            return f"unset {variable}"
        return f"remove {variable} from {known.place}"

    def set(self, variable: str, value: str, reason: str) -> None:
        """Set `variable`; if the user or the recipe did, keep that value and report both."""
        known = self.given(variable)
        if known is None:
            self.chosen[variable] = value
            self.decisions.append(Decision(variable=variable, value=value, reason=reason))
            return
        if known.by == "image" and known.value != value:
            self.chosen[variable] = value
            reason = f"{reason}; replaces the image's {known.value!r}"
            self.decisions.append(Decision(variable=variable, value=value, reason=reason))
            return
        same = "imgkit would set the same" if known.value == value else f"imgkit would set {value!r}"
        self._keep(variable, known, f"{known.origin}; {same}: {reason}")

    def note(self, variable: str, value: str, reason: str) -> None:
        """Report a value without setting it; a value that is already set, also the image's, is kept."""
        known = self.given(variable)
        if known is None:
            self.decisions.append(Decision(variable=variable, value=value, reason=reason, used=False))
            return
        self._keep(variable, known, f"{known.origin}; not needed: {reason}")

    def _keep(self, variable: str, known: Given, reason: str) -> None:
        """Report a value that is already set, and hand it to the workers unless it reaches them anyway."""
        if known.by == "recipe" or (known.mine and self.of_image(variable)):
            # In the second case the value is that of an nccl.conf, which the image's variable would hide.
            self.chosen[variable] = known.value
        if known.by != "image" and self.of_image(variable) and self.env[variable] != known.value:
            reason = f"{reason}; replaces the image's {self.env[variable]!r}"
        self.decisions.append(Decision(variable=variable, value=known.value, reason=reason, origin=known.by))

    def refuse(self, variable: str, reason: str) -> None:
        """Leave out a value of the recipe or the image that is wrong here; a value of the user stays."""
        known = self.given(variable)
        if known is None or known.mine:
            return
        self.unset.append(variable)
        self.decisions.append(
            Decision(
                variable=variable,
                value=known.value,
                reason=f"{known.origin}, not used: {reason}",
                used=False,
                origin=known.by,
            )
        )

    def refuse_image(self, variable: str, reason: str) -> None:
        """Leave out a value of the image that is wrong here; a value of the user or the recipe stays."""
        if self.from_image(variable):
            self.refuse(variable, reason)

    def rest(self) -> None:
        """Report variables without a decision: the recipe's other variables, and those of nccl.conf files."""
        known = {decision.variable for decision in self.decisions}
        for variable, value in self.recipe.items():
            if variable in known:
                continue
            given = self.given(variable)
            if given is None:
                continue
            other = f"; the recipe's {value!r} is not used" if given.mine else ""
            self._keep(variable, given, f"{given.origin}{other}")
            known.add(variable)
        for setting in self.facts.nccl_settings:
            given = self.given(setting.name)
            if setting.name not in known and given is not None and given.place:
                self._keep(setting.name, given, given.origin)


def draft_for(
    facts: HostFacts, system: SystemFacts | None, env: Mapping[str, str], *, nnodes: int, head: str
) -> PlanDraft:
    """An empty draft for this machine."""
    return PlanDraft(
        facts=facts,
        env=env,
        recipe=system.env if system else {},
        nnodes=nnodes,
        head=head,
        nics=system.fabric.nics if system else None,
    )
