"""``--log-to``: a run's numbers in TensorBoard, Weights & Biases or a logger of the user's, from rank 0."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from imgkit_entrypoints.apps.train import plugins
from imgkit_entrypoints.apps.train.config import Config


class _TensorBoard:
    """Event files in the run folder, read by ``tensorboard --logdir``."""

    def __init__(self, folder: Path, start: int, _config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the checkpoint are repeated: TensorBoard drops what an earlier start wrote for them.
        first_repeated = start + 1 if start else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_repeated, flush_secs=30)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to the curve of each number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write and close the file."""
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases: files in the run folder, unless WANDB_MODE says ``online``."""

    def __init__(self, folder: Path, _start: int, config: Config) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
        # Compute nodes rarely reach the internet. One id for all starts of a run folder: they become one run.
        self._run = wandb.init(
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(folder),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            id=os.environ.get("WANDB_RUN_ID", digest[:16]),
            resume="allow",
            config=config.values(),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row to the run's history."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write the run's last row, and wait for the uploads of an online run."""
        self._run.finish()


# Classes by the name that ``--log-to`` has for them, which is that of their package.
BUILT_IN: Mapping[str, Callable[[Path, int, Config], Any]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


class Loggers:
    """All loggers of a run. One that fails is named once and left out; training goes on."""

    def __init__(self, config: Config, start: int, say: Callable[[str], None]) -> None:
        """Open the loggers of ``--log-to``, for a run that goes on after step `start`.

        Raises
        ------
        UsageError : a function of the user cannot be imported.
        """
        self._say = say
        self._loggers: dict[str, Any] = {}
        if config.log_to is None:
            return
        assert config.run_dir is not None  # the options refuse --log-to without a run folder
        create: Callable[[], Any]
        for name in config.log_to.split(","):
            if plugins.is_plugin(name):
                create = partial(plugins.load(name, plugins.LOGGER), config)
            else:
                create = partial(BUILT_IN[name], config.run_dir, start, config)
            logger = self._call_or_disable(name, create)
            if logger is not None:
                self._loggers[name] = logger

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Hand the numbers among `values` to all loggers."""
        numbers = {}
        for name, value in values.items():
            if isinstance(value, (int, float)):
                numbers[name] = float(value)
        for name, logger in tuple(self._loggers.items()):
            self._call_or_disable(name, partial(logger.log, step, numbers))

    def close(self) -> None:
        """Close all loggers."""
        for name, logger in tuple(self._loggers.items()):
            self._call_or_disable(name, logger.close)

    def _call_or_disable(self, name: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call of a logger. One that fails is named, and gets no more calls."""
        try:
            return call()
        except Exception as error:  # a full disk, a lost connection, or a fault in the user's function
            self._loggers.pop(name, None)
            self._say(f"--log-to {name} is disabled: {type(error).__name__}: {error}")
            return None
