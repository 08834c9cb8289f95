"""Read the system, the projects and the architecture of the image in a .sif or .sqsh.

No container runtime is needed, because imgkit writes these facts into a record in the file. A file of another
program has no such record. In that case, unsquashfs reads the facts from the image itself.
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
    """Return the recipe and system that are stored in the image of the .sif or .sqsh `path`.

    Raises
    ------
    CheckFailed : the file is damaged, or imgkit did not build its image.
    ToolMissing : another program wrote the file, and there is no unsquashfs for its compression.
    UsageError : the system in the image has a value that is not allowed in a recipe.
    """
    baked_files = unsquash.baked_facts(path)
    if not baked_files.manifest or not baked_files.system:
        raise CheckFailed(
            "it does not name its system: imgkit did not build this image",
            where=str(path),
            hint=f"name the recipe: imgkit run RECIPE --image {path} ...",
        )
    image_manifest = manifest.from_json(baked_files.manifest)
    image_system = system.from_json(baked_files.system)
    return target_of(image_manifest, image_system, f"linux/{recorded_arch(path)}", path)


def target_of(image_manifest: Manifest, image_system: SystemFacts, platform: str, file: Path) -> Target:
    """Return the recipe of an image as a `Target`: its name, system, projects and base image.

    Parameters
    ----------
    image_manifest, image_system : what imgkit stored about the image, in it or beside it.
    platform : the platform of the image, such as ``linux/amd64``.
    file : the file that holds the image.

    Raises
    ------
    UsageError : the system has a value that is not allowed in a recipe.
    """
    return validate_target(
        Target(
            name=image_manifest.recipe,
            system=image_system,
            platforms=(platform,),
            file=file,
            projects=image_manifest.projects,
            workdir=image_manifest.workdir,
            base=image_manifest.base.name,
            base_env=tuple(image_manifest.base.env),
        )
    )


def system_facts(path: Path) -> SystemFacts | None:
    """Return the system that is stored in the image of the .sif or .sqsh `path`, or None if there is none.

    Unlike `read_target`, this does not apply the rules of recipes to the values. That needs a compiled
    package (pydantic), which may be missing if machines of several architectures share one Python
    environment.

    Raises
    ------
    CheckFailed : the file is damaged, or the system cannot be parsed.
    ToolMissing : another program wrote the file, and there is no unsquashfs for its compression.
    """
    system_json = unsquash.baked_facts(path).system
    if not system_json:
        return None
    try:
        return system.from_json(system_json)
    except ValueError as error:
        raise CheckFailed(f"its system cannot be read: {error}", where=str(path)) from error


def read_projects(path: Path, name: str) -> tuple[InstalledProject, ...]:
    """Return the user's Python projects that are installed in the .sif `path`.

    These are the projects that the recipe's pip steps install. The project `name` may have been installed in
    another way, for example by a command of the recipe. If so, it is found among the packages of the image,
    and added. `name` is canonical, such as ``my-project``. If it is empty, nothing is added.

    Raises
    ------
    CheckFailed : the file is damaged.
    ToolMissing : another program wrote the file, and there is no unsquashfs for its compression.
    UsageError : the manifest in the image cannot be parsed.
    """
    baked_files = unsquash.baked_facts(path)  # what imgkit recorded about files in the image
    projects: list[InstalledProject] = []
    if baked_files.manifest:
        projects += manifest.from_json(baked_files.manifest).projects
    is_from_pip_step = any(project.name == name for project in projects)
    if not name or is_from_pip_step:
        return tuple(projects)
    distributions = baked_files.distributions
    if distributions is None:  # another program wrote the file
        distributions = _read_distributions(path)
    for distribution in distributions:
        if canonical_name(distribution.name) == name:
            projects.append(InstalledProject(name=name, folder=distribution.folder))
    return tuple(projects)


def _read_distributions(path: Path) -> tuple[Distribution, ...]:
    """Return the Python packages in a .sif of another program, which has no record that lists them.

    The list is made from the metadata of the packages (``*.dist-info``) in the image.
    """
    search_path = _read_search_path(path)
    metadata_patterns = [
        f"{folder}/python3*/*-packages/*.dist-info" for folder in library_folders(search_path)
    ]
    # If the image was built from a lock, the collector lists only the packages that are not in the lock. It
    # sees that from the name of the lock's file.
    lock_pattern = manifest.LOCK_TOML.lstrip("/")
    collector = BakedFactsCollector()
    # unsquashfs runs twice: the first run lists all names, and the second one reads the relevant files.
    relevant_paths = []
    for squashfs in unsquash.open_squashfs(path):
        for file in squashfs.list_files(lock_pattern, *metadata_patterns):
            collector.add_name(file.path)
            if collector.is_relevant(file.path):
                relevant_paths.append(file.path)
    for name, data in unsquash.read(path, relevant_paths).items():
        collector.add(name, data)
    return collector.facts(search_path).distributions or ()


def _read_search_path(path: Path) -> str:
    """Return the variable PATH of the image in the .sif `path`.

    It decides which Python of the image is used.
    """
    # The runtime that made the .sif wrote the image's environment variables into this script.
    script = unsquash.read(path, [runtime_files.ENVIRONMENT]).get(runtime_files.ENVIRONMENT, b"")
    return runtime_files.variables(script.decode(errors="replace")).get("PATH", "")


def has_manifest(path: Path) -> bool:
    """Return whether imgkit built the image in a .sif or .sqsh, or True if the file cannot be read here."""
    try:
        return bool(unsquash.baked_facts(path).manifest)
    except (CheckFailed, ToolMissing, UsageError):
        return True


_ARCH_BY_MACHINE_NUMBER = {0x3E: "amd64", 0xB7: "arm64", 0x15: "ppc64le", 0xF3: "riscv64"}
"""The architecture for each value of the field ``e_machine`` in the header of an ELF program."""
# Nearly every image has one of these shells. The header of the program tells the architecture of the image.
_SHELLS = ("sh", "bash", "dash", "busybox")
_SHELL_PATHS = tuple(f"{folder}/{name}" for folder in ("usr/bin", "bin") for name in _SHELLS)


def read_arch(path: Path) -> str:
    """Return the architecture of a .sif or .sqsh, such as ``arm64``, or "" if it is unknown.

    If the file does not record its architecture, the result is taken from the header of a shell in the image.
    A file that cannot be read here has an unknown architecture, and no error is raised.
    """
    try:
        arch_in_record = recorded_arch(path)
        if arch_in_record != "unknown":
            return arch_in_record
        shell_programs = unsquash.read(path, _SHELL_PATHS)
    except (CheckFailed, ToolMissing, UsageError):
        return ""
    # Some of these programs may be links or scripts, which have no such header.
    for shell_program in shell_programs.values():
        arch = _parse_elf_arch(shell_program)
        if arch:
            return arch
    return ""


def _parse_elf_arch(program: bytes) -> str:
    """Return the architecture in the header of an ELF program, such as ``arm64``.

    The result is "" if the file is no such program, or if its architecture is unknown to imgkit.
    """
    # Byte 5 is 1 if the numbers of the header are little-endian. Bytes 18 and 19 are the machine number.
    if program[:4] != b"\x7fELF" or program[5:6] != b"\x01":
        return ""
    machine = int.from_bytes(program[18:20], "little")
    return _ARCH_BY_MACHINE_NUMBER.get(machine, "")


def recorded_arch(path: Path) -> str:
    """Return the architecture that the file records, or ``unknown``.

    A .sqsh of another program does not record it.
    """
    if image.is_sif(path):
        return image.read(path).arch
    sqsh.check_structure(path)
    record = sqsh.read_record(path)
    if record is None:
        return "unknown"
    return record.arch
