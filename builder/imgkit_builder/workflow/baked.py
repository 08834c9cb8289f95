"""The system that a .sif is for, its projects and its architecture, read from its record.

No runtime is needed. A file that imgkit did not write has no record: unsquashfs reads what is needed.
"""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import InstalledProject, Manifest
from imgkit_builder.recipe.requirements import canonical_name
from imgkit_builder.recipe.targets import Target, validate_target
from imgkit_builder.sif import image, runtime_files, sqsh, unsquash
from imgkit_builder.sif.baked_facts import BakedFactsCollector, Distribution, library_folders
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError
from imgkit_entrypoints.system import SystemFacts


def read_target(path: Path) -> Target:
    """Return the recipe's name and system inside the .sif or .sqsh `path`.

    Raises
    ------
    CheckFailed : it is damaged, or imgkit did not build its image.
    ToolMissing : another program wrote it, and there is no unsquashfs for its compression.
    UsageError : its system holds a value that no recipe may have.
    """
    facts = unsquash.baked_facts(path)
    if not facts.manifest or not facts.system:
        raise CheckFailed(
            "it does not name its system: imgkit did not build this image",
            where=str(path),
            hint=f"name the recipe: imgkit run RECIPE --image {path} ...",
        )
    platform = f"linux/{_recorded_arch(path)}"
    return target_of(manifest.from_json(facts.manifest), system.from_json(facts.system), platform, path)


def target_of(image_manifest: Manifest, facts: SystemFacts, platform: str, file: Path) -> Target:
    """Return the recipe's name and system of the image in `file`, from what imgkit wrote into or beside it.

    Raises
    ------
    UsageError : its system holds a value that no recipe may have.
    """
    return validate_target(
        Target(
            name=image_manifest.recipe,
            system=facts,
            platforms=(platform,),
            file=file,
            projects=image_manifest.projects,
            workdir=image_manifest.workdir,
            base=image_manifest.base.name,
            base_env=tuple(image_manifest.base.env),
        )
    )


def system_facts(path: Path) -> SystemFacts | None:
    """Return the system that the .sif or .sqsh `path` names, as it stands there; None if it names none.

    `read_target` checks the values as those of a recipe. That needs a compiled package, and one environment
    may serve machines of several architectures.

    Raises
    ------
    CheckFailed, ToolMissing : as of `read_target`.
    """
    text = unsquash.baked_facts(path).system
    try:
        return system.from_json(text) if text else None
    except ValueError as error:
        raise CheckFailed(f"its system cannot be read: {error}", where=str(path)) from error


def read_projects(path: Path, name: str) -> tuple[InstalledProject, ...]:
    """Return the projects that the .sif `path` has by its recipe.

    The project `name` is among them also if another command installed it. Raises as `read_target` does.
    """
    facts = unsquash.baked_facts(path)
    installed = manifest.from_json(facts.manifest).projects if facts.manifest else ()
    if any(project.name == name for project in installed):
        return installed
    distributions = _read_distributions(path) if facts.distributions is None else facts.distributions
    folders = [item.folder for item in distributions if canonical_name(item.name) == name]
    return (*installed, *(InstalledProject(name=name, folder=folder) for folder in folders))


def _read_distributions(path: Path) -> tuple[Distribution, ...]:
    """Return the Python packages of a .sif that another program wrote."""
    script = unsquash.read(path, [runtime_files.ENVIRONMENT]).get(runtime_files.ENVIRONMENT, b"")
    search_path = runtime_files.variables(script.decode(errors="replace")).get("PATH", "")
    patterns = [f"{lib}/python3*/*-packages/*.dist-info" for lib in library_folders(search_path)]
    collector = BakedFactsCollector()
    patterns.append(manifest.LOCK_TOML.lstrip("/"))
    names = [
        file.path for squashfs in unsquash.open_squashfs(path) for file in squashfs.list_files(*patterns)
    ]
    for name in names:
        collector.add_name(name)
    for name, data in unsquash.read(path, filter(collector.wants, names)).items():
        collector.add(name, data)
    return collector.facts(search_path).distributions or ()


def has_manifest(path: Path) -> bool:
    """Return whether imgkit built the image of a .sif or .sqsh; True where this machine cannot read it."""
    try:
        return bool(unsquash.baked_facts(path).manifest)
    except (CheckFailed, ToolMissing, UsageError):
        return True


_MACHINES = {0x3E: "amd64", 0xB7: "arm64", 0x15: "ppc64le", 0xF3: "riscv64"}
"""Field ``e_machine`` of an ELF program."""
_SHELLS = ("sh", "bash", "dash", "busybox")
_PROGRAMS = tuple(f"{folder}/{name}" for folder in ("usr/bin", "bin") for name in _SHELLS)


def read_arch(path: Path) -> str:
    """Return the architecture of a .sif or .sqsh, stated or that of a program; empty if it is unknown."""
    try:
        recorded = _recorded_arch(path)
        programs = {} if recorded != "unknown" else unsquash.read(path, _PROGRAMS)
    except (CheckFailed, ToolMissing, UsageError):
        return ""
    if recorded != "unknown":
        return recorded
    for data in programs.values():
        is_little = data[:4] == b"\x7fELF" and data[5:6] == b"\x01"
        if is_little and (machine := _MACHINES.get(int.from_bytes(data[18:20], "little"))):
            return machine
    return ""


def _recorded_arch(path: Path) -> str:
    """Return the architecture in the file's header or record; another program's .sqsh does not state it."""
    if image.is_sif(path):
        return image.read(path).arch
    sqsh.check_structure(path)
    record = sqsh.read_record(path)
    return record.arch if record else "unknown"
