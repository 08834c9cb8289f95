"""The options of a training run, and values that are derived from them, such as the learning rate.

Each field of `Config` declares an option. The module `options` builds the command line from these fields.
Checkpoints contain the options, so that a later start can be compared with them. The learning rate depends
only on the step, so checkpoints need not contain it. This module does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from imgkit_entrypoints.apps.train import plugins
from imgkit_entrypoints.arguments import (
    Option,
    declared_options,
    option,
    parse_duration,
    parse_natural,
    parse_positive,
)
from imgkit_entrypoints.errors import UsageError


class ModelDefaults(NamedTuple):
    """The defaults of options that depend on the model."""

    optimizer: str
    lr: float
    warmup_steps: int = 0


# The built-in models with their defaults. A user's own model has the defaults of linear.
MODELS: Mapping[str, ModelDefaults] = {
    "linear": ModelDefaults("sgd", 0.05),
    "mlp": ModelDefaults("sgd", 0.05),
    "resnet18": ModelDefaults("sgd", 0.05, warmup_steps=20),
    "resnet50": ModelDefaults("sgd", 0.02, warmup_steps=20),
    "gpt": ModelDefaults("adamw", 1e-3),
}
# The built-in loggers. The name of each is the name of the Python package that it needs.
LOGGERS = ("tensorboard", "wandb")
# Number of steps if neither --steps nor --epochs is given.
STEPS = 100
# Longest time between two lines of progress, in seconds.
LINE_EVERY_S = 5
FUNCTION = "MOD:FN or file.py:FN"


def _parse_number(text: str) -> float:
    """Parse a number of at least 0, such as a learning rate."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _parse_norm(text: str) -> float:
    """Parse a norm above 0, for ``--clip``."""
    value = _parse_number(text)
    if value == 0:
        raise argparse.ArgumentTypeError("a norm of 0 would train nothing: a number above 0")
    return value


def _check_interval(text: str) -> str:
    """Return `text` if it is an interval, such as ``500`` for 500 steps or ``2e`` for two epochs."""
    if not re.fullmatch(r"\d+|[1-9]\d*e", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps (500) nor of epochs (2e)")
    return text


def _check_trace_window(text: str) -> str:
    """Return `text` if it has the form START:STEPS of ``--profile``."""
    if not re.fullmatch(r"\d+:[1-9]\d*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not START:STEPS, as in 100:5")
    return text


def _check_model(text: str) -> str:
    """Return the value of ``--model`` if it names a built-in model or a user's function.

    The function is only searched for in the source code. No code of the user is executed.
    """
    if plugins.is_plugin(text):
        return plugins.check(text, plugins.MODEL)
    if text not in MODELS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither one of {', '.join(sorted(MODELS))} nor {plugins.MODEL.form}"
        )
    return text


def _check_data(text: str) -> str:
    """Return the value of ``--data`` if it names data that this image can read, or a user's function.

    No code of the user is executed.
    """
    if plugins.is_plugin(text):
        return plugins.check(text, plugins.DATA)
    if Path(text).is_dir() and find_spec("PIL") is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a folder: reading images needs Pillow, which is not installed"
        )
    if text != "builtin" and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither builtin, a text file, a folder of images nor {plugins.DATA.form}"
        )
    return text


def _check_step(text: str) -> str:
    """Return the value of ``--step`` if it is ``builtin`` or names a user's function."""
    if text == "builtin":
        return text
    return plugins.check(text, plugins.STEP)


def _check_loggers(text: str) -> str:
    """Return the value of ``--log-to`` if this image has all of the loggers, which are separated by commas.

    No code of the user is executed.
    """
    for name in text.split(","):
        if plugins.is_plugin(name):
            plugins.check(name, plugins.LOGGER)
        elif name not in LOGGERS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is neither one of {', '.join(LOGGERS)} nor {plugins.LOGGER.form}"
            )
        elif find_spec(name) is None:
            raise argparse.ArgumentTypeError(
                f"the image has no {name}; add it to the recipe: image.pip: [{{packages: [{name}]}}]"
            )
    return text


# Options that define a run. A start in which one of them has another value cannot resume the run.
MUST_BE_EQUAL = [
    "model",
    "data",
    "step",
    "samples",
    "image_size",
    "seed",
    "dtype",
    "amp",
    "optimizer",
    "global_batch",
]
# Options that may change between two starts of a run. Each change is reported.
MAY_CHANGE = [
    "lr",
    "momentum",
    "weight_decay",
    "schedule",
    "warmup_steps",
    "clip",
    "compile",
    "deterministic",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of dist-train with defaults filled in; plug-ins get it as `config`."""

    model: str = option(
        "--model",
        f"{', '.join(MODELS)}, or {FUNCTION}",
        _check_model,
        "NAME",
        default="linear",
        heading="model and data",
    )
    data: str = option(
        "--data",
        f"builtin, a text file for gpt, a folder of images for resnet*, or {FUNCTION}",
        _check_data,
        "NAME",
        default="builtin",
    )
    step: str = option(
        "--step",
        f"function for the loss of a batch: builtin, or {FUNCTION}",
        _check_step,
        "NAME",
        default="builtin",
    )
    samples: int | None = option(
        "--samples", "number of built-in samples", parse_positive, "N", unset="depends on the model"
    )
    image_size: int = option(
        "--image-size",
        "pixels of the square to crop images from a folder to",
        parse_positive,
        "N",
        default=224,
    )
    seed: int = option("--seed", "random seed of the weights, the data and its order", int, "N", default=0)
    workers: int = option(
        "--workers",
        "data loading processes per rank; 0: load in the rank itself",
        parse_natural,
        "N",
        default=0,
    )
    steps: int | None = option(
        "--steps", "optimizer steps", parse_positive, "N", unset=str(STEPS), heading="steps and batches"
    )
    epochs: int | None = option(
        "--epochs", "passes over the data; with --steps, whichever ends first", parse_positive, "N"
    )
    batch_size: int | None = option(
        "--batch-size", "samples per rank and batch", parse_positive, "N", unset="32"
    )
    global_batch: int | None = option(
        "--global-batch",
        "samples per step, by gradient accumulation",
        parse_positive,
        "N",
        unset="--batch-size x ranks",
    )
    stop_after_s: int | None = option(
        "--stop-after", "save and stop this time after the first attempt: 50m, 1h30m", parse_duration, "TIME"
    )
    lr: float = option(
        "--lr",
        "learning rate",
        _parse_number,
        "X",
        unset="depends on the model, 0.05 for linear",
        heading="optimizer",
    )
    optimizer: str = option(
        "--optimizer",
        "optimizer: sgd, adam or adamw",
        ("sgd", "adam", "adamw"),
        "NAME",
        unset="depends on the model",
    )
    momentum: float = option("--momentum", "momentum of sgd", _parse_number, "X", default=0.0)
    weight_decay: float = option("--weight-decay", "weight decay", _parse_number, "X", default=0.0)
    schedule: str = option(
        "--schedule",
        "learning rate schedule: constant, linear or cosine",
        ("constant", "linear", "cosine"),
        "NAME",
        default="constant",
    )
    warmup_steps: int = option(
        "--warmup-steps",
        "steps of learning rate warm-up",
        parse_natural,
        "N",
        unset="20 for a resnet, else 0",
    )
    clip: float | None = option("--clip", "maximum norm of the gradient", _parse_norm, "X", unset="no limit")
    on_nan: str = option(
        "--on-nan",
        "at a step whose loss is NaN or infinite: stop or skip",
        ("stop", "skip"),
        "ACTION",
        default="stop",
    )
    dtype: str = option(
        "--dtype",
        "element type of weights and data: fp32 or fp64",
        ("fp32", "fp64"),
        "NAME",
        default="fp32",
        heading="computation",
    )
    amp: str = option(
        "--amp", "mixed precision: off, bf16 or fp16", ("off", "bf16", "fp16"), "NAME", default="off"
    )
    compile: bool = option(
        "--compile",
        "compile the model with torch.compile",
        action=argparse.BooleanOptionalAction,
        default=False,
    )
    deterministic: bool = option(
        "--deterministic",
        "refuse nondeterministic operations",
        action=argparse.BooleanOptionalAction,
        default=False,
    )
    run_dir: Path | None = option(
        "--run-dir",
        "run folder for checkpoints and metrics",
        Path,
        "DIR",
        unset="IMGKIT_RUN_DIR, else nothing is saved",
        heading="output and resuming",
    )
    save_every: str = option(
        "--save-every",
        "save every N steps or N epochs; 0: only at the end",
        _check_interval,
        "N|Ne",
        default="1000",
    )
    keep: int = option("--keep", "number of checkpoints to keep", parse_positive, "K", default=2)
    resume: str = option(
        "--resume",
        "newest valid checkpoint of the run folder, none, or that of a path",
        metavar="auto|never|PATH",
        default="auto",
    )
    ignore_checkpoints: bool = option(
        "--ignore-checkpoints",
        "start anew if no checkpoint of the run folder can be read",
        action=argparse.BooleanOptionalAction,
        default=False,
    )
    eval_every: str = option(
        "--eval-every",
        "evaluate on held-out data every N steps or N epochs; 0: never",
        _check_interval,
        "N|Ne",
        default="0",
    )
    profile: str | None = option(
        "--profile",
        "trace STEPS steps after step START into the run folder",
        _check_trace_window,
        "START:STEPS",
    )
    log_every: int = option(
        "--log-every",
        f"print a line every N steps, and every {LINE_EVERY_S} s; 0: a tenth of the run",
        parse_natural,
        "N",
        default=0,
    )
    log_to: str | None = option(
        "--log-to",
        f"also log to {', '.join(LOGGERS)}, {FUNCTION}; separate several with commas",
        _check_loggers,
        "NAMES",
    )

    def traced_steps(self) -> range:
        """Return the numbers of the steps to trace: ``100:5`` stands for the steps 101 to 105."""
        if self.profile is None:
            return range(0)
        start, steps = map(int, self.profile.split(":"))
        return range(start + 1, start + steps + 1)

    def values(self) -> dict[str, Any]:
        """Return the options as values that JSON supports, for checkpoints. A path becomes a text."""
        values = dataclasses.asdict(self)
        for name, value in values.items():
            if isinstance(value, Path):
                values[name] = str(value)
        return values

    def to_json(self) -> str:
        """Return the options as JSON, for the file in the run's folder. ``--config`` can read this file."""
        return json.dumps(self.values(), indent=2) + "\n"

    def merge_saved(self, saved: Mapping[str, Any], where: Path) -> tuple[Config, list[str]]:
        """Compare these options with those in a checkpoint, and return the options for the resumed run.

        The second value has a line for each option that has changed, such as ``lr was 0.1, now 0.05``. If the
        global batch is not set, it is taken from the checkpoint, because its default depends on the number of
        ranks.

        Parameters
        ----------
        saved : the options in the checkpoint.
        where : path of the checkpoint, for messages.

        Raises
        ------
        UsageError : options that define a run differ (`MUST_BE_EQUAL`). The message names all of them.
        """
        config = self
        if self.global_batch is None:
            config = dataclasses.replace(self, global_batch=saved["global_batch"])
        # Check only now, because the global batch is one of the options that must be equal.
        config._refuse_contradictions(saved, where)
        options = config.values()
        changes = []
        for name in MAY_CHANGE:
            if name in saved and options[name] != saved[name]:
                changes.append(f"{name} was {saved[name]}, now {options[name]}")
        return config, changes

    def _refuse_contradictions(self, saved: Mapping[str, Any], where: Path) -> None:
        """Raise UsageError if an option that defines a run, such as the model, differs from a checkpoint.

        An option that the checkpoint does not have is left out.
        """
        options = self.values()
        contradictions = []
        for name in MUST_BE_EQUAL:
            if name in saved and options[name] != saved[name]:
                contradictions.append(f"{name} is {options[name]!r}, the checkpoint has {saved[name]!r}")
        if contradictions:
            raise UsageError(
                f"these options contradict the saved run: {'; '.join(contradictions)}",
                where=str(where),
                hint="give the same options to resume, or start a new run: --resume never --run-dir OTHER",
            )


OPTIONS = (
    Option("--config", "options from a JSON file; flags override it", Path, "FILE"),
    *declared_options(Config),
)


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Return the number of steps of the whole run, by ``--steps`` or ``--epochs``, whichever ends first."""
    limits = []
    if config.steps is not None:
        limits.append(config.steps)
    if config.epochs is not None:
        limits.append(config.epochs * steps_per_epoch)
    return min(limits)


def steps_per_line(steps: int) -> int:
    """Return the default of ``--log-every``: a round number, at most 1000 and at most a tenth of the run."""
    sizes = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    return max((size for size in sizes if size * 10 <= steps), default=1)


def parse_interval(text: str, steps_per_epoch: int) -> int:
    """Convert an interval of saves or evaluations to a number of steps.

    ``500`` means 500 steps, ``2e`` means two epochs, and ``0`` means never.
    """
    if text.endswith("e"):
        return int(text.removesuffix("e")) * steps_per_epoch
    return int(text)


def is_due(step: int, interval: int, steps: int) -> bool:
    """Return whether an action is due after `step`.

    The action is due every `interval` steps, and after the last of `steps` steps. An interval of 0 means only
    after the last step.
    """
    return step == steps or (interval > 0 and step % interval == 0)


def learning_rate(config: Config, step: int, steps: int) -> float:
    """Return the learning rate of a step, which is counted from 0.

    The rate rises during the warm-up. Then it stays constant, or falls to 0 until the end of `steps` steps,
    as ``--schedule`` says.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * ((step + 1) / (warmup + 1))
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if config.schedule == "linear":
        return config.lr * (1.0 - progress)
    if config.schedule == "cosine":
        return config.lr * (0.5 * (1.0 + math.cos(math.pi * progress)))
    return config.lr
