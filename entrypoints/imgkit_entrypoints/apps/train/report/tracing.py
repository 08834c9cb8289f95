"""``--profile``: traces of some steps, one file per rank, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

from imgkit_entrypoints import files
from imgkit_entrypoints.apps.train.config import Config
from imgkit_entrypoints.apps.train.data.order import Position
from imgkit_entrypoints.run.ranks import Ranks

Batch = TypeVar("Batch")


def traced(
    steps: Iterable[tuple[Position, Batch]], config: Config, here: Ranks
) -> Iterable[tuple[Position, Batch]]:
    """Pass `steps` on unchanged, and record a trace of those that ``--profile`` names."""
    return _traced(steps, config, here) if config.profile is not None else steps


def _traced(
    steps: Iterable[tuple[Position, Batch]], config: Config, here: Ranks
) -> Iterator[tuple[Position, Batch]]:
    wanted, recorder = config.profiled(), None
    try:
        for position, batch in steps:
            if recorder is None and position.step in wanted:
                recorder = _started(here)
            yield position, batch
            if recorder is not None and position.step + 1 not in wanted:
                _write(recorder, config, here)
                recorder, wanted = None, range(0)
    finally:  # the run ended within the traced steps: keep what there is
        if recorder is not None:
            _write(recorder, config, here)


def _started(here: Ranks) -> profile:
    cuda = [ProfilerActivity.CUDA] if here.device.type == "cuda" else []
    recorder = profile(activities=[ProfilerActivity.CPU, *cuda])
    recorder.start()
    return recorder


def _write(recorder: profile, config: Config, here: Ranks) -> None:
    here.synchronize()
    recorder.stop()
    assert config.run_dir is not None  # options.read has checked it
    target = config.run_dir / "traces" / f"rank-{here.rank}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = files.temporary_name(target)
    recorder.export_chrome_trace(str(temporary))
    files.publish(temporary, target)
