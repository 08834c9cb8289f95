"""Peak FLOP/s of GPUs, for the model FLOPs utilization (MFU)."""

from __future__ import annotations

import re
from collections.abc import Mapping

PEAKS: Mapping[str, float] = {
    r"\bV100-SXM2": 125e12,
    r"\bA100\b": 312e12,
    r"\bA30\b": 165e12,
    r"\bL40S\b": 362e12,
    r"\bH100 PCIe\b": 756e12,
    r"\bH100 80GB HBM3\b": 989e12,
    r"\bH200$": 989e12,
    r"\bGH200\b": 990e12,
}
"""Dense FLOP/s of 16-bit tensor cores with 32-bit sums, by the device name that CUDA reports.

Source: NVIDIA's data sheets (V100 January 2020, A100 and A30 2021, H100, L40S and GH200 2023, H200 2024; half
of the figure "with sparsity"), read in November 2026. V100 has no bf16. Variants with other clocks, such as
NVL and custom parts, are left out: no figure is better than a wrong one.
"""


def peak(device: str, amp: str) -> float | None:
    """Peak FLOP/s of `device`; None if unknown, as for 32-bit types and CPUs."""
    if amp not in ("bf16", "fp16") or ("V100" in device and amp == "bf16"):
        return None
    return next((value for pattern, value in PEAKS.items() if re.search(pattern, device)), None)
