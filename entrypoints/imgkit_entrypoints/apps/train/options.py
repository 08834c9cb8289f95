"""Read the command line of dist-train and the file of ``--config``.

This module does not import torch, so that ``--help`` and error messages appear quickly. The options in a file
are converted to command-line arguments, so that the same rules check both.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.apps.train import plugins
from imgkit_entrypoints.apps.train.config import MODELS, OPTIONS, STEPS, Config
from imgkit_entrypoints.arguments import Need, Parser, add_options, refuse_unused
from imgkit_entrypoints.errors import UsageError

EXAMPLES = """examples:
  dist-train --steps 1000 --run-dir runs/first        # linear; the same command again resumes it
  dist-train --model resnet50 --data /data/imagenet --epochs 90 --global-batch 1024 --amp bf16 --workers 8
  dist-train --model gpt --data book.txt --steps 5000 --eval-every 500 --run-dir runs/gpt
  dist-train --model own_model.py:model --data own_model.py:data --epochs 3

Your own model, and the files of a run: docs/guides/train.md."""


def _flag(name: str) -> str:
    """Return the option for the name of a field: ``stop_after_s`` -> ``--stop-after``."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def _has_momentum(options: argparse.Namespace) -> bool:
    """Return whether the optimizer has a momentum, which is only the case for sgd."""
    defaults = MODELS.get(options.model, MODELS["linear"])
    return (options.optimizer or defaults.optimizer) == "sgd"


def _may_have_built_in_data(options: argparse.Namespace) -> bool:
    """Return whether ``--samples`` may have an effect."""
    # A user's function may read any option, so no option is refused for it.
    return options.data == "builtin" or plugins.is_plugin(options.data)


def _may_have_images(options: argparse.Namespace) -> bool:
    """Return whether ``--image-size`` may have an effect."""
    return Path(options.data).is_dir() or plugins.is_plugin(options.data)


def _has_run_folder(options: argparse.Namespace) -> bool:
    """Return whether the run has a folder, in which checkpoints and other files are saved."""
    return options.run_dir is not None


_NO_FOLDER = "without a run folder (--run-dir DIR)"
# Conditions under which options have an effect. If a condition is not met, the option is refused with the
# reason.
NEEDS = (
    Need(option="--samples", reason="without built-in data", met=_may_have_built_in_data),
    Need(option="--image-size", reason="without a folder of images (--data DIR)", met=_may_have_images),
    Need(option="--momentum", reason="without --optimizer sgd", met=_has_momentum),
    Need(option="--amp", reason="with --dtype fp64", met=lambda options: options.dtype == "fp32"),
    Need(
        option="--save-every",
        reason=_NO_FOLDER,
        met=lambda options: _has_run_folder(options) or options.save_every == "0",
    ),
    *(
        Need(option=option, reason=_NO_FOLDER, met=_has_run_folder)
        for option in ("--keep", "--profile", "--log-to", "--ignore-checkpoints")
    ),
    Need(
        option="--ignore-checkpoints",
        reason="without --resume auto",
        met=lambda options: options.resume == "auto",
    ),
)


def check(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Check the options before any worker is started.

    Raises
    ------
    UsageError : an option is wrong, has no effect, or contradicts another.
    """
    parse_options(argv, env)


def parse_options(argv: Sequence[str], env: Mapping[str, str]) -> argparse.Namespace:
    """Parse and check the options of a command line and of its ``--config`` file.

    Options on the command line override options in the file. Without ``--run-dir``, the run folder comes from
    IMGKIT_RUN_DIR.

    Raises
    ------
    UsageError : an option is wrong, has no effect, or contradicts another.
    """
    parser = Parser(prog="dist-train")
    add_options(parser, OPTIONS)
    options = parser.parse_args(argv)
    if options.config:
        # The last value of an option counts, so the command line comes after the file.
        options = parser.parse_args([*_read_file(options.config, parser), *argv])
    if options.run_dir is None and env.get("IMGKIT_RUN_DIR"):
        options.run_dir = Path(env["IMGKIT_RUN_DIR"])
    if options.run_dir is not None:
        options.run_dir = files.in_job_folder(options.run_dir, env)
        hint = "name another folder by --run-dir or IMGKIT_RUN_DIR"
        files.refuse_unusable_folder(options.run_dir, "run folder", where=str(options.run_dir), hint=hint)
    # Refuse options that have no effect without others, such as --keep without a run folder.
    refuse_unused(parser, options, NEEDS)
    return options


def read_config(argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """Read the command line of a worker, and fill in the defaults that depend on the model.

    The node agent, which starts the workers, has already checked the command line.

    Raises
    ------
    UsageError : an option is wrong (see `parse_options`), or ``--compile`` does not work in this image.
    """
    options = parse_options(argv, env)
    del options.config  # the file was already read, and `Config` has no such field
    defaults = MODELS.get(options.model, MODELS["linear"])
    if options.optimizer is None:
        options.optimizer = defaults.optimizer
    if options.lr is None:
        options.lr = defaults.lr
    if options.warmup_steps is None:
        options.warmup_steps = defaults.warmup_steps
    if options.steps is None and options.epochs is None:
        options.steps = STEPS
    if options.compile:
        _refuse_missing_compiler(env)
    return Config(**vars(options))


def _refuse_missing_compiler(env: Mapping[str, str]) -> None:
    """Raise UsageError if this image lacks a program or package that torch.compile needs.

    torch.compile generates C++ for CPUs, so it needs a C++ compiler. For GPUs, it needs Triton and a C
    compiler, because Triton compiles a loader in C.
    """
    hint = "leave --compile out, or add it to the image"
    variable = "CXX"
    names = ["g++", "clang++"]
    if env.get("IMGKIT_DEVICE") == "cuda":
        variable = "CC"
        names = ["gcc", "clang", "cc"]
        if find_spec("triton") is None:
            raise UsageError("--compile needs Triton, which this image does not have", hint=hint)
    if env.get(variable):
        names = [env[variable]]
    if not any(map(shutil.which, names)):
        compilers = " or ".join(names)
        raise UsageError(f"--compile needs a compiler ({compilers}), but PATH has none", hint=hint)


def _read_file(path: Path, parser: Parser) -> tuple[str, ...]:
    """Return the options in a ``--config`` file as command-line arguments.

    They are checked by the same rules as the command line. All errors in the file are reported together.
    """
    where = f"--config {path}"
    try:
        arguments = file_arguments(path)
    except OSError as error:
        raise UsageError(str(error.strerror), where=where) from error
    except ValueError as error:
        raise UsageError(str(error), where=where) from error
    errors = []
    # Parse each argument separately, because argparse stops at its first error.
    for argument in arguments:
        try:
            parser.parse_args([argument])
        except UsageError as error:
            errors.append(error.what)
    if errors:
        raise UsageError("; ".join(errors), where=where)
    return arguments


def file_arguments(path: Path) -> tuple[str, ...]:
    """Convert the options in a JSON file to flags: ``{"lr": 0.1, "compile": true} -> --lr=0.1, --compile``.

    Raises
    ------
    OSError : the file cannot be read.
    ValueError : the file does not contain a table of options with single values.
    """
    content = json_text.load(path)
    if not isinstance(content, dict):
        raise ValueError("the file contains no table of options")
    if "config" in content:
        raise ValueError("the file names another file with `config`; only --config can")
    flags: list[str] = []
    for key, value in content.items():
        if isinstance(value, dict | list):
            raise ValueError(f"`{key}` holds more than one value")
        if value is True:
            flags.append(_flag(key))
        # null means that the option is not set, and false is the default of all boolean options.
        elif value is not None and value is not False:
            flags.append(f"{_flag(key)}={value}")
    return tuple(flags)
