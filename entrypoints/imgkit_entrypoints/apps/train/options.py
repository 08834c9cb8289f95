"""The options of dist-train, from the command line and from a file.

This module does not import torch, so ``--help`` and refusals are quick. A file's options are turned into
arguments, so that one set of rules checks both.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.apps.train import loggers, plugins
from imgkit_entrypoints.apps.train.config import LINE_EVERY_S, SHAPES, Config
from imgkit_entrypoints.arguments import Need, duration, natural, positive, refuse_unused
from imgkit_entrypoints.errors import UsageError

MODELS: Mapping[str, tuple[str, float, int]] = {
    "linear": ("sgd", 0.05, 0),
    "mlp": ("sgd", 0.05, 0),
    "resnet18": ("sgd", 0.05, 20),
    "resnet50": ("sgd", 0.02, 20),
    "gpt": ("adamw", 1e-3, 0),
}
"""The built-in models, each with its default optimizer, learning rate and steps of warm-up."""
STACKED = ("resnet18", "resnet50", "gpt")
"""Built-in models that are stacks of blocks."""
STEPS = 100
"""Number of steps if neither --steps nor --epochs is given."""
SWITCHES: Mapping[str, str] = {
    "--compile": "compile the model with torch.compile",
    "--activation-checkpointing": "recompute blocks in the backward pass to save memory",
    "--deterministic": "refuse nondeterministic operations",
}
EXAMPLES = """examples:
  dist-train --steps 1000 --run-dir runs/first        # linear; the same command again resumes it
  dist-train --model resnet50 --data /data/imagenet --epochs 90 --global-batch 1024 --amp bf16 --workers 8
  dist-train --model gpt --data book.txt --steps 5000 --eval-every 500 --run-dir runs/gpt
  dist-train --model own_model.py:model --data own_model.py:data --epochs 3

Your own model, and the files of a run: docs/guides/train.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of dist-train."""
    _model_and_data(_adder(parser.add_argument_group("model and data")))
    _steps_and_batches(_adder(parser.add_argument_group("steps and batches")))
    _of_optimizer(_adder(parser.add_argument_group("optimizer")))
    _computation(parser.add_argument_group("computation"))
    _output(_adder(parser.add_argument_group("output and resuming")))


def _model_and_data(add: _Add) -> None:
    function_form = "MOD:FN or file.py:FN"
    add("--config", _file_words, None, "FILE", "options from a JSON, TOML or YAML file; flags override it")
    add("--model", _model, "linear", "NAME", f"{', '.join(MODELS)}, or {function_form} (default: linear)")
    text = "builtin, a text file for gpt, a folder of images for a resnet"
    add("--data", _data, "builtin", "NAME", f"{text}, or {function_form} (default: builtin)")
    add(
        "--step",
        _step,
        "builtin",
        "NAME",
        f"function for the loss of a batch: builtin, or {function_form} (default: builtin)",
    )
    add("--samples", positive, None, "N", "number of built-in samples (default: depends on the model)")
    text = "width and height, in pixels, to crop images from a folder to (default: 224)"
    add("--image-size", positive, 224, "N", text)
    add("--seed", int, 0, "N", "random seed of the weights, the data and its order (default: 0)")
    text = "data loading processes per rank (default: 0, load in the rank itself)"
    add("--workers", natural, 0, "N", text)


def _steps_and_batches(add: _Add) -> None:
    add("--steps", positive, None, "N", f"optimizer steps (default: {STEPS})")
    add("--epochs", positive, None, "N", "passes over the data; with --steps, whichever ends first")
    add("--batch-size", positive, None, "N", "samples per rank and batch (default: 32)")
    text = "batches per rank and step, by gradient accumulation (default: 1)"
    add("--accumulate", positive, None, "N", text)
    text = "samples per step over all ranks, by gradient accumulation (default: from the two above)"
    add("--global-batch", positive, None, "N", text)
    add("--stop-after", duration, None, "TIME", "save and stop this time after the first attempt: 50m, 1h30m")


def _of_optimizer(add: _Add) -> None:
    add("--lr", _number, None, "X", "learning rate (default: depends on the model, 0.05 for linear)")
    text = "sgd, adam or adamw (default: depends on the model)"
    add("--optimizer", _one_of("sgd", "adam", "adamw"), None, "NAME", text)
    add("--momentum", _number, 0.0, "X", "momentum of sgd (default: 0)")
    add("--weight-decay", _number, 0.0, "X", "weight decay (default: 0)")
    text = "learning rate schedule: constant, linear or cosine (default: constant)"
    add("--schedule", _one_of(*SHAPES), "constant", "NAME", text)
    text = "steps of learning rate warm-up (default: 20 for a resnet, else 0)"
    add("--warmup-steps", natural, None, "N", text)
    add("--clip", _above_0, None, "X", "maximum norm of the gradient (default: no limit)")
    text = "what to do if the loss is NaN or infinite: stop, or skip the step (default: stop)"
    add("--on-nan", _one_of("stop", "skip"), "stop", "ACTION", text)


def _computation(group: argparse._ArgumentGroup) -> None:
    add = _adder(group)
    text = "element type of weights and data: fp32 or fp64 (default: fp32)"
    add("--dtype", _one_of("fp32", "fp64"), "fp32", "NAME", text)
    text = "mixed precision: off, bf16 or fp16 (default: off)"
    add("--amp", _one_of("off", "bf16", "fp16"), "off", "NAME", text)
    for flag, text in SWITCHES.items():
        # The --no-... form lets flags override the file here too.
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=False, help=text)


def _output(add: _Add) -> None:
    text = "run folder for checkpoints and metrics (default: IMGKIT_RUN_DIR, else nothing is saved)"
    add("--run-dir", Path, None, "DIR", text)
    text = "save every N steps or N epochs; 0: only at the end (default: 1000)"
    add("--save-every", _interval, "1000", "N|Ne", text)
    add("--keep", positive, 2, "K", "number of checkpoints to keep (default: 2)")
    text = "auto: the newest valid checkpoint of the run folder; never; or the path of one (default: auto)"
    add("--resume", str, "auto", "auto|never|PATH", text)
    text = "evaluate on held-out data every N steps or N epochs (default: 0, never)"
    add("--eval-every", _interval, "0", "N|Ne", text)
    add("--profile", _window, None, "START:STEPS", "trace STEPS steps after step START into the run folder")
    text = (
        f"print a line every N steps, and every {LINE_EVERY_S} s (default: 0, a tenth of the run, at "
        "most 1000)"
    )
    add("--log-every", natural, 0, "N", text)
    text = f"also log to {', '.join(loggers.NAMES)}, MOD:FN or file.py:FN; separate several with commas"
    add("--log-to", _loggers, None, "NAMES", text)


_Add = Callable[[str, Callable[[str], Any], Any, str, str], None]


def _adder(group: argparse._ArgumentGroup) -> _Add:
    def add(flag: str, kind: Callable[[str], Any], default: Any, metavar: str, text: str) -> None:
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)

    return add


def _takes(*optimizers: str) -> Callable[[argparse.Namespace], bool]:
    return lambda options: (options.optimizer or MODELS.get(options.model, ("sgd",))[0]) in optimizers


def _reads(kind: Callable[[str], bool]) -> Callable[[argparse.Namespace], bool]:
    """Whether the data is of that kind, or is made by the user's own function, which gets all options."""
    return lambda options: kind(options.data) or plugins.is_plugin(options.data)


def _keeps(options: argparse.Namespace) -> bool:
    return options.run_dir is not None


_NO_FOLDER = "without a run folder (--run-dir DIR)"
NEEDS = (
    Need(option="--samples", reason="without built-in data", met=_reads(lambda data: data == "builtin")),
    Need(option="--image-size", reason="without a folder of images (--data DIR)", met=_reads(os.path.isdir)),
    Need(option="--momentum", reason="without --optimizer sgd", met=_takes("sgd")),
    Need(option="--amp", reason="with --dtype fp64", met=lambda options: options.dtype == "fp32"),
    Need(
        option="--activation-checkpointing",
        reason=f"without --model {', '.join(STACKED)}; your own model calls torch.utils.checkpoint itself",
        met=lambda options: options.model in STACKED,
    ),
    Need(
        option="--save-every",
        reason=_NO_FOLDER,
        met=lambda options: _keeps(options) or options.save_every == "0",
    ),
    *(Need(option=option, reason=_NO_FOLDER, met=_keeps) for option in ("--keep", "--profile", "--log-to")),
)
"""Options that have no effect without others, or with others."""


def check(argv: Sequence[str], env: Mapping[str, str]) -> argparse.Namespace:
    """Return the options of a command line and of its ``--config`` file.

    Raises
    ------
    UsageError : options contradict each other, or one has no effect.
    """
    parser = argparse.ArgumentParser(prog="dist-train")
    add_arguments(parser)
    options = parser.parse_args(argv)
    if options.config:
        options = parser.parse_args([*options.config, *argv])
    if options.run_dir is None and env.get("IMGKIT_RUN_DIR"):
        options.run_dir = Path(env["IMGKIT_RUN_DIR"])
    if options.run_dir is not None:
        options.run_dir = files.in_job_folder(options.run_dir, env)
        hint = "name another folder by --run-dir or IMGKIT_RUN_DIR"
        files.refuse_unusable_folder(options.run_dir, "run folder", where=str(options.run_dir), hint=hint)
    refuse_unused(parser, options, NEEDS)
    return options


def read(argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """Read a worker's command line, which the node agent has already checked.

    Raises
    ------
    UsageError : as of `check`, or this image cannot compile.
    """
    options = check(argv, env)
    values = vars(options)
    del values["config"]
    optimizer, lr, warmup = MODELS.get(options.model, ("sgd", 0.05, 0))
    values["optimizer"] = options.optimizer or optimizer
    values["lr"] = lr if options.lr is None else options.lr
    values["warmup_steps"] = warmup if options.warmup_steps is None else options.warmup_steps
    if options.steps is None and options.epochs is None:
        values["steps"] = STEPS
    values["stop_after_s"] = values.pop("stop_after")
    config = Config(**values)
    if config.compile and (missing := _no_compiler(env)):
        raise UsageError(f"--compile needs {missing}", hint="leave --compile out, or add it to the image")
    return config


def _no_compiler(env: Mapping[str, str]) -> str | None:
    """The tool that torch.compile lacks here: it writes C++ for the CPU, and a C loader for Triton."""
    if env.get("IMGKIT_DEVICE", "cpu") == "cuda":
        if find_spec("triton") is None:
            return "Triton, which this image does not have"
        names = [env["CC"]] if env.get("CC") else ["gcc", "clang", "cc"]
    else:
        names = [env["CXX"]] if env.get("CXX") else ["g++", "clang++"]
    return None if any(map(shutil.which, names)) else f"a compiler ({' or '.join(names)}), but PATH has none"


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _above_0(text: str) -> float:
    if not (value := _number(text)):
        raise argparse.ArgumentTypeError("a norm of 0 would train nothing: a number above 0")
    return value


def _interval(text: str) -> str:
    if not re.fullmatch(r"\d+|[1-9]\d*e", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps (500) nor of epochs (2e)")
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
            f"{text!r} is neither one of {', '.join(sorted(MODELS))} nor {plugins.MODEL.form}"
        )
    return text


def _data(text: str) -> str:
    if plugins.is_plugin(text):
        return plugins.check(text, plugins.DATA)
    if Path(text).is_dir() and find_spec("PIL") is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a folder: reading images needs Pillow, which is not installed"
        )
    if text != "builtin" and not Path(text).exists():
        expected_text = "is neither builtin, a text file, a folder of images"
        raise argparse.ArgumentTypeError(f"{text!r} {expected_text} nor {plugins.DATA.form}")
    return text


def _window(text: str) -> str:
    if not re.fullmatch(r"\d+:[1-9]\d*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not START:STEPS, as in 100:5")
    return text


def _loggers(text: str) -> str:
    try:
        return loggers.check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _step(text: str) -> str:
    if text != "builtin":
        plugins.check(text, plugins.STEP)
    return text


class _Strict(argparse.ArgumentParser):
    """Reports errors in a file's values as errors of ``--config``."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def _file_words(text: str) -> tuple[str, ...]:
    """The file's options as command-line words, checked by the same rules with the same messages."""
    try:
        arguments = file_arguments(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    checker = _Strict(add_help=False, allow_abbrev=False)
    add_arguments(checker)
    wrong = []
    for argument in arguments:  # one by one: argparse stops at its first error
        try:
            checker.parse_args([argument])
        except argparse.ArgumentTypeError as error:
            wrong.append(str(error))
    if wrong:
        raise argparse.ArgumentTypeError(f"{text}: {'; '.join(wrong)}")
    return arguments


def file_arguments(path: Path) -> tuple[str, ...]:
    """Return the options in the file as flags.

    Raises
    ------
    OSError : the file cannot be read.
    ValueError : the file contains no table of options, or this image cannot parse its format.
    """
    try:
        content = _parsed(path)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("the file contains no table of options")
    if "config" in content:
        raise ValueError("the file names another file with `config`; only --config can")
    flags: list[str] = []
    for key, value in content.items():
        flag = "--" + str(key).replace("_", "-").removesuffix("-s")  # config.json has stop_after_s
        if isinstance(value, bool):
            flags += [flag] if value else []  # YAML parses `off` as false
        elif isinstance(value, dict | list):  # in YAML, few bytes can make one of gigabytes
            raise ValueError(f"`{key}` holds more than one value")
        elif value is not None:
            flags.append(f"{flag}={value}")
    return tuple(flags)


def _parsed(path: Path) -> Any:
    if path.suffix == ".toml":
        try:
            import tomllib  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ValueError("TOML needs Python 3.11; use JSON instead") from None
        return tomllib.loads(files.read_text(path))
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path)
    return json_text.load(path)


def _yaml(path: Path) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError("YAML needs PyYAML, which is not installed; use JSON instead") from None
    try:
        return yaml.safe_load(files.read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error
