"""Options of dist-train; imports no torch, so that ``--help`` and mistakes are quick."""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from imgkit_entrypoints.apps.train import config_file, plugins
from imgkit_entrypoints.apps.train.config import LINE_EVERY_S, Config
from imgkit_entrypoints.apps.train.schedule import SHAPES
from imgkit_entrypoints.arguments import natural, positive
from imgkit_entrypoints.errors import UsageError

MODELS: Mapping[str, tuple[str, float]] = {
    "linear": ("sgd", 0.05),
    "mlp": ("sgd", 0.05),
    "resnet18": ("sgd", 0.05),
    "resnet50": ("sgd", 0.05),
    "gpt": ("adamw", 1e-3),
}
"""Built-in models: the optimizer and the learning rate where none is given."""
STACKED = ("resnet18", "resnet50", "gpt")
"""Of these, those that are a stack of blocks."""
STEPS = 100
"""Where neither --steps nor --epochs is given."""
SWITCHES: Mapping[str, str] = {
    "--compile": "the model through torch.compile",
    "--activation-checkpointing": "compute blocks again instead of keeping what they made",
    "--deterministic": "refuse operations that are not deterministic",
}
EXAMPLES = """examples:
  dist-train --steps 1000 --run-dir runs/first        # linear, snapshots and metrics kept; again: goes on
  dist-train --model resnet50 --data /data/imagenet --epochs 90 --global-batch 1024 --amp bf16 --workers 8
  dist-train --model gpt --data book.txt --steps 5000 --eval-every 500 --export gpt.pt
  dist-train --model own_model.py:model --data own_model.py:data --epochs 3

A model of your own and everything that is kept: docs/train.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of dist-train."""
    add = _adder(parser.add_argument_group("what is trained"))
    add("--config", _file_words, None, "FILE", "options from a JSON, TOML or YAML file; flags win")
    add("--model", _model, "linear", "NAME", f"{', '.join(MODELS)}, or MOD:FN or file.py:FN (default linear)")
    text = "builtin, a text file for gpt, a folder of images for a resnet, or MOD:FN or file.py:FN"
    add("--data", _data, "builtin", "NAME", f"{text} (default builtin)")
    add("--step", _step, "builtin", "NAME", "the loss: builtin, or MOD:FN or file.py:FN (default builtin)")
    add("--samples", positive, None, "N", "size of the built-in data (default: the model's)")
    add("--image-size", positive, 224, "N", "pixels a side that a folder's images are cut to (default 224)")
    add("--seed", int, 0, "N", "of weights, data and their order (default 0)")
    add("--workers", natural, 0, "N", "processes a rank that fetch samples one by one (default 0: none)")

    add = _adder(parser.add_argument_group("how long, in what steps"))
    add("--steps", positive, None, "N", f"optimizer steps (default {STEPS})")
    add("--epochs", positive, None, "N", "passes over the data; with --steps, whichever ends first")
    add("--batch-size", positive, None, "N", "samples a rank computes at once (default 32)")
    add("--accumulate", positive, None, "N", "such batches a rank and step (default 1)")
    text = "samples a step over all ranks, by accumulation (default: what the two make)"
    add("--global-batch", positive, None, "N", text)
    add("--stop-after", duration, None, "TIME", "save and end after 90, 90s, 50m or 1h30m")

    add = _adder(parser.add_argument_group("the optimizer"))
    add("--lr", _number, None, "X", "learning rate (default: the model's, 0.05 for linear)")
    names = _one_of("sgd", "adam", "adamw")
    add("--optimizer", names, None, "NAME", "sgd, adam or adamw (default: the model's)")
    add("--momentum", _number, 0.0, "X", "of sgd (default 0)")
    add("--weight-decay", _number, 0.0, "X", "of the optimizer (default 0)")
    add("--schedule", _one_of(*SHAPES), "constant", "NAME", "constant, linear or cosine (default constant)")
    add("--warmup", natural, 0, "STEPS", "steps in which the learning rate rises (default 0)")
    add("--clip", _number, None, "X", "largest norm of the gradient (default: any)")
    text = "a loss that is no number: stop, or skip that step (default stop)"
    add("--on-nan", _one_of("stop", "skip"), "stop", "HOW", text)

    group = parser.add_argument_group("how it is computed")
    add = _adder(group)
    text = "of weights and data: fp32 or fp64 (default fp32)"
    add("--dtype", _one_of("fp32", "fp64"), "fp32", "NAME", text)
    text = "lower precision of the computation: off, bf16 or fp16 (default off)"
    add("--amp", _one_of("off", "bf16", "fp16"), "off", "NAME", text)
    for flag, text in SWITCHES.items():
        # With --no-...: flags win over the file here too.
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=False, help=text)

    add = _adder(parser.add_argument_group("what is kept and shown"))
    text = "for snapshots and metrics (default: IMGKIT_RUN_DIR, else nothing is kept)"
    add("--run-dir", Path, None, "DIR", text)
    text = "snapshots every N steps or N epochs, 0 at the end only (default 1000)"
    add("--save-every", _interval, "1000", "N|Ne", text)
    add("--keep", positive, 2, "K", "snapshots kept (default 2)")
    text = "auto: the run folder's newest valid snapshot; never; or a path (default auto)"
    add("--resume", str, "auto", "HOW", text)
    text = "loss on held-out data every N steps or N epochs (default 0: never)"
    add("--eval-every", _interval, "0", "N|Ne", text)
    add("--export", _target, None, "FILE", "the weights alone, once all steps are done")
    add("--profile", _window, None, "START:STEPS", "traces of STEPS steps after START, in the run's folder")
    text = f"steps a line, and one every {LINE_EVERY_S} s (default 0: a tenth of the run, at most 1000)"
    add("--log-every", natural, 0, "N", text)


_Add = Callable[[str, Callable[[str], Any], Any, str, str], None]


def _adder(group: argparse._ArgumentGroup) -> _Add:
    def add(flag: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)

    return add


def read(words: Sequence[str], env: Mapping[str, str]) -> Config:
    """The run that these words of the command line ask for; the launcher has checked them."""
    parser = argparse.ArgumentParser(prog="dist-train")
    add_arguments(parser)
    found = parser.parse_args(words)
    if found.config:
        found = parser.parse_args([*found.config, *words])
    values = vars(found)
    del values["config"]
    optimizer, lr = MODELS.get(found.model, ("sgd", 0.05))
    values["optimizer"] = found.optimizer or optimizer
    values["lr"] = lr if found.lr is None else found.lr
    if found.steps is None and found.epochs is None:
        values["steps"] = STEPS
    if found.run_dir is None and env.get("IMGKIT_RUN_DIR"):
        values["run_dir"] = Path(env["IMGKIT_RUN_DIR"])
    values["stop_after_s"] = values.pop("stop_after")
    config = Config(**values)
    _refuse(config, env)
    return config


def _refuse(config: Config, env: Mapping[str, str]) -> None:
    """Raise UsageError for what cannot be had together, or not here."""
    if config.profile is not None and config.run_dir is None:
        raise UsageError("--profile keeps its traces in the run's folder", hint="--run-dir DIR")
    if config.activation_checkpointing and config.model not in STACKED:
        own = "which parts are worth it is your model's to know: call torch.utils.checkpoint in it"
        raise UsageError(
            f"--activation-checkpointing is for models of blocks: {', '.join(STACKED)}",
            where=f"--model {config.model}",
            hint=own if plugins.is_plugin(config.model) else "leave it out: this model keeps little",
        )
    if config.compile and (missing := _no_compiler(env)):
        raise UsageError(f"--compile needs {missing}", hint="leave --compile out, or add it to the image")


def _no_compiler(env: Mapping[str, str]) -> str | None:
    """What torch.compile lacks here: it writes C++ for the CPU, and a C loader for what Triton makes."""
    if env.get("IMGKIT_DEVICE", "cpu") == "cuda":
        if find_spec("triton") is None:
            return "Triton, which this image has not"
        names = [env["CC"]] if env.get("CC") else ["gcc", "clang", "cc"]
    else:
        names = [env["CXX"]] if env.get("CXX") else ["g++", "clang++"]
    return (
        None if any(map(shutil.which, names)) else f"a compiler ({' or '.join(names)}), and none is in PATH"
    )


def duration(text: str) -> int:
    """Seconds of ``90``, ``90s``, ``50m`` or ``1h30m``."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text, re.ASCII)
    if not text or found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 90, 90s, 50m or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return value


def _interval(text: str) -> str:
    if not re.fullmatch(r"\d+|[1-9]\d*e", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor one of epochs, as 2e")
    return text


def _one_of(*allowed: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return text

    return check


def _model(text: str) -> str:
    if plugins.is_plugin(text):
        return plugins.check(text, plugins.MODEL)
    if text not in MODELS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(sorted(MODELS))}, and no {plugins.MODEL.form}"
        )
    return text


def _data(text: str) -> str:
    if plugins.is_plugin(text):
        return plugins.check(text, plugins.DATA)
    if Path(text).is_dir() and find_spec("PIL") is None:
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: reading images needs Pillow, not found here")
    if text != "builtin" and not Path(text).exists():
        what = "is not builtin, no text file, no folder of images"
        raise argparse.ArgumentTypeError(f"{text!r} {what}, and no {plugins.DATA.form}")
    return text


def _target(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that is there")
    return path


def _window(text: str) -> str:
    if not re.fullmatch(r"\d+:[1-9]\d*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no START:STEPS, as 100:5")
    return text


def _step(text: str) -> str:
    if text != "builtin":
        plugins.check(text, plugins.STEP)
    return text


class _Strict(argparse.ArgumentParser):
    """Says what is wrong with a file's values as the option that names the file."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def _file_words(text: str) -> tuple[str, ...]:
    """The file's content as words of a command line: checked by the same rules, with the same messages."""
    try:
        words = config_file.words(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    checker = _Strict(add_help=False, allow_abbrev=False)
    add_arguments(checker)
    try:
        checker.parse_args(words)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return words
