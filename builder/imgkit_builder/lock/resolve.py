"""Find the versions of a recipe's packages in its base image, and write them to a lock file.

An image is built for this. Its build steps run imgkit's program (``inside.py``) instead of apt and pip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import json
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder import engine as engines
from imgkit_builder.base import files
from imgkit_builder.base.flags import option_field
from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine import image_source, images
from imgkit_builder.engine.builders import ChosenBuilder
from imgkit_builder.engine.connection import Engine
from imgkit_builder.image import context, install, members, render, secret_values, uv_export
from imgkit_builder.image.context import BuildContext
from imgkit_builder.image.instructions import INSIDE, NEXT, Layers
from imgkit_builder.image.members import TarMember
from imgkit_builder.image.secret_values import SecretValues
from imgkit_builder.lock import answers
from imgkit_builder.oci.manifest import BaseImage, Manifest, now_s
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import (
    UV_STEP,
    Lock,
    LockedBase,
    LockedPlatform,
    LockedWheel,
    LockRequest,
    Recipe,
)
from imgkit_builder.recipe.requirements import canonical_name
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError
from imgkit_entrypoints.files import replace_named_file

FOLDER = f"{INSIDE}/lock"
"""The folder in the base for imgkit's program, its settings and its answers."""
OUT = f"{FOLDER}/out"
_CONTEXT_FOLDER = "imgkit/lock"
_PROGRAM = "inside.py"
_PACKAGE_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+~%:_!-]*\.(deb|whl)")
_ANSWER_FILE = re.compile(r"(apt|failed)\.txt|pip-(uv|\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LockOptions:
    """How to lock, besides what the recipe states: options of ``imgkit lock``."""

    keep_files: bool = option_field(
        False, help="Also store every file next to the lock, and build missing wheels."
    )
    upgrade: bool = option_field(False, help="Upgrade packages to the newest versions that fit.")
    packages: tuple[str, ...] = ()
    """The only packages that `upgrade` is about; empty for all."""

    def keeps_version(self, name: str) -> bool:
        """Return whether the locked package `name` should keep its version, if that still fits."""
        if not self.upgrade:
            return True
        if not self.packages:
            return False
        return canonical_name(name) not in {canonical_name(package) for package in self.packages}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A recipe whose packages are to be resolved on a base, with everything that decides about the result."""

    recipe: Recipe
    request: LockRequest
    base: BaseImage
    old_lock: LockedPlatform | None = None
    """The existing lock. Its versions are kept unless `options` upgrades them."""
    options: LockOptions = LockOptions()
    kept_wheels: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    """The wheels that were built and stored for `old_lock`, by file name."""


def resolve_packages(
    engine: Engine,
    resolution: Resolution,
    *,
    builder: ChosenBuilder,
    values: SecretValues,
    folder: Path,
    report: Reporter,
) -> LockedPlatform:
    """Find the versions that apt and pip would install for a recipe, and return them as a lock.

    An image is built for this, in which a program of imgkit runs in place of apt and pip. It writes down what
    they would install.

    Parameters
    ----------
    values : the values of build secrets, which must not appear in logs.
    folder : an existing folder that receives the answers of the program. If the lock stores packages, it
        receives them as well.

    Raises
    ------
    UsageError : pip or apt finds no solution, or a package has no wheel. The error names the recipe's line.
    ToolFailed : a wheel cannot be built, or the network, the engine or a program fails.
    """
    request = resolution.request
    context = pack_request(resolution)
    secret_values.refuse_secrets_in(context, values)
    log = ""
    if request.apt or request.uv or request.pip:
        # The tag is random because locks of several recipes may be made at the same time.
        tag = f"imgkit-lock:{secrets.token_hex(6)}"
        try:
            # The build cache is not used, because the package indexes may have changed since the last build.
            built = engines.build(
                engine, context, tag=tag, report=report, builder=builder, no_cache=True, mask=values.mask
            )
            log = str(built.log)
            report.stage("read the answers")
            image_source.store_files(
                engine,
                built.image.ref,
                OUT,
                folder,
                is_wanted=_is_answer,
                platform=resolution.base.platform,
            )
        finally:
            # If the build failed because of the engine, the removal fails as well. Its error must not hide
            # the first one.
            with contextlib.suppress(ImgkitError):
                images.remove_image(engine, tag)
    try:
        return _read_answers(folder, resolution, values.mask)
    except answers.Unresolved as error:
        raise answers.explain_failure(resolution.recipe, error, log=log) from error
    except (OSError, ValueError) as error:
        fault = "is missing" if isinstance(error, OSError) else "cannot be read"
        raise ToolFailed(f"an answer of the base {fault}: {error}", hint=f"full log: {log}") from error


def _is_answer(name: str) -> bool:
    """Return whether a file in the folder `OUT` of the base is a package or an answer of imgkit's program.

    Steps of a recipe could write other files there. Such files are not read.
    """
    return bool(_PACKAGE_FILE.fullmatch(name) or _ANSWER_FILE.fullmatch(name))


def _read_answers(folder: Path, resolution: Resolution, mask: Callable[[str], str]) -> LockedPlatform:
    """Return the lock of one platform. It is read from the answers of imgkit's program in `folder`.

    `mask` hides the values of build secrets in the output of a failed program.

    Raises
    ------
    Unresolved : a step failed, or its packages cannot be locked.
    OSError, ValueError : an answer is missing or cannot be parsed.
    """
    request = resolution.request
    base = resolution.base
    # This file is the only sign of a failure, because the build succeeds in any case.
    failed = folder / "failed.txt"
    if failed.exists():
        raise answers.read_failure(mask(files.read_text(failed, errors="replace")))
    apt_output = ""
    if request.apt:
        apt_output = files.read_text(folder / "apt.txt", errors="replace")
    # Stored wheels of the old lock come first, so a wheel that was built now replaces one of the same name.
    file_digests = _hash_packages([*resolution.kept_wheels.values(), *sorted(folder.iterdir())])
    wheels: list[LockedWheel] = []
    for step_number in install.pip_step_numbers(resolution.recipe):
        answer = files.read_bytes(folder / f"pip-{install.step_name(step_number)}.json")
        wheels += answers.read_wheels(answer, step_number, file_digests)
    return LockedPlatform(
        platform=base.platform,
        source_date_epoch=now_s(),
        request=request,
        # ``repo@sha256:...`` -> ``sha256:...``. Empty if the base was never in a registry.
        base=LockedBase(name=request.base, digest=base.digest.partition("@")[2], id=base.id),
        apt=answers.read_debs(apt_output),
        pip=tuple(wheels),
    )


def _hash_packages(paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 digest of each package in `paths`, by file name. Other files are skipped."""
    digests = {}
    for path in paths:
        if _PACKAGE_FILE.fullmatch(path.name):
            with files.open_regular(path) as stream:
                digests[path.name] = files.sha256(stream, 0, path.stat().st_size)
    return digests


def pack_request(resolution: Resolution) -> BuildContext:
    """Return the build context of the image that finds the versions for a lock.

    The image has the same build steps as the recipe's image, but with imgkit's program in place of apt and
    pip. The program leaves its answers in the folder `OUT` of the image.

    Raises
    ------
    UsageError : a value of the recipe does not fit on one line, or a file cannot be read.
    """
    recipe = resolution.recipe
    base = resolution.base
    layers = render.build_layers(recipe, base=base.name, platform=base.platform, base_user=base.user)
    layers = _replace_installers(layers, recipe)
    own_files = list(_list_own_files(resolution))
    manifest = Manifest(
        imgkit=__version__,
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        base=base,
        platform=base.platform,
        wheel_sha256="",
    )
    dockerfile = render.render_resolver(layers, folder=FOLDER)
    return context.seal_context(own_files, dockerfile, manifest, code=context.pack_early_code(recipe))


def _replace_installers(layers: Layers, recipe: Recipe) -> Layers:
    """Return `layers` with imgkit's program in place of apt and pip. It gets the same arguments."""
    # `inside.py` expects the name of the step as its first argument.
    program = f"python3 {FOLDER}/{_PROGRAM}"
    apt = f"{program} apt"
    for package in recipe.image.apt:
        apt += f"{NEXT}    {shlex.quote(package)}"  # each package on a line of its own
    apt_steps = tuple(dataclasses.replace(step, command=apt) for step in layers.apt)
    pip_steps = []
    for step_number in install.pip_step_numbers(recipe):
        pip = f"{program} {install.step_name(step_number)}"
        pip_steps.append(install.pip_step(recipe, step_number, pip=pip))
    return dataclasses.replace(layers, apt=apt_steps, pip=tuple(pip_steps))


def _list_own_files(resolution: Resolution) -> Iterator[TarMember]:
    """Yield imgkit's files for the build context, such as its program and kept wheels."""
    program_data = importlib.resources.files(__package__).joinpath(_PROGRAM).read_bytes()
    settings = json.dumps(_make_settings(resolution)).encode()
    yield from context.list_package_files(resolution.recipe)
    yield members.empty_folder(_CONTEXT_FOLDER)
    yield members.memory_file(f"{_CONTEXT_FOLDER}/settings.json", settings)
    yield members.memory_file(f"{_CONTEXT_FOLDER}/{_PROGRAM}", program_data)
    if resolution.kept_wheels:
        yield members.empty_folder(f"{_CONTEXT_FOLDER}/kept")
    for name, file in resolution.kept_wheels.items():
        # A wheel can have gigabytes. It is added by its path, so that it is read only while it is sent.
        size_bytes = file.stat().st_size
        yield TarMember(name=f"{_CONTEXT_FOLDER}/kept/{name}", size_bytes=size_bytes, source=file)


def _make_settings(resolution: Resolution) -> dict[str, object]:
    """Return the content of ``settings.json``, which tells the program ``inside.py`` what to do.

    For example, ``{"keep_files": false, "debs": [["git", "1:2.39"]], "steps": {"0": {"options": [], "pins":
    {"numpy": "1.26.4"}}}}``. Debs and pins are versions of the old lock, which are kept if they still fit.
    """
    recipe = resolution.recipe
    options = resolution.options
    debs: list[tuple[str, str]] = []
    wheels: list[LockedWheel] = []
    # Packages that the user wants to upgrade get no pin.
    if resolution.old_lock:
        debs = [(deb.name, deb.version) for deb in resolution.old_lock.apt if options.keeps_version(deb.name)]
        wheels = [wheel for wheel in resolution.old_lock.pip if options.keeps_version(wheel.name)]
    steps = {}
    for step_number in install.pip_step_numbers(recipe):
        steps[install.step_name(step_number)] = _make_step_settings(recipe, step_number, wheels)
    return {"keep_files": options.keep_files, "debs": debs, "steps": steps}


def _make_step_settings(
    recipe: Recipe, step_number: int, pinned_wheels: Iterable[LockedWheel]
) -> dict[str, object]:
    """Return the settings of a pip step: the options of pip, and the version of the old lock by package.

    `pinned_wheels` are the wheels of the old lock whose versions are kept, for all steps.
    """
    if step_number == UV_STEP:
        # This step has no pins, because its versions are those of uv.lock.
        return {"options": uv_export.index_options(recipe), "pins": {}}
    pins = {}
    for wheel in pinned_wheels:
        # Each step has its own pins, because two steps may install two versions of the same package.
        if wheel.step == step_number:
            pins[canonical_name(wheel.name)] = wheel.version
    return {"options": lock_file.collect_pip_options(recipe.image.pip[step_number]), "pins": pins}


def find_kept_wheels(lock_path: Path, locked: LockedPlatform | None) -> dict[str, Path]:
    """Return the paths of the kept wheels of a lock, by file name.

    No index has these wheels. They were built when the lock was made, and are kept in a folder beside the
    lock file. `locked` is the lock of one platform. If it is None, there is no lock and the result is empty.

    Raises
    ------
    UsageError : a wheel is missing.
    """
    if locked is None:
        return {}
    folder = lock_file.kept_folder(lock_path)
    kept_paths = {wheel.file: folder / wheel.file for wheel in locked.pip if wheel.kept}
    for name, path in kept_paths.items():
        if not path.is_file():
            raise UsageError(
                f"the kept wheel {name} is missing",
                where=str(path),
                hint="restore the folder, or build it again: imgkit lock RECIPE --keep-files --upgrade",
            )
    return kept_paths


def write_lock(
    recipe: Recipe, file: Path, old: Lock | None, locked: LockedPlatform, new_files: Path | None
) -> None:
    """Write the new lock of a recipe to `file`, and store its packages in a folder next to it.

    New packages are written before the lock. Packages that only the old lock names are removed after it. So a
    lock never names a missing file, even if this process is killed. The packages of other platforms stay.

    Parameters
    ----------
    old : the existing lock, which keeps its packages for other platforms. None if there is none.
    locked : the new packages for one platform.
    new_files : the folder with the files of these packages. None if no packages are stored.

    Raises
    ------
    OSError, UsageError : a file cannot be written, or the new lock would be refused when it is read. The old
        lock is unchanged.
    """
    old = old or Lock(recipe=recipe.name, imgkit=__version__, platforms=())
    new = Lock(recipe=recipe.name, imgkit=__version__, platforms=old.with_platform(locked).platforms)
    content = lock_file.render_lock(new)
    # Names, versions and URLs come from the base image, which may be wrong. So the new lock is parsed like
    # any other one before it is written.
    lock_file.parse_lock(content, file)
    folder = lock_file.kept_folder(file)
    if new_files is not None:
        _store_packages(locked, new_files, folder)
    hint = "choose a folder that this user may write to"
    with replace_named_file(file, failed="the lock cannot be written", hint=hint) as stream:
        stream.write(content.encode())
    for name in _list_file_names(old) - _list_file_names(new):
        (folder / name).unlink(missing_ok=True)


def _store_packages(locked: LockedPlatform, new_files: Path, folder: Path) -> None:
    """Copy the package files of `locked` from `new_files` to `folder`. Skip files that are not there.

    A wheel that was stored with the old lock may be in `folder` already.
    """
    folder.mkdir(exist_ok=True)
    for name in sorted(locked.digests):
        source = new_files / name
        if source.is_file():
            with files.open_regular(source) as package, files.replace_file(folder / name) as stream:
                shutil.copyfileobj(package, stream)


def _list_file_names(lock: Lock) -> set[str]:
    """Return the names of all package files in a lock, for all platforms."""
    file_names: set[str] = set()
    for locked in lock.platforms:
        file_names |= locked.digests.keys()
    return file_names
