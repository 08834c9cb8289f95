"""Build an image of the size of NVIDIA's out of wheels with CUDA, for benchmarks of conversions and
transfers.

    python tests/benchmarks/image/large_image.py TAG [--add PACKAGE ...] [--line TEXT]

It is the small stand-in with torch for CUDA, transformers and pandas: about 6.5 GB. The packages are
installed once into build/large-image, with the Python that runs this script, which must be of the stand-in's
version (3.11). ``--add`` puts further packages into a layer of their own, ``--line`` a line into a file of
the last layer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build/large-image"
BASE = "imgkit.local/standin:24.03-notorch"
PACKAGES = ("torch==2.14.1", "torchvision==0.29.1", "transformers", "pandas")
SITE = "/usr/local/lib/python3.11/dist-packages"


def install(folder: Path, packages: tuple[str, ...]) -> None:
    """Install packages into `folder`, once."""
    if folder.exists():
        return
    temporary = folder.with_suffix(".new")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", temporary, *packages], check=True
    )
    temporary.rename(folder)


def main() -> None:
    """Build the image and tag it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tag")
    parser.add_argument("--add", nargs="*", default=[], metavar="PACKAGE")
    parser.add_argument("--line", default="")
    options = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"this is Python {sys.version.split()[0]}, and the stand-in has 3.11")
    FOLDER.mkdir(parents=True, exist_ok=True)
    install(FOLDER / "site", PACKAGES)
    steps = [f"FROM {BASE}", f"COPY site {SITE}"]
    ignored = ["*", "!site"]
    if options.add:
        name = "-".join(options.add)
        install(FOLDER / name, ("--no-deps", *options.add))
        steps.append(f"COPY {name} {SITE}")
        ignored.append(f"!{name}")
    (FOLDER / "edited.py").write_text(f"# {options.line}\n")
    steps.append("COPY edited.py /workspace/edited.py")
    ignored.append("!edited.py")
    (FOLDER / ".dockerignore").write_text("\n".join(ignored) + "\n")
    (FOLDER / "Dockerfile").write_text("\n".join(steps) + "\n")
    subprocess.run(["docker", "build", "--quiet", "--tag", options.tag, FOLDER], check=True)


if __name__ == "__main__":
    main()
