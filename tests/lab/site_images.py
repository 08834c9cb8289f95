"""Images of a site that imgkit did not build: three places of a Python, one root file system after the other.

The runtimes see what a site's own .sif is for imgkit: no record, no manifest, no entry points.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import small_sif
from labkit import output

SYSTEM = "usr/local/lib/python3.11/dist-packages"
VENV = "opt/site/venv"
PREFIX = "opt/conda"
QUICK = ("-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet", "-noappend")
"""Options of mksquashfs that compress nothing."""
ACTIVATE = f"""
# Like conda's: source activate NAME
if [ "$1" != main ]; then echo "no environment named '$1'" >&2; return 1; fi
PATH=/{PREFIX}/envs/main/bin:$PATH
"""


def write(standin: str, folder: Path) -> Iterator[Path]:
    """Yield the .sif files ``debian``, ``venv`` and ``conda``; each is written when it is asked for.

    Next to each lies a .sqsh with the same files. `debian` has torch in the system's Python, `venv` in a
    virtual environment outside PATH. In `conda` no Python is on PATH; ``$WITH_CONDA`` activates one.
    """
    squash = f'mksquashfs - "$2" -tar {" ".join(QUICK)}'
    yield _sif(folder / "debian.sif", lambda part: _export(standin, squash, part))
    root = folder / "root"
    root.mkdir()
    try:
        _export(standin, 'tar -x -C "$2"', root)
        for name, change in (("venv", _venv), ("conda", _conda)):
            change(root)
            yield _sif(folder / f"{name}.sif", lambda part: output("mksquashfs", root, part, *QUICK))
    finally:
        shutil.rmtree(root)


def _export(standin: str, receive: str, target: Path) -> None:
    container = output("docker", "create", standin, "true").strip()
    try:
        output("bash", "-o", "pipefail", "-c", f'docker export "$1" | {receive}', "bash", container, target)
    finally:
        output("docker", "rm", container)


def _venv(root: Path) -> None:
    output("chroot", root, "python3", "-m", "venv", "--without-pip", f"/{VENV}")
    packages = root / VENV / "lib/python3.11/site-packages"
    packages.rmdir()
    (root / SYSTEM).rename(packages)


def _conda(root: Path) -> None:
    """Move the virtual environment of `_venv`, and leave no ``python3`` on PATH."""
    conda_env = root / PREFIX / "envs/main"
    conda_env.parent.mkdir(parents=True)
    (root / VENV).rename(conda_env)
    (conda_env / "bin/python3").unlink()
    (conda_env / "bin/python3").symlink_to("/usr/bin/python3.11")
    (root / PREFIX / "bin").mkdir()
    (root / PREFIX / "bin/activate").write_text(ACTIVATE)
    for program in ("python", "python3"):
        (root / "usr/bin" / program).unlink()
    environment = root / ".singularity.d/env/90-environment.sh"
    environment.parent.mkdir(parents=True)
    environment.write_text(f'export WITH_CONDA="true && source /{PREFIX}/bin/activate main"\n')


def _sif(target: Path, squash: Callable[[Path], object]) -> Path:
    """The .sif with what `squash` writes to the path that it gets; that stays as a .sqsh."""
    part = target.with_suffix(".sqsh")
    squash(part)
    small_sif.write(target, part, recorded=False)
    return target
