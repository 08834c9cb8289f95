"""A recipe with a lock and all its packages on this machine: it builds without a network.

Its Debian packages do in their scripts what real ones do: make a user, call ldconfig, choose an alternative,
compile Python. The versions and names are this test's own.
"""

from __future__ import annotations

import base64
import hashlib
import textwrap
import zipfile
from pathlib import Path

from labkit import output

from imgkit_builder.recipe import load, lock_file
from imgkit_builder.recipe.model import Lock, LockedBase, LockedDeb, LockedPlatform, LockedWheel

EPOCH_S = 1_750_000_000
PYTHON = (
    'NAMES = {"alpha", "beta", "gamma"}\n\n\ndef has(name):\n    return name in {"a", "b", "c", "d", "e"}\n'
)
_USER = "useradd --system --no-create-home locked-user\nldconfig\n"
_ALTERNATIVE = "update-alternatives --install /usr/bin/locked locked /usr/share/locked/one 10\n"
_COMPILE = "py3compile -p locked-python\n"


def write(folder: Path, base: str, base_id: str, *, run: str = "") -> Path:
    """Write ``mine.yaml``, its lock, the kept packages and code into `folder`; the result is the recipe."""
    (folder / "code/sub").mkdir(parents=True)
    (folder / "code/main.py").write_text(PYTHON)
    (folder / "code/run.sh").write_text("#!/bin/sh\n")
    (folder / "code/run.sh").chmod(0o755)
    (folder / "code/sub/link.py").symlink_to("../main.py")
    recipe = folder / "mine.yaml"
    recipe.write_text(
        textwrap.dedent(f"""\
            description: a recipe with a lock
            image:
              base: {base}
              platform: [linux/amd64]
              apt: [locked-user, locked-alternative, locked-python]
              pip:
                - packages: [locked-wheel, locked-other]
              copy:
                - {{source: ., target: /workspace/code}}
            """)
        + (f"  run: [{run!r}]\n" if run else "")
        + "system: {scheduler: slurm}\n"
    )
    kept = folder / "mine.lock.files"
    kept.mkdir()
    debs = (
        _deb(kept, "locked-user", {"usr/lib/locked/locked.so": "no library\n"}, _USER),
        _deb(kept, "locked-alternative", {"usr/share/locked/one": "#!/bin/sh\n"}, _ALTERNATIVE),
        _deb(kept, "locked-python", {"usr/lib/python3/dist-packages/locked_python.py": PYTHON}, _COMPILE),
    )
    loaded = load.load(str(recipe))
    part = LockedPlatform(
        platform="linux/amd64",
        source_date_epoch=EPOCH_S,
        request=lock_file.request_of(loaded),
        base=LockedBase(name=base, id=base_id),
        apt=tuple(sorted(debs, key=lambda one: one.name)),
        pip=(_wheel(kept, "locked_other", kept=True), _wheel(kept, "locked_wheel", kept=False)),
    )
    lock = Lock(recipe="mine", imgkit="0", platforms=(part,))
    lock_file.beside(loaded).write_text(lock_file.text(lock))
    return recipe


def _deb(folder: Path, name: str, files: dict[str, str], script: str) -> LockedDeb:
    root, path = folder / name, folder / f"{name}_1.0_all.deb"
    for inside, text in files.items():
        target = root / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    control = root / "DEBIAN"
    control.mkdir()
    (control / "control").write_text(
        f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: a test <test@example.org>\n"
        "Description: a test\n"
    )
    (control / "postinst").write_text(f"#!/bin/sh\nset -e\n{script}")
    (control / "postinst").chmod(0o755)
    output("dpkg-deb", "--root-owner-group", "--build", root, path)
    output("rm", "-r", root)
    data = path.read_bytes()
    return LockedDeb(
        name=name,
        version="1.0",
        architecture="all",
        file=path.name,
        url=f"http://packages.example.org/pool/{path.name}",
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
    )


def _wheel(folder: Path, package: str, *, kept: bool) -> LockedWheel:
    path = folder / f"{package}-1.0-py3-none-any.whl"
    about = f"{package}-1.0.dist-info"
    files = {
        f"{package}/__init__.py": PYTHON,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": f"[console_scripts]\n{package} = {package}:has\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        rows = []
        for name, text in files.items():
            archive.writestr(name, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            rows.append(f"{name},sha256={digest},{len(text)}\n")
        archive.writestr(f"{about}/RECORD", "".join([*rows, f"{about}/RECORD,,\n"]))
    return LockedWheel(
        step=0,
        name=package.replace("_", "-"),
        version="1.0",
        file=path.name,
        url="" if kept else f"http://wheels.example.org/{path.name}",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        kept=kept,
    )
