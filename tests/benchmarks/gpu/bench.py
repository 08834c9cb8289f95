"""What needs an NVIDIA GPU: checks and figures of one, in at most nine minutes; ci/gpu starts it.

Each part adds to one JSON file as soon as it is done. The table at the end is for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpt_110m
import torch

from imgkit_entrypoints.launch import gpu_use
from imgkit_entrypoints.run.checkpoint import find_newest
from imgkit_entrypoints.run.ranks import Ranks

HERE = Path(__file__).resolve().parent
ALL_S = 530.0
"""Time of all parts; one that might not end in time is left out, and the table says so."""
ROUNDS = {False: 3, True: 2}
"""Alternated rounds of the GPT, without and with compilation."""

Found = dict[str, Any]
PEAK_FLOPS = {"H100 80GB HBM3": 989e12, "H200": 989e12}
"""Dense FLOP/s in bf16 by the name of the device (NVIDIA's data sheets, 2023 and 2024)."""


class Failed(Exception):
    """A check's answer is no, or a command failed."""


class Bench:
    """The parts, with what they share: a folder, the device and the deadline."""

    def __init__(self, folder: Path, *, rehearse: bool) -> None:
        self.folder, self.rehearse = folder, rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.end = time.monotonic() + ALL_S
        name = "" if rehearse else torch.cuda.get_device_name(0)
        self.peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)

    def run(self, *argv: str, within_s: float = 120.0, code: int | None = 0) -> str:
        """Run a command and return its output with its errors.

        Raises
        ------
        Failed : it ended with another code than `code`, or did not end.
        """
        timeout_s = min(within_s, self.end - time.monotonic())
        if timeout_s <= 0:
            raise Failed(f"no time left for {' '.join(argv[:3])}")
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=self.folder, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise Failed(f"{' '.join(argv)} did not end in {timeout_s:.0f} s") from None
        if code is not None and process.returncode != code:
            tail = "\n".join(output.splitlines()[-15:])
            raise Failed(f"{' '.join(argv)} ended with {process.returncode}:\n{tail}")
        return output

    def dist(self, command: str, *args: str) -> tuple[str, ...]:
        """Return the words of a ``dist-*`` command of this checkout on one process."""
        start = (sys.executable, "-I", "-m", "imgkit_entrypoints", command)
        return (*start, "--device", self.device, "--nproc", "1", *args)

    def doctor(self) -> Found:
        """dist-doctor reads nvidia-smi and the kernel's files here."""
        text = self.run(sys.executable, "-I", "-m", "imgkit_entrypoints", "dist-doctor", "--json", code=None)
        answer = json.loads(text[text.index("{") :])
        return {"checks": answer}

    def bench(self) -> Found:
        """dist-bench on one GPU: what a collective costs without a network."""
        file = self.folder / "bench.json"
        largest = "1M" if self.rehearse else "1G"
        args = ("all_reduce", "--max", largest, "--seconds", "0.2", "--save", str(file))
        self.run(*self.dist("dist-bench", *args))
        return {"all_reduce": json.loads(file.read_text())}

    def resnet50(self) -> Found:
        """The built-in resnet50 in bf16."""
        steps, batch = ("4", "4") if self.rehearse else ("100", "256")
        run = self.folder / "resnet50"
        args = ("--model", "resnet50", "--amp", "bf16", "--batch-size", batch, "--steps", steps)
        self.run(*self.dist("dist-train", *args, "--log-every", steps, "--run-dir", str(run)))
        last = _metrics(run)[-1]
        return {"samples_per_s": last["samples_per_s"], "batch": int(batch)}

    def gpt(self) -> Found:
        """The GPT in bf16 under dist-train and in a bare loop, in turn; tokens/s and MFU."""
        results: Found = {}
        for compiled, rounds in ROUNDS.items():
            if compiled and self.rehearse:
                continue  # a CPU needs a C++ compiler for it
            ours, bare = [], []
            for turn in range(rounds):
                ours.append(statistics.median(self._gpt_run(f"gpt-{compiled}-{turn}", compiled)))
                bare.append(statistics.median(self._bare(compiled)))
            ratios = [rate / bare_rate for rate, bare_rate in zip(ours, bare, strict=True)]
            results["compiled" if compiled else "eager"] = {
                "tokens_per_s": ours,
                "bare_tokens_per_s": bare,
                "of_bare": statistics.median(ratios),
                "mfu": None if self.peak is None else self._mfu(statistics.median(ours)),
            }
        return results

    def _mfu(self, tokens_per_s: float) -> float:
        assert self.peak is not None
        return tokens_per_s * gpt_110m.flops_a_token() / self.peak

    def _steps(self) -> tuple[int, int]:
        return (8, 2) if self.rehearse else (120, 20)

    def _gpt_words(self, run: Path, steps: int) -> tuple[str, ...]:
        file = HERE / "gpt_110m.py"
        model = ("--model", f"{file}:model", "--data", f"{file}:data", "--batch-size", str(gpt_110m.BATCH))
        kind = ("--optimizer", "adamw", "--lr", str(gpt_110m.RATE), "--amp", "bf16")
        return (*model, *kind, "--steps", str(steps), "--run-dir", str(run))

    def _gpt_run(self, name: str, compiled: bool) -> list[float]:
        steps, every = self._steps()
        args = (*self._gpt_words(self.folder / name, steps), "--log-every", str(every), "--save-every", "0")
        self.run(*self.dist("dist-train", *args, *(("--compile",) if compiled else ())))
        shutil.rmtree(self.folder / name / "checkpoints", ignore_errors=True)
        rates = [row["samples_per_s"] * gpt_110m.CONTEXT for row in _metrics(self.folder / name)]
        return rates[2:]  # the first lines hold the warm-up

    def _bare(self, compiled: bool) -> list[float]:
        steps, every = self._steps()
        args = ("--device", self.device, *(("--compile",) if compiled else ()), str(steps), str(every))
        output = self.run(sys.executable, str(HERE / "gpt_110m.py"), *args)
        rates: list[float] = json.loads(output.splitlines()[-1])
        return rates[2:]

    def checkpoints(self) -> Found:
        """The longest wait of training for a checkpoint of the GPT and its optimizer."""
        # A second save before the first is on disk waits for it: on an H200, 20 steps take 0.9 s, a save 2 s.
        steps, every = (8, 2) if self.rehearse else (320, 80)
        run = self.folder / "checkpoints"
        self.run(*self.dist("dist-train", *self._gpt_words(run, steps), "--save-every", str(every)))
        summary = json.loads((run / "summary.json").read_text())
        return {"longest_save_stall_s": summary["longest_save_stall_s"], "saving_s": summary["saving_s"]}

    def fused(self) -> Found:
        """A trace of three steps: which kernel updates the weights."""
        run = self.folder / "fused"
        self.run(*self.dist("dist-train", *self._gpt_words(run, 8), "--profile", "4:3"))
        traces = [path.read_text(errors="replace") for path in (run / "traces").glob("*.json")]
        if not any("fused_adam" in text or "FusedAdam" in text for text in traces):
            raise Failed(f"no fused optimizer kernel in {len(traces)} traces below {run}")
        return {"fused": True}

    def resume(self) -> Found:
        """A run that is killed and started again ends with the weights of one that was not, bit for bit."""
        steps, every, batch = ("20", "5", "4") if self.rehearse else ("400", "50", "32")
        kind = ("--model", "gpt", "--amp", "bf16", "--batch-size", batch)
        model = (*kind, "--steps", steps, "--save-every", every)
        self.run(*self.dist("dist-train", *model, "--run-dir", str(self.folder / "whole")))
        run = self.folder / "killed"
        argv = self.dist("dist-train", *model, "--run-dir", str(run))
        started = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        with subprocess.Popen(argv, cwd=self.folder, **started) as process:
            self._wait_for_checkpoint(run, process)
            process.kill()
        output = self.run(*argv)
        if "resumes after step" not in output:
            raise Failed("the second start did not resume: the first one ended before it was killed")
        alone = Ranks(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
        checkpoints = (find_newest(folder, alone)[0] for folder in (self.folder / "whole", run))
        uninterrupted, resumed = (checkpoint.state("weights") for checkpoint in checkpoints)
        different = [key for key in uninterrupted if not torch.equal(uninterrupted[key], resumed[key])]
        if different or uninterrupted.keys() != resumed.keys():
            raise Failed(
                f"{len(different)} of {len(uninterrupted)} weights differ after the resume: {different[:5]}"
            )
        return {"bitwise": True, "weights": len(uninterrupted)}

    def _wait_for_checkpoint(self, run: Path, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not any(run.glob("checkpoints/step-*")):
            if time.monotonic() > self.end:
                process.kill()
                raise Failed("no checkpoint came in time")
            time.sleep(0.05)

    def gpu_use(self) -> Found:
        """A run prints how much it used its GPU; and the processor time of nvidia-smi's readings."""
        steps = 700  # about 30 s on an H200: readings at 10, 20 and 30 s
        run = self.folder / "gpu-use"
        output = self.run(*self.dist("dist-train", *self._gpt_words(run, steps), "--save-every", "0"))
        match = re.search(r"GPUs ([0-9]+) % in use on average, at most ([0-9.]+) GiB of memory", output)
        if match is None:
            raise Failed("the run printed no use of its GPU:\n" + output[-1500:])
        percent, memory_GiB = int(match[1]), float(match[2])
        if percent < 30 or memory_GiB < 1:
            raise Failed(f"a GPU that trains was {percent} % in use, with {memory_GiB} GiB of memory")
        argv = [*gpu_use.query_argv(())[:-1], "--loop=1"]
        few, few_cpu_s = _cost_of_readings(argv, 3.5)
        many, many_cpu_s = _cost_of_readings(argv, 13.5)
        reading_cpu_s = (many_cpu_s - few_cpu_s) / (many - few)
        return {
            "percent": percent,
            "memory_GiB": memory_GiB,
            "start_cpu_s": few_cpu_s - few * reading_cpu_s,
            "core_share": reading_cpu_s / 10,  # a node agent has one reading in ten seconds
        }

    def flight_recorder(self) -> Found:
        """A collective that its watchdog ends: dist-run names the recorder's files."""
        output = self.run(*self.dist("dist-run", str(HERE / "collective_hang.py")), code=None)
        if "flight recorder has written" not in output:
            raise Failed("dist-run named no files of the flight recorder:\n" + output[-1500:])
        return {"named": True}


def main() -> int:
    """Run all parts; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, to try the script")
    parser.add_argument("output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    results: Found = {"machine": _machine(options.rehearse), "parts": {}}
    with tempfile.TemporaryDirectory(prefix="imgkit-gpu-") as folder:
        bench = Bench(Path(folder), rehearse=options.rehearse)
        parts: Sequence[Callable[[], Found]] = (
            bench.doctor, bench.fused, bench.resume, bench.bench, bench.resnet50, bench.checkpoints,
            bench.gpt, *(() if options.rehearse else (bench.flight_recorder, bench.gpu_use)),
        )  # fmt: skip
        for part in parts:
            start_s, name = time.monotonic(), part.__name__
            try:
                part_results: Found = part()
            except Failed as error:
                part_results = {"failed": str(error)}
            part_results["seconds"] = round(time.monotonic() - start_s, 1)
            results["parts"][name] = part_results
            options.output.write_text(json.dumps(results, indent=2) + "\n")
            print(f"{name}: {part_results.get('failed', 'done')} ({part_results['seconds']} s)", flush=True)
    print(table(results))
    return 1 if any("failed" in part for part in results["parts"].values()) else 0


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    machine, parts = results["machine"], results["parts"]
    rows = [("measured", "figure")]
    if "samples_per_s" in (resnet := parts.get("resnet50", {})):
        rate = f"{resnet['samples_per_s']:.0f} samples/s"
        rows.append((f"resnet50, bf16, batch {resnet['batch']}", rate))
    for kind in ("eager", "compiled"):
        if kind in (gpt := parts.get("gpt", {})):
            gpt_results = gpt[kind]
            rates = f"{statistics.median(gpt_results['tokens_per_s']):.0f} tokens/s"
            mfu = "" if gpt_results["mfu"] is None else f", {gpt_results['mfu']:.1%} MFU"
            rows.append(
                (f"GPT 110M, bf16, {kind}", f"{rates}{mfu}, {gpt_results['of_bare']:.3f} of the bare loop")
            )
    if "longest_save_stall_s" in (saved := parts.get("checkpoints", {})):
        rows.append(("longest wait for a checkpoint", f"{saved['longest_save_stall_s'] * 1e3:.0f} ms"))
    if "core_share" in (use := parts.get("gpu_use", {})):
        rows.append(("reading the use of the GPU", f"{use['core_share']:.3%} of a core"))
    for name, part_results in parts.items():
        if "failed" in part_results:
            rows.append((name, f"failed: {part_results['failed'].splitlines()[0][:120]}"))
    head = f"{machine['gpu']}, torch {machine['torch']}, Python {machine['python']}, {machine['system']}"
    lines = [f"| {label} | {figure} |" for label, figure in rows]
    return "\n".join((head, "", lines[0], "|---|---|", *lines[1:]))


def _cost_of_readings(argv: Sequence[str], seconds: float) -> tuple[int, float]:
    """Return how many lines a command prints within `seconds`, and its processor time in seconds."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        time.sleep(seconds)
        process.kill()
        lines = process.stdout.read().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return len(lines), usage.ru_utime + usage.ru_stime


def _metrics(run: Path) -> list[Found]:
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "samples_per_s" in row]


def _machine(rehearse: bool) -> Found:
    return {
        "gpu": "no GPU, a rehearsal" if rehearse else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


if __name__ == "__main__":
    sys.exit(main())
