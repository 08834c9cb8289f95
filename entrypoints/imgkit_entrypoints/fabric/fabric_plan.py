"""The network decisions of a node, each with its reason, and the draft in which they are made.

Precedence is decided here alone: the user's environment, then an nccl.conf, the recipe, and last the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.system import FabricKind, SystemFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One variable: its value, or why it is not set."""

    variable: str
    value: str
    reason: str
    """One sentence with its evidence: a path and its content, or a variable."""
    used: bool = True
    """False if the value is only reported, and workers do not get it."""

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
    """Variables of the recipe that must not be applied on this node."""
    warnings: tuple[Finding, ...] = ()
    """Settings that are slow or dangerous; the run may go on."""
    blockers: tuple[Finding, ...] = ()
    """Reasons why NCCL would fail or hang between nodes; they do not matter on one node or with gloo."""
    devices: tuple[str, ...] = ()
    """Devices that carry the traffic: ``mlx5_0:1``, ``cxi0``, ``eth0``."""
    line_rate_Gbps: float | None = None
    """Rate of all `devices` together, in 1e9 bit/s; None if one rate is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value that was set before any decision."""

    value: str
    origin: str
    """``set by the user``, with its file, or ``from the recipe``."""
    place: str
    """File or part of the recipe that sets it; empty for the environment."""
    mine: bool
    """True for a value of the user, which is never replaced."""


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
    decisions: list[Decision] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    blockers: list[Finding] = field(default_factory=list)

    @property
    def several(self) -> bool:
        """True if the run has more than one node."""
        return self.nnodes > 1

    def given(self, variable: str) -> Given | None:
        """Value that is already set, and by whom; a refused value of the recipe no longer counts."""
        if variable in self.env:
            return Given(value=self.env[variable], origin="set by the user", place="", mine=True)
        for setting in self.facts.nccl_settings:
            if setting.name == variable:
                # NCCL reads it only if the environment has none, so setting one would override it.
                return Given(
                    value=setting.value,
                    origin=f"set by the user in {setting.path}",
                    place=setting.path,
                    mine=True,
                )
        if variable in self.recipe and variable not in self.unset:
            return Given(
                value=self.recipe[variable],
                origin="from the recipe",
                place="the recipe's system.env",
                mine=False,
            )
        return None

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
        if known is None or variable in self.env:
            return f"unset {variable}"
        return f"remove {variable} from {known.place}"

    def set(self, variable: str, value: str, reason: str) -> None:
        """Set `variable`; if it is already set, keep that value and report both."""
        known = self.given(variable)
        if known is None:
            self.chosen[variable] = value
            self.decisions.append(Decision(variable=variable, value=value, reason=reason))
            return
        if not known.mine:
            self.chosen[variable] = known.value
        same = "imgkit would set the same" if known.value == value else f"imgkit would set {value!r}"
        self.decisions.append(
            Decision(variable=variable, value=known.value, reason=f"{known.origin}; {same}: {reason}")
        )

    def note(self, variable: str, value: str, reason: str) -> None:
        """Report a value without setting it; a value that is already set is kept and reported."""
        known = self.given(variable)
        if known is None:
            self.decisions.append(Decision(variable=variable, value=value, reason=reason, used=False))
            return
        if not known.mine:
            self.chosen[variable] = known.value
        self.decisions.append(
            Decision(variable=variable, value=known.value, reason=f"{known.origin}; not needed: {reason}")
        )

    def refuse(self, variable: str, reason: str) -> None:
        """Leave out a value of the recipe that is wrong on this node; a value of the user stays."""
        known = self.given(variable)
        if known is None or known.mine:
            return
        self.unset.append(variable)
        self.decisions.append(
            Decision(
                variable=variable,
                value=known.value,
                reason=f"from the recipe, not used: {reason}",
                used=False,
            )
        )

    def rest(self) -> None:
        """Report variables without a decision: the recipe's other variables, and those of nccl.conf files."""
        known = {decision.variable for decision in self.decisions}
        for variable, value in self.recipe.items():
            if variable in known:
                continue
            given = self.given(variable)
            if given is not None and given.mine:
                reason = f"{given.origin}; the recipe's {value!r} is not used"
                self.decisions.append(Decision(variable=variable, value=given.value, reason=reason))
            else:
                self.chosen[variable] = value
                self.decisions.append(Decision(variable=variable, value=value, reason="from the recipe"))
            known.add(variable)
        for setting in self.facts.nccl_settings:
            if setting.name not in known and setting.name not in self.env:
                reason = f"set by the user in {setting.path}"
                self.decisions.append(Decision(variable=setting.name, value=setting.value, reason=reason))


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
