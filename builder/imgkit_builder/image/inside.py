"""Python programs that inspect an image from inside. They need only the standard library.

The program of `probe_argv` reports everything about an image that imgkit has built. The program of
`python_probe_argv` reports what a job needs to know about any other image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from imgkit_builder.oci.manifest import MANIFEST_JSON
from imgkit_entrypoints import json_text

_T = TypeVar("_T")
_PREFIX = "IMGKIT-SEEN "
"""The beginning of the line with the result. It separates the result from the output of the image's entry
point."""

# Even an old Python must be able to run this program, so that imgkit can report its version.
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
print("PREFIX" + json.dumps(seen))
""".replace("PREFIX", _PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReport:
    """The report of the image's own Python."""

    machine: str
    """``x86_64``, ``aarch64``."""
    python: str
    torch: str
    """Empty if torch is missing or cannot be imported. In the second case, `torch_error` is the reason."""
    torch_error: str
    cuda: str
    nccl: str
    pip_conflicts: tuple[str, ...] | None
    """The lines that ``pip check`` prints. None if the image has no pip."""
    files: Mapping[str, str]
    """The content of those requested files that exist."""


def probe_argv(*files: str) -> list[str]:
    """Return the command that inspects an image that imgkit has built. Run it inside that image.

    The report also contains the content of `files`.
    """
    # With -I, the user's site-packages and the host's PYTHONPATH do not change the result.
    return ["python3", "-I", "-c", _PROGRAM, *files]


def parse_probe(output: str) -> ImageReport | None:
    """Return the report in the output of the command from `probe_argv`, or None if it printed none."""
    return _parse_result(ImageReport, _PREFIX, output)


def _parse_result(kind: type[_T], prefix: str, output: str) -> _T | None:
    """Return the last report in `output`, or None if there is none, or if the last one is damaged.

    A report is a line with `prefix`, followed by JSON with the fields of `kind`.
    """
    for line in reversed(output.splitlines()):
        # Other output may come before the report on the same line.
        _, separator, text = line.partition(prefix)
        if not separator:
            continue
        try:
            return cast("_T", json_text.build_value(kind, json_text.parse(text), "it", closed=True))
        except (ValueError, TypeError):
            return None
    return None


_PYTHON_PREFIX = "IMGKIT-PYTHON "

# The program ignores the current folder. The option -I would do the same, but Python 2 does not have it.
_PYTHON_PROGRAM = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import json, os, platform
seen = {"version": platform.python_version(), "path": sys.executable or "", "machine": platform.machine(),
        "site": "", "torch": "", "entry_points": "", "built": os.path.exists("MANIFEST")}
if sys.version_info >= (3, 8):
    import importlib.util, sysconfig
    from importlib import metadata
    kinds = ("site-packages", "dist-packages")
    folders = [path for path in sys.path if os.path.isdir(path) and os.path.basename(path) in kinds]
    purelib = sysconfig.get_paths()["purelib"]
    seen["site"] = purelib if purelib in folders else (folders or [""])[0]
    spec = importlib.util.find_spec("imgkit_entrypoints")
    if spec and spec.origin:
        seen["entry_points"] = os.path.dirname(os.path.dirname(spec.origin))
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin:
        try:
            seen["torch"] = metadata.version("torch")
        except metadata.PackageNotFoundError:
            seen["torch"] = "of unknown version"
sys.stdout.flush()
print("\\nPREFIX" + json.dumps(seen))
""".replace("PREFIX", _PYTHON_PREFIX).replace("MANIFEST", MANIFEST_JSON)

# sh -c _FIND_PYTHON sh PROGRAM [PYTHON]
_FIND_PYTHON = """\
python=${2:-$(command -v python3 || command -v python)}
if ! command -v "${python:-python3}" > /dev/null 2>&1; then echo "no program ${python:-python3}"; exit 127; fi
exec "$python" -E -s -c "$1"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonReport:
    """A Python in an image, and the packages that are installed for it."""

    version: str
    path: str
    """The absolute path of the interpreter in the image."""
    machine: str
    site: str
    """The first folder with installed packages on its search path. Empty if there is none."""
    torch: str
    """The version of torch. Empty if torch is missing."""
    entry_points: str
    """The folder that contains imgkit's entry points. Empty if they are missing."""
    built: bool
    """Whether the image has a manifest of imgkit."""


def python_probe_argv(python: str = "") -> list[str]:
    """Return the command that reports on a Python in an image. Run it inside that image.

    Parameters
    ----------
    python : the interpreter to inspect. By default, it is ``python3``, or ``python`` if that is missing.
    """
    return ["sh", "-c", _FIND_PYTHON, "sh", _PYTHON_PROGRAM, python]


def parse_python_probe(output: str) -> PythonReport | None:
    """Return the report in the output of the command from `python_probe_argv`, or None if it printed none."""
    return _parse_result(PythonReport, _PYTHON_PREFIX, output)
