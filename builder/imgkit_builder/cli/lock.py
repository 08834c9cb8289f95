"""``imgkit lock``: write the version, URL and SHA-256 of a recipe's packages to a file beside the recipe."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from imgkit_builder import engine as engines
from imgkit_builder.base.flags import option_field
from imgkit_builder.cli.common import (
    JSON,
    RECIPE,
    VERBOSE,
    exit_on_sigterm,
    flag_option,
    print_result,
)
from imgkit_builder.cli.progress import reporter
from imgkit_builder.cli.recipes import load_recipe
from imgkit_builder.image import secret_values
from imgkit_builder.lock import changes
from imgkit_builder.lock.resolve import (
    LockOptions,
    Resolution,
    find_kept_wheels,
    resolve_packages,
    write_lock,
)
from imgkit_builder.oci.platform import host_platform
from imgkit_builder.recipe import bases, lock_file
from imgkit_builder.workflow.build_request import BaseOptions
from imgkit_entrypoints.errors import EXIT_NO, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.recipe.model import LockedPlatform, LockRequest, Recipe


def verb_lock(
    recipe: str = RECIPE,
    packages: list[str] = typer.Argument(
        None, metavar="[PACKAGE]...", help="With --upgrade: upgrade only these packages."
    ),
    *,
    options: LockOptions,
    source: _BaseOptions,
    check: bool = flag_option(
        "--check", "Only check whether the lock fits the recipe; exit code 1 if it does not."
    ),
    dry_run: bool = flag_option("--dry-run", "Resolve, print the changes, then exit."),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Pin every package of a recipe's image: version, URL and sha256.

    The lock of mine.yaml is mine.lock next to it; a shipped recipe's lock is
    written here. imgkit build then installs exactly these files. The base's own
    pip and apt choose the versions, so the base's torch and NCCL stay. Versions
    that are already locked are kept while they fit the recipe.

    \b
    Examples:
      imgkit lock mine.yaml
      imgkit lock mine.yaml --upgrade
      imgkit lock mine.yaml --upgrade transformers accelerate
      imgkit lock mine.yaml --keep-files  (for builds without a network)
      imgkit lock mine.yaml --check
    """
    if packages and not options.upgrade:
        raise UsageError(
            f"{' '.join(packages)}: packages are for --upgrade",
            where="imgkit lock",
            hint=f"imgkit lock {recipe} --upgrade {' '.join(packages)}",
        )

    loaded_recipe = load_recipe(recipe)
    # --base current means the image.current_base of the recipe.
    source = dataclasses.replace(source, base=bases.select_base(source.base, loaded_recipe))
    if check:
        _check_lock(loaded_recipe, base=source.base, platform=source.platform, as_json=as_json)
        return

    options = dataclasses.replace(options, packages=tuple(packages or ()))
    file = lock_file.lock_path(loaded_recipe)
    with exit_on_sigterm(), reporter(as_json=as_json, verbose=verbose) as report:
        old, new = _update_lock(loaded_recipe, options, source, file, writes=not dry_run, report=report)
    _show_changes(file, old, new, dry_run=dry_run, as_json=as_json)


@dataclass(frozen=True, kw_only=True)
class _BaseOptions(BaseOptions):
    """The options about the base, and about the builder that runs the resolving steps in it."""

    builder: Literal["auto", "classic", "buildx", "podman"] = option_field(
        "auto", help="Builder that queries the base, as in imgkit build."
    )


def _update_lock(
    recipe: Recipe,
    options: LockOptions,
    source: _BaseOptions,
    file: Path,
    *,
    writes: bool,
    report: Reporter,
) -> tuple[LockedPlatform | None, LockedPlatform]:
    """Resolve the packages of the recipe in its base image, and write them to the lock `file`.

    A lock has the exact version, URL and digest of each package, for one or more platforms.

    Parameters
    ----------
    writes : whether the lock is written. If it is False, no file is changed.

    Returns
    -------
    The packages that the lock had for this platform before, or None if it had none, and the new packages.
    """
    request = _make_lock_request(recipe, source.base)
    lock = lock_file.read_lock(file) if file.exists() else None
    if writes and not os.access(file.parent, os.W_OK):
        # This is checked first, because resolving the packages takes minutes.
        raise UsageError(
            "no permission to write the lock here",
            where=str(file.parent),
            hint="copy the recipe to your own folder, or only look: --dry-run",
        )
    secrets = secret_values.read_secrets(recipe)
    secrets_at = recipe.where("image", "secrets") if secrets.options else ""
    with engines.connect() as engine, tempfile.TemporaryDirectory(prefix="imgkit-lock-") as folder:
        builder = engines.choose(engine.facts(), source.builder, secrets_at=secrets_at)
        report.stage(f"base {request.base}")
        image = engines.resolve_base(
            engine,
            recipe,
            override=source.base,
            platform=source.platform,
            pull=source.pull,
            report=report,
        )
        old = lock.for_platform(image.platform) if lock else None
        # Wheels that are stored beside the lock are reused, except in an upgrade of all packages.
        wheels = {} if options.upgrade and not options.packages else find_kept_wheels(file, old)
        resolution = Resolution(
            recipe=recipe, request=request, base=image, old_lock=old, options=options, kept_wheels=wheels
        )
        new = resolve_packages(
            engine,
            resolution,
            builder=dataclasses.replace(builder, options=secrets.options),
            values=secrets,
            folder=Path(folder),
            report=report,
        )
        is_same = changes.is_same(old, new)
        if writes and (options.keep_files or not is_same):
            # If the packages are the same, the lock is only written to store their files beside it.
            resolved = old if is_same and old else new
            write_lock(recipe, file, lock, resolved, Path(folder) if options.keep_files else None)
    return old, new


def _show_changes(
    file: Path, old: LockedPlatform | None, new: LockedPlatform, *, dry_run: bool, as_json: bool
) -> None:
    """Print the changes of the lock `file`: a line for each package, and the number of packages.

    Parameters
    ----------
    old : the packages that the lock had for this platform before, or None if it had none.
    new : the packages that it has now, or would have without ``--dry-run``.
    """
    is_same = changes.is_same(old, new)  # the time at which they were made may differ
    listed_changes = changes.list_changes(old, new)
    data = {
        "file": file,
        "platform": new.platform,
        "written": not (dry_run or is_same),
        "apt": len(new.apt),
        "pip": len(new.pip),
        "kept": [package.file for package in new.pip if package.kept],
        "changes": [dataclasses.asdict(change) for change in listed_changes],
    }
    counts = f"{len(new.apt)} apt and {len(new.pip)} pip packages for {new.platform}"
    if is_same:
        print_result(data, f"{file} is up to date: {counts}", as_json=as_json)
        return
    # Files that are stored beside the lock (kind "file") are only listed in the JSON.
    change_lines = [str(change) for change in listed_changes if change.kind != "file"]
    outcome = "not written (--dry-run)" if dry_run else "written"
    print_result(data, *change_lines, f"{file} {outcome}: {counts}", as_json=as_json)


def _make_lock_request(recipe: Recipe, base: str | None) -> LockRequest:
    """Return what the lock of `recipe` has to resolve, such as the packages of its pip steps.

    Raises
    ------
    UsageError : a file of the pip steps, such as a requirements.txt, cannot be read or parsed.
    """
    try:
        return lock_file.make_request(recipe, base=base)
    except (OSError, ValueError) as error:
        raise UsageError(str(error), where=recipe.where("image", "pip"), hint="correct the file") from error


def _check_lock(recipe: Recipe, *, base: str | None, platform: str | None, as_json: bool) -> None:
    """Print whether the lock fits the recipe. If it does not, print the reason and exit with code 1.

    A recipe without a lock does not fit, either. `base` and `platform` are the options of the verb, and None
    means those of the recipe.
    """
    file = lock_file.lock_path(recipe)
    target = engines.choose_platform(recipe, requested=platform, host=host_platform())
    data = {"file": file, "platform": target}
    try:
        lock_file.attach_lock(recipe, platform=target, base=base, required=True)
    except UsageError as error:
        reason = str(error)
        print_result({**data, "current": False, "why": reason}, *reason.split("\n"), as_json=as_json)
        raise typer.Exit(EXIT_NO) from None
    summary = f"{file} fits the recipe on {target}"
    print_result({**data, "current": True, "why": None}, summary, as_json=as_json)
