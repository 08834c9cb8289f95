"""What is looked at from inside an image: one Python program, started once. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

_MARK = "IMGKIT-SEEN "

# Old Python must be able to run it too, to be told that it is too old.
_PROGRAM = """
import json, platform, subprocess, sys
seen = {"machine": platform.machine(), "python": platform.python_version(), "torch": "", "torch_error": "",
        "cuda": "", "nccl": "", "pip_conflicts": None, "files": {}}
# pip check and the import of torch take seconds each: side by side.
pip = subprocess.Popen([sys.executable, "-I", "-m", "pip", "check"], stdout=subprocess.PIPE,
                       stderr=subprocess.DEVNULL, universal_newlines=True)
try:
    import torch
    seen["torch"], seen["cuda"] = str(torch.__version__), str(torch.version.cuda or "")
    if seen["cuda"]:
        nccl = torch.cuda.nccl.version()
        seen["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
except ImportError as error:
    seen["torch_error"] = "" if getattr(error, "name", "") == "torch" else repr(error)
except Exception as error:
    seen["torch_error"] = repr(error)
out = pip.communicate()[0]
lines = [line.strip() for line in out.splitlines() if line.strip()]
if pip.returncode == 0:
    seen["pip_conflicts"] = []
elif lines:
    seen["pip_conflicts"] = sorted(lines)
for path in sys.argv[1:]:
    try:
        with open(path, encoding="utf-8") as stream:
            seen["files"][path] = stream.read()
    except (OSError, UnicodeDecodeError):
        pass
print("MARK" + json.dumps(seen))
""".replace("MARK", _MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An image as its own Python sees it."""

    machine: str
    """``x86_64``, ``aarch64``."""
    python: str
    torch: str
    """Empty where torch is absent, or present and broken (`torch_error`)."""
    torch_error: str
    cuda: str
    nccl: str
    pip_conflicts: tuple[str, ...] | None
    """Lines of ``pip check``; None without pip."""
    files: Mapping[str, str]
    """Text of the files that were asked for and are there."""


def argv(*files: str) -> list[str]:
    """What to start inside the image; it also reads `files`."""
    # -I: neither the user's site-packages nor PYTHONPATH of the host may change what is seen.
    return ["python3", "-I", "-c", _PROGRAM, *files]


def parse(output: str) -> Seen | None:
    """What the program of `argv` printed; None where it did not get that far."""
    for line in reversed(output.splitlines()):
        _, mark, text = line.partition(_MARK)
        if mark:
            try:
                data = json.loads(text)
                conflicts = data.pop("pip_conflicts")
                return Seen(pip_conflicts=None if conflicts is None else tuple(conflicts), **data)
            except (ValueError, KeyError, TypeError):
                return None
    return None
