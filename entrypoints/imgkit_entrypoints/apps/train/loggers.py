"""``--log-to``: a run's numbers in TensorBoard, Weights & Biases or a logger of the user's, from rank 0."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from imgkit_entrypoints.apps.train import plugins
from imgkit_entrypoints.apps.train.config import Config

Say = Callable[[str], None]


class Logger(Protocol):
    """Where the numbers go; a function of the user returns one."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of `step`."""

    def close(self) -> None:
        """Write what is still in memory."""


class _TensorBoard:
    """Event files in the run folder, read by ``tensorboard --logdir``."""

    def __init__(self, config: Config, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the checkpoint are repeated: TensorBoard drops what an earlier start wrote for them.
        again = start + 1 if start else None
        self._writer = SummaryWriter(_folder(config, "tensorboard"), purge_step=again, flush_secs=30)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write and close the file."""
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases: files in the run folder, unless WANDB_MODE says ``online``."""

    def __init__(self, config: Config, start: int) -> None:
        import wandb

        assert config.run_dir is not None
        folder = config.run_dir.resolve()
        # Compute nodes rarely reach the internet. One id for all starts of a run folder: they become one run.
        self._run = wandb.init(
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=_folder(config, ""),
            name=os.environ.get("WANDB_NAME", folder.name),
            id=os.environ.get("WANDB_RUN_ID", hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]),
            resume="allow",
            config={name: _plain(value) for name, value in dataclasses.asdict(config).items()},
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row to the run's history."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write the run's last row, and wait for the uploads of an online run."""
        self._run.finish()


_BUILT_IN: Mapping[str, Callable[[Config, int], Logger]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


def _folder(config: Config, name: str) -> str:
    assert config.run_dir is not None  # the options refuse --log-to without a run folder
    folder = config.run_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def _plain(value: object) -> object:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


class Loggers:
    """All loggers of a run. One that fails is named once and left out; training goes on."""

    def __init__(self, config: Config, start: int, say: Say) -> None:
        """Open those of `config`, for a run that goes on after step `start`.

        Raises
        ------
        UsageError : a function of the user cannot be imported.
        """
        self._say = say
        self._open: list[tuple[str, Logger]] = []
        for name in config.log_to.split(",") if config.log_to else ():
            function = plugins.load(name, plugins.LOGGER) if plugins.is_plugin(name) else None
            make = partial(function, config) if function else partial(_BUILT_IN[name], config, start)
            if (logger := self._tried(name, make)) is not None:
                self._open.append((name, logger))

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Pass on those of `values` that are numbers."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
        for name, logger in tuple(self._open):
            self._tried(name, partial(logger.log, step, numbers))

    def close(self) -> None:
        """Close all."""
        for name, logger in tuple(self._open):
            self._tried(name, logger.close)

    def _tried(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # a full disk, a lost connection, or a fault in the user's function
            self._open = [one for one in self._open if one[0] != name]
            self._say(f"--log-to {name} is disabled: {type(error).__name__}: {error}")
            return None
