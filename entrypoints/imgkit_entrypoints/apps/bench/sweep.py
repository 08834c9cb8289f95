"""Run all collectives at all sizes in order. Each result is printed and saved as soon as it is complete."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

from imgkit_entrypoints import terminal
from imgkit_entrypoints.apps.bench import chart, machine, nccl_log, record, sizes, table, verdict
from imgkit_entrypoints.apps.bench.collectives import Collective, find_collective
from imgkit_entrypoints.apps.bench.measurement import Measurement, OutOfMemory, Stopped
from imgkit_entrypoints.apps.bench.options import MAX_BYTES, read_options
from imgkit_entrypoints.apps.bench.setup import RunSetup, set_up
from imgkit_entrypoints.apps.bench.sizes import Counts
from imgkit_entrypoints.errors import EXIT_NO, ImgkitError

# Texts in the errors of backends that do not support an operation or an element type.
_UNSUPPORTED = ("support", "implement", "invalid scalar type", "unhandled")


class Sweep:
    """A run of dist-bench on this rank. All ranks measure, and rank 0 prints and saves the results."""

    def __init__(self, setup: RunSetup, log_folder: Path | None = None) -> None:
        self._setup = setup
        self._measurer = setup.measurer
        self._log_folder = log_folder
        self._record = setup.new_record()
        # Sentences that were printed and are also saved in the JSON file.
        self._notes: list[str] = []

    def run(self) -> int:
        """Measure all collectives, and return the exit code of this worker.

        If another rank fails, report the sizes that were measured before, and end this process.
        """
        has_lost_peer = False
        try:
            self._measure_all()
            self._record.transport = self._gather_transports()
        except RuntimeError as error:  # the backends raise this if another rank is gone
            has_lost_peer = True
            reason = _take_first_sentence(error)
            self._print_note(
                f"INCOMPLETE: a collective failed. The sizes above are complete. The error: {reason}"
            )
        code = self._finish()
        if has_lost_peer:
            sys.stdout.flush()
            # os._exit, because the destructor of a process group hangs if a rank is gone.
            os._exit(code)
        return code

    def _gather_transports(self) -> tuple[str, ...]:
        """Return the transports in NCCL's logs on all ranks. All ranks must call this method."""
        own_transports = nccl_log.read_transports(self._log_folder)
        transports = set[str]().union(*self._setup.ranks.gather(own_transports))
        return tuple(sorted(transports))

    def _measure_all(self) -> None:
        """Measure all collectives, unless a request to stop ends the run earlier."""
        # If a collective runs out of memory, the next collective is still measured.
        try:
            completed = [self._measure_sizes(name) for name in self._setup.options.collectives]
        except Stopped:  # raised on all ranks
            self._print_note("INCOMPLETE: stopped on request. The sizes above are complete.")
            return
        self._record.complete = all(completed)

    def _measure_sizes(self, name: str) -> bool:
        """Measure all sizes of one collective, and return False if there was too little memory for a size.

        If the backend does not support the collective, report this and return True. The run still counts as
        complete.
        """
        collective = find_collective(name)
        planned = self._plan_sizes(collective)
        self._print(table.format_title(collective, self._setup.options.dtype, self._setup.world))
        error = self._find_backend_error(collective, planned[0])
        if error:
            backend = self._setup.world.backend
            self._print_note(f"{name}: {backend} does not support it: {error}")
            return True
        self._print(*table.HEADER)
        previous: Counts | None = None
        for size_bytes in planned:
            try:
                measurement = self._measure_size(collective, size_bytes, previous)
            except OutOfMemory:
                self._print_note(self._describe_memory(collective, size_bytes))
                return False
            self._report_size(collective, measurement)
            previous = measurement.counts  # for the plan of the next size
        return True

    def _measure_size(self, collective: Collective, size_bytes: int, previous: Counts | None) -> Measurement:
        """Measure one size, and raise OutOfMemory if there is too little memory for it."""
        needed_bytes = self._measurer.needed_bytes(collective, size_bytes)
        if needed_bytes > machine.MAX_SHARE * self._setup.free_bytes:
            raise OutOfMemory
        return self._measurer.measure(collective, size_bytes, previous)

    def _describe_memory(self, collective: Collective, size_bytes: int) -> str:
        """Return a sentence for the report about a size for which there is too little memory."""
        size = sizes.format_size(size_bytes)
        needed = sizes.format_size(self._measurer.needed_bytes(collective, size_bytes))
        free = sizes.format_size(int(self._setup.free_bytes))
        return (
            f"OUT OF MEMORY: {collective.name} of {size} needs {needed} per rank, and "
            f"{free} were free. Larger sizes are left out."
        )

    def _plan_sizes(self, collective: Collective) -> list[int]:
        """Return the sizes to measure in bytes, without duplicates.

        Each size is rounded, so that it has at least one element, or at least one chunk of 16 bytes for each
        rank.
        """
        options = self._setup.options
        limit = options.max_bytes
        if limit is None:
            limit = self._choose_max_bytes(collective)
        planned: list[int] = []
        for size in sizes.iterate_sizes(options.min_bytes, max(limit, options.min_bytes), options.factor):
            size_bytes = self._measurer.size_bytes(collective, size)
            if size_bytes not in planned:
                planned.append(size_bytes)
        return planned

    def _find_backend_error(self, collective: Collective, size_bytes: int) -> str:
        """Return the backend's error if it does not support this collective or element type, or else "".

        This runs the collective once at the smallest size, so all ranks must call this method.
        """
        # A size of 1 byte is rounded up to whole elements, or to a chunk for each rank.
        smallest = min(size_bytes, self._measurer.size_bytes(collective, 1))
        try:
            self._measurer.run_once(collective, smallest)
        except (ValueError, TypeError) as error:  # the arguments are right, so torch does not support them
            return _take_first_line(error) or type(error).__name__
        except RuntimeError as error:  # also NotImplementedError, which is a RuntimeError
            message = _take_first_line(error) or type(error).__name__
            # Other errors have other causes. For example, another rank may have failed.
            if not any(text in message.lower() for text in _UNSUPPORTED):
                raise
            return message
        return ""

    def _choose_max_bytes(self, collective: Collective) -> int:
        """Return the default of ``--max`` for the backend, or less if there is too little memory for it."""
        max_bytes = MAX_BYTES.get(self._setup.world.backend, MAX_BYTES["gloo"])
        usable_bytes = machine.DEFAULT_SHARE * self._setup.free_bytes
        # Halve the size until the buffers fit into the usable part of the memory.
        while max_bytes > self._setup.options.min_bytes:
            if self._measurer.needed_bytes(collective, max_bytes) <= usable_bytes:
                break
            max_bytes //= 2
        return max_bytes

    def _report_size(self, collective: Collective, measurement: Measurement) -> None:
        """Print and save the result of one size."""
        setup = self._setup
        counts = measurement.counts
        result = record.new_result(
            collective,
            self._measurer.dtype,
            size_bytes=counts.size_bytes,
            iterations=counts.total,
            seconds=[batch_s / counts.launches for batch_s in measurement.batches],
            ranks=setup.world.ranks,
            wrong=measurement.wrong,
        )
        self._record.results.append(result)
        self._print(table.format_row(result))
        for element in measurement.first_wrong:
            self._print_note(f"{element} (on {setup.node_names[element.rank]})")
        # The file is written after each size. If the run is killed later, this note remains in the file.
        self._save(("INCOMPLETE: the run was still in progress, or was killed.",))

    def _finish(self) -> int:
        """Print the verdict, save the run, and return the exit code.

        The exit code is 0 only if all sizes were measured, all values were right, and ``--require`` was met.
        """
        self._print(*table.format_summary(self._record.results))
        self._print(*self._describe_verdicts())
        reasons = []
        if self._record.wrong:
            reasons.append(f"{self._record.wrong} elements were wrong, so run dist-doctor before you train")
        # An incomplete run lacks sizes, so it cannot be judged. It fails in any case.
        if self._record.complete:
            reasons += verdict.find_shortfalls(self._setup.options.requirement, self._verdicts())
        if reasons:
            self._print_note(f"FAILED: {'; '.join(reasons)}.")
        self._save()
        if reasons or not self._record.complete:
            return EXIT_NO
        return 0

    def _verdicts(self) -> list[verdict.BusbwVerdict]:
        """Return the measured and the expected bus bandwidth of each collective so far."""
        return verdict.judge_busbw(self._record.results, self._setup.world, self._setup.line_rate_Gbps)

    def _describe_verdicts(self) -> list[str]:
        """Return the sentences at the end of the report: on the bus bandwidth and on NCCL's transports."""
        lines = verdict.describe_verdicts(self._verdicts(), self._setup.world, self._setup.line_rate_Gbps)
        return [*lines, *nccl_log.describe_transports(self._record.transport)]

    def _print(self, *lines: str) -> None:
        """Print lines on rank 0. On all other ranks, do nothing."""
        if self._setup.ranks.rank == 0:
            terminal.print_results(*lines)

    def _print_note(self, text: str) -> None:
        """Print a sentence, and keep it for the JSON file."""
        self._notes.append(text)
        self._print(text)

    def _save(self, more_notes: tuple[str, ...] = ()) -> None:
        """Write the results so far to the files of the options and to the file in the run's folder.

        Parameters
        ----------
        more_notes : sentences that are saved only this time, in addition to those in `_notes`.
        """
        # Only rank 0 writes. All ranks have the same results, because measurements are exchanged.
        if self._setup.ranks.rank != 0:
            return
        options = self._setup.options
        if options.json_path or self._setup.run_file:
            text = self._record.to_json(self._verdict_values(more_notes))
            if options.json_path:
                record.save(Path(options.json_path), text, "--save FILE")
            if self._setup.run_file:
                record.save(self._setup.run_file, text, "IMGKIT_RUN_DIR=FOLDER")
        if options.csv_path:
            record.save(Path(options.csv_path), self._record.to_csv(), "--csv FILE")
        if options.plot_path:
            record.save(Path(options.plot_path), self._draw_chart(), "--plot FILE")

    def _draw_chart(self) -> str:
        """Return the chart of the results so far."""
        world = self._setup.world
        nodes = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
        dtype = self._setup.options.dtype
        title = f"Bus bandwidth, {dtype}, {world.ranks} ranks on {nodes}, {world.backend}"
        return chart.draw_chart(title, self._record.results)

    def _verdict_values(self, more_notes: tuple[str, ...]) -> dict[str, Any]:
        """Return the verdict in the format of the JSON file."""
        busbw = []
        for entry in self._verdicts():
            busbw.append({**dataclasses.asdict(entry), "percent": entry.percent})
        return {"sentences": [*self._describe_verdicts(), *self._notes, *more_notes], "busbw": busbw}


def _take_first_line(error: Exception) -> str:
    """Return the first line of an error, or an empty text if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _take_first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of a backend's error, without the position in gloo's source code.

    ``[/src/pair.cc:1] Connection closed by peer. More.`` gives ``Connection closed by peer``.
    """
    first_line = _take_first_line(error) or "no reason given"
    sentence, _, _ = re.sub(r"^\[\S+\] ", "", first_line).partition(". ")
    return sentence[:300]


def main() -> int:
    """Run as one worker, and return the exit code."""
    from imgkit_entrypoints.apps import ranks

    bench_options = read_options()
    try:
        with (
            nccl_log.collect_log(os.environ) as log_folder,
            ranks.join_group(bench_options.timeout_s) as bench_ranks,
        ):
            return Sweep(set_up(bench_options, bench_ranks), log_folder).run()
    except ImgkitError as error:
        ranks.refuse(f"dist-bench: {error}", error.exit_code)
