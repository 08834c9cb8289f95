"""Options of dist-train; imports no torch, so that ``--help`` and mistakes are quick."""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from imgkit_entrypoints.apps.train import plugins
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.schedule import SHAPES
from imgkit_entrypoints.arguments import natural, positive

MODELS: Mapping[str, tuple[str, float]] = {
    "linear": ("sgd", 0.05),
    "mlp": ("sgd", 0.05),
    "resnet18": ("sgd", 0.05),
    "resnet50": ("sgd", 0.05),
    "gpt": ("adamw", 1e-3),
}
"""Built-in models: the optimizer and the learning rate where none is given."""
STEPS = 100
"""Where neither --steps nor --epochs is given."""


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Options of dist-train."""
    add = functools.partial(_add, parser)
    add("--config", _file_words, None, "FILE", "options from a JSON or TOML file; flags win")
    add("--model", _model, "linear", "NAME", f"{', '.join(MODELS)}, or MOD:FN or file.py:FN (default linear)")
    add(
        "--data",
        _data,
        "builtin",
        "NAME",
        "builtin, a text file for gpt, or MOD:FN or file.py:FN (default builtin)",
    )
    add("--step", _step, "builtin", "NAME", "the loss: builtin, or MOD:FN or file.py:FN (default builtin)")
    add("--samples", positive, None, "N", "size of the built-in data (default: the model's)")
    add("--steps", positive, None, "N", f"optimizer steps (default {STEPS})")
    add("--epochs", positive, None, "N", "passes over the data; with --steps, whichever ends first")
    add("--batch-size", positive, None, "N", "samples a rank computes at once (default 32)")
    add("--accumulate", positive, None, "N", "such batches a rank and step (default 1)")
    add(
        "--global-batch",
        positive,
        None,
        "N",
        "samples a step over all ranks, by accumulation (default: what the two make)",
    )
    add("--lr", _number, None, "X", "learning rate (default: the model's, 0.05 for linear)")
    add(
        "--optimizer",
        _one_of("sgd", "adam", "adamw"),
        None,
        "NAME",
        "sgd, adam or adamw (default: the model's)",
    )
    add("--momentum", _number, 0.0, "X", "of sgd (default 0)")
    add("--weight-decay", _number, 0.0, "X", "of the optimizer (default 0)")
    add("--schedule", _one_of(*SHAPES), "constant", "NAME", "constant, linear or cosine (default constant)")
    add("--warmup", natural, 0, "STEPS", "steps in which the learning rate rises (default 0)")
    add("--clip", _number, None, "X", "largest norm of the gradient (default: any)")
    add(
        "--dtype", _one_of("fp32", "fp64"), "fp32", "NAME", "of weights and data: fp32 or fp64 (default fp32)"
    )
    add(
        "--amp",
        _one_of("off", "bf16", "fp16"),
        "off",
        "NAME",
        "lower precision of the computation: off, bf16 or fp16",
    )
    add("--seed", int, 0, "N", "of weights, data and their order (default 0)")
    add("--workers", natural, 0, "N", "processes a rank that fetch samples one by one (default 0: none)")
    parser.add_argument(
        "--deterministic", action="store_true", help="refuse operations that are not deterministic"
    )
    add(
        "--run-dir",
        Path,
        None,
        "DIR",
        "for snapshots and metrics (default: IMGKIT_RUN_DIR, else nothing is kept)",
    )
    add(
        "--save-every",
        _interval,
        "1000",
        "N|Ne",
        "snapshots every N steps or N epochs, 0 at the end only (default 1000)",
    )
    add("--keep", positive, 2, "K", "snapshots kept (default 2)")
    add(
        "--resume",
        str,
        "auto",
        "HOW",
        "auto: the run folder's newest valid snapshot; never; or a path (default auto)",
    )
    add("--stop-after", duration, None, "TIME", "save and end after 90, 90s, 50m or 1h30m")
    add(
        "--on-nan",
        _one_of("stop", "skip"),
        "stop",
        "HOW",
        "a loss that is no number: stop, or skip that step (default stop)",
    )
    add("--log-every", positive, 10, "N", "steps a line (default 10)")


def _add(
    parser: argparse._ActionsContainer,
    flag: str,
    kind: Callable[[str], Any],
    default: Any,
    metavar: str,
    text: str,
) -> None:
    parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


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
    return Config(**values)


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
    if text != "builtin" and not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not builtin, no text file, and no {plugins.DATA.form}")
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
    path = Path(text)
    try:
        content = _parsed(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    if not isinstance(content, dict):
        raise argparse.ArgumentTypeError(f"{text}: holds no table of options")
    if "config" in content:
        raise argparse.ArgumentTypeError(f"{text}: a file cannot name another one by config")
    words: list[str] = []
    for key, value in content.items():
        flag = "--" + str(key).replace("_", "-").removesuffix("-s")  # config.json says stop_after_s
        if isinstance(value, bool):
            words += [flag] if value else []
        elif value is not None:
            words.append(f"{flag}={value}")
    checker = _Strict(add_help=False, allow_abbrev=False)
    add_arguments(checker)
    try:
        checker.parse_args(words)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return tuple(words)


def _parsed(path: Path) -> Any:
    if path.suffix == ".toml":
        try:
            import tomllib  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ValueError("TOML needs Python 3.11; JSON works here too") from None
        return tomllib.loads(path.read_text())
    return json.loads(path.read_text())
