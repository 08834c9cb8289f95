"""The steps of a locked build: what they install, to the byte, and where else that may be found."""

from __future__ import annotations

import hashlib
import re
import shlex
import time
from urllib.parse import urlsplit

from imgkit_builder.image.instructions import INSIDE, NEXT, ContextFile
from imgkit_builder.oci.manifest import EPOCH_LABEL, LOCK_LABEL
from imgkit_builder.recipe import lock_file, requirements
from imgkit_builder.recipe.lock import LockedDeb, LockedPlatform, LockedWheel
from imgkit_builder.recipe.model import Recipe

APT = "locked-apt"
"""The folder of the apt step's files, in the build context and below `INSIDE`."""
SCRIPT = "install-locked.sh"
PACKAGES = "packages.txt"
LOCK_TOML = "imgkit/lock.toml"
RECIPE_JSON = "imgkit/recipe.json"
"""Files of the context that say what the image is made of; the image has them in `INSIDE`."""

PIP_OPTIONS = "--require-hashes --no-deps --only-binary=:all:"

# Both services take any time, and give the archive as it was then. A package that was a few hours old when
# the lock was made is in the next snapshot.
_SNAPSHOTS = {
    "debian": "https://snapshot.debian.org/archive/debian",
    "debian-security": "https://snapshot.debian.org/archive/debian-security",
    "ubuntu": "https://snapshot.ubuntu.com/ubuntu",
    "ubuntu-ports": "https://snapshot.ubuntu.com/ubuntu",
}
_LATER_S = (0, 86400)


def labels(lock: LockedPlatform, text: str) -> dict[str, str]:
    """Labels of a locked image; `text` is that of its lock."""
    return {
        LOCK_LABEL: hashlib.sha256(text.encode()).hexdigest(),
        EPOCH_LABEL: str(lock.source_date_epoch),
    }


def apt_command(recipe: Recipe) -> str:
    """The command of the locked apt step."""
    folder = f"{INSIDE}/{APT}"
    script = shlex.join(("sh", f"{folder}/{SCRIPT}", recipe.reference, _lock(recipe)))
    parts = (script, "apt-get clean", f"rm -rf /var/lib/apt/lists/* {folder}")
    return f"{NEXT}&& ".join(parts)


def packages(recipe: Recipe) -> str:
    """The content of `PACKAGES`: a line for each package of the lock, as `SCRIPT` reads it."""
    assert recipe.lock is not None  # noqa: S101 - for the type checker: only a locked recipe has such a step
    asked = {re.split(r"[=/:]", word)[0] for word in recipe.image.apt}
    lines = []
    for deb in recipe.lock.apt:
        mark = "manual" if deb.name in asked else "auto"
        urls = " ".join((deb.url, *snapshots(deb, recipe.lock.source_date_epoch)))
        lines.append(f"{deb.sha256} {deb.file} {mark} {deb.name}:{deb.architecture} {urls}\n")
    return "".join(lines)


def snapshots(deb: LockedDeb, epoch: int) -> tuple[str, ...]:
    """Where the distribution's snapshot service has `deb`; nowhere for a package of somebody else."""
    place = re.search(r"/(debian-security|debian|ubuntu-ports|ubuntu)/(pool/.+)", urlsplit(deb.url).path)
    if place is None:
        return ()
    times = (time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(epoch + later)) for later in _LATER_S)
    return tuple(f"{_SNAPSHOTS[place[1]]}/{one}/{place[2]}" for one in times)


def wheels(recipe: Recipe, number: int) -> tuple[LockedWheel, ...]:
    """What pip step `number` (from 0) installs."""
    return tuple(one for one in recipe.lock.pip if one.step == number) if recipe.lock else ()


def kept_wheels(recipe: Recipe, number: int) -> ContextFile | None:
    """The folder of the wheels of step `number` that lie on this machine."""
    if not any(one.file in recipe.kept for one in wheels(recipe, number)):
        return None
    member = f"locked-pip-{number}"
    return ContextFile(member=f"imgkit/{member}", path=f"{INSIDE}/{member}")


def pip_options(recipe: Recipe, number: int) -> str:
    """The options of a locked pip step; one whose wheels are all kept asks no index."""
    kept = kept_wheels(recipe, number)
    if kept is None:
        return PIP_OPTIONS
    whole = all(one.file in recipe.kept for one in wheels(recipe, number))
    return f"{PIP_OPTIONS}{' --no-index' if whole else ''}{NEXT}    --find-links {kept.path}"


def pip_advice(recipe: Recipe) -> str:
    """The end of a locked pip step, which says what helps where the step fails."""
    text = (
        "imgkit: where an index no longer has a wheel of the lock: imgkit lock "
        f"{recipe.reference} --upgrade, or put the wheel into {_lock(recipe)}.files/ (imgkit lock "
        f"{recipe.reference} --keep stores all of them there)"
    )
    return f"{NEXT}|| {{ echo {shlex.quote(text)} >&2; exit 1; }}"


def _lock(recipe: Recipe) -> str:
    return f"{recipe.name}{lock_file.SUFFIX}"


def requirements_text(recipe: Recipe, number: int) -> str:
    """The requirements file of a locked pip step: the options of the recipe's own file, then the wheels."""
    own = recipe.image.pip[number].requirements
    stated = requirements.of_file(own) if own else ()
    lines = [line for line in stated if line.startswith("-")]
    for one in wheels(recipe, number):
        direct = one.direct and one.file not in recipe.kept
        what = f"{one.name} @ {one.url}" if direct else f"{one.name}=={one.version}"
        lines.append(f"{what} --hash=sha256:{one.sha256}")
    return "".join(f"{line}\n" for line in lines)
