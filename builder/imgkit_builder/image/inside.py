"""The one Python program that inspects an image from inside. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints import json_text

_MARK = "IMGKIT-SEEN "

# Even an old Python must run it, so that imgkit can report its version.
_PROGRAM = """
import json, platform, subprocess, sys
seen = {"machine": platform.machine(), "python": platform.python_version(), "torch": "", "torch_error": "",
        "cuda": "", "nccl": "", "pip_conflicts": None, "files": {}}
# pip check and the import of torch take seconds each: run both at once.
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
    """What the image's own Python reports."""

    machine: str
    """``x86_64``, ``aarch64``."""
    python: str
    torch: str
    """Empty where torch is missing, or broken (`torch_error`)."""
    torch_error: str
    cuda: str
    nccl: str
    pip_conflicts: tuple[str, ...] | None
    """Lines of ``pip check``; None where there is no pip."""
    files: Mapping[str, str]
    """Content of the requested files that exist."""


def argv(*files: str) -> list[str]:
    """The command to run inside the image; the program also reads `files`."""
    # -I: the user's site-packages and the host's PYTHONPATH must not change the result.
    return ["python3", "-I", "-c", _PROGRAM, *files]


def parse(output: str) -> Seen | None:
    """Parse the output of the program in `argv`; None where it printed no result."""
    for line in reversed(output.splitlines()):
        _, mark, text = line.partition(_MARK)
        if mark:
            try:
                data = json_text.parse(text)
                conflicts = data.pop("pip_conflicts")
                return Seen(pip_conflicts=None if conflicts is None else tuple(conflicts), **data)
            except (ValueError, KeyError, TypeError, AttributeError):
                return None
    return None
