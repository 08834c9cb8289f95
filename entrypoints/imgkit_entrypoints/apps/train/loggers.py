"""Send the numbers of a run to other loggers (``--log-to``).

The loggers are TensorBoard, Weights & Biases, and functions of the user. Only rank 0 uses them.
"""

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
    """Writes event files to the run folder, which ``tensorboard --logdir`` reads."""

    def __init__(self, folder: Path, start: int, _config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats the steps after the checkpoint. With purge_step, TensorBoard drops the values
        # that the earlier start has written for these steps.
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
    """Writes to a run of Weights & Biases, as files in the run folder unless WANDB_MODE is ``online``."""

    def __init__(self, folder: Path, _start: int, config: Config) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
        # The default mode is offline, because compute nodes often have no internet access. The id depends
        # only on the run folder, so that all starts in this folder belong to one run of Weights & Biases.
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
        """Finish the run. If the mode is ``online``, wait until everything is uploaded."""
        self._run.finish()


# The class for each built-in name in ``--log-to``. The name is also the name of the Python package.
BUILT_IN: Mapping[str, Callable[[Path, int, Config], Any]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


class Loggers:
    """All loggers of a run.

    If a logger fails, this is reported once and the logger is not called any more. The training continues.
    """

    def __init__(self, config: Config, start: int, say: Callable[[str], None]) -> None:
        """Open the loggers of ``--log-to``. `start` is the number of steps that earlier starts have done.

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
        """Pass all values that are numbers to each logger. Other values, such as texts, are left out."""
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
        """Call a function of the logger `name`, and return the result.

        If the call fails, report the error, remove the logger, and return None.
        """
        try:
            return call()
        except Exception as error:  # a full disk, a lost connection, or a fault in the user's function
            self._loggers.pop(name, None)
            self._say(f"--log-to {name} is disabled: {type(error).__name__}: {error}")
            return None
