"""Check whether this machine and its container engine can build, save and convert images.

The checks run on a laptop, in a CI pipeline and on the login node of a cluster. The engine's SDK is only
imported if there is an engine to ask.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from imgkit_builder.apptainer import rights
from imgkit_builder.apptainer.rights import KernelSetting
from imgkit_builder.base.checks import Check, Verdict, passed
from imgkit_builder.base.sizes import size_text
from imgkit_builder.engine import address, builders, connection
from imgkit_builder.engine.connection import EngineFacts
from imgkit_builder.oci.platform import emulator_problem, host_arch
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif import convert, mksquashfs, runtime, squash
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_builder.sif.workspace import PACKED_SHARE, tmp_base
from imgkit_entrypoints.errors import ImgkitError, ToolMissing, UsageError

Purpose = Literal["any", "build", "sif"]

_NVIDIA_IMAGE_BYTES = 20 * 10**9
"""20 GB, the rough size of NVIDIA's PyTorch images, uncompressed."""
_SIF_SPACE_BYTES = int(PACKED_SHARE * _NVIDIA_IMAGE_BYTES)
"""The disk space for a .sif of such an image."""
_BUILD_SPACE_BYTES = 2 * _NVIDIA_IMAGE_BYTES
"""The disk space to build such an image. The second half is for its archive or the next image's layers."""

_APPARMOR = KernelSetting("proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "0")
"""Ubuntu's setting for user namespaces. Runtimes in its packages have a profile that exempts them from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine to check. Tests replace its root folder, user or architecture."""

    root: Path = Path("/")
    uid: int = field(default_factory=os.getuid)
    arch: str = field(default_factory=host_arch)


def check_machine(
    target: Target | None = None, *, purpose: Purpose = "any", machine: Machine | None = None
) -> tuple[Check, ...]:
    """Check this machine. This takes at most about a second, and changes nothing.

    Parameters
    ----------
    target : a recipe. If it is given, its module, runtime and platform are checked, too.
    purpose : what the machine is for: ``build`` images, convert them to a ``sif``, or ``any`` of the two. A
        problem is a failure only if it prevents `purpose`. Otherwise it is a warning.
    machine : replaces this machine in tests.
    """
    machine = machine or Machine()
    engine = _check_engine()
    tool, tool_check = _check_runtime(target)
    writer = _check_sif_writer(tool, tool_check.verdict)
    # A missing runtime is only a warning if imgkit can write a .sif without a runtime.
    checks = [tool_check if writer.verdict == "fail" else _as_warning(tool_check)]
    can_build_sif = False
    # What a runtime needs of the kernel is checked only if there is a runtime. A missing runtime has been
    # reported already.
    if tool is not None:
        build_rights = _check_build_rights(machine)
        can_build_sif = build_rights.verdict == "ok"
        checks += (*_check_kernel(machine, tool), build_rights)
    checks += (writer, _check_zstd(), *_check_disks(machine, purpose))
    can_build = engine.verdict != "fail"
    can_convert = passed(checks)
    # For the purpose "any", one of the two ways is enough: a failure of one is a warning if the other works.
    needs_sif = purpose == "sif" or (purpose == "any" and not can_build)
    needs_engine = purpose == "build" or (purpose == "any" and not can_convert)
    if not needs_sif:
        checks = [_as_warning(check) for check in checks]
    if not needs_engine:
        engine = _as_warning(engine)
    elif purpose == "build" and not can_build and can_build_sif:
        engine = _suggest_apptainer(engine)
    python = Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    return (python, engine, *_check_emulation(machine, target), *checks)


def _suggest_apptainer(engine: Check) -> Check:
    """Return the failed check of the engine as a warning, because the runtime can build images as well."""
    hint = f"imgkit build RECIPE --with apptainer needs no engine; {engine.hint}"
    return dataclasses.replace(engine, verdict="warn", hint=hint)


def _as_warning(check: Check) -> Check:
    """Return `check`, with the verdict "warn" if it was "fail"."""
    if check.verdict != "fail":
        return check
    return dataclasses.replace(check, verdict="warn")


def _check_engine() -> Check:
    """Check the container engine that imgkit would use, its builders, and its disk space for images.

    An engine that does not answer fails the check. With little disk space, the check warns.
    """
    try:
        facts = connection.query_facts(address.find_endpoint())
    except ImgkitError as error:
        description = f"{error.where}: {error.what}" if error.where else error.what
        return Check("docker", "fail", description, error.hint or "")
    builder = builders.choose(facts)
    description = _describe_engine(facts, builder.name)
    if facts.free_bytes is not None:
        description += f", {size_text(facts.free_bytes)} free for images"
        if facts.free_bytes < _BUILD_SPACE_BYTES:
            hint = "an NVIDIA PyTorch image needs 20 GB, and saving it as much again; see: docker system df"
            return Check("docker", "warn", description, hint)
    return Check("docker", "ok", description, builder.note)


def _describe_engine(facts: EngineFacts, builder_name: str) -> str:
    """Return an engine's product, versions, builders and location as one line."""
    builder_names = builder_name
    buildx = builders.buildx_version()
    # buildx is a plug-in of Docker, and imgkit does not use it with Podman.
    if buildx and not facts.is_podman:
        builder_names += f" or buildx {buildx}"
    return (
        f"{facts.product} {facts.version}, API {facts.api}, {facts.arch}, store {facts.store}, "
        f"builder {builder_names}, {_describe_location(facts.endpoint)}"
    )


def _describe_location(endpoint: address.Endpoint) -> str:
    """Return where an engine is, and the setting that names it: ``at tcp://host:2375 (DOCKER_HOST)``."""
    if endpoint.context:
        return f"context {endpoint.context} at {endpoint.host}"
    if endpoint.source:
        return f"at {endpoint.host} ({endpoint.source})"
    return f"at {endpoint.host}"


def _check_runtime(target: Target | None) -> tuple[RuntimeTool | None, Check]:
    """Find the runtime (Singularity or Apptainer), and return it with the result of its check.

    If there is no runtime, the first value is None. That is not a failure if `target`, the recipe, runs with
    another kind of runtime. `target` is None if no recipe is given.
    """
    check_name = "singularity"
    module_hint = target.module_line if target else ""  # the error names it: "module load singularity"
    try:
        tool = runtime.find_runtime(module_hint=module_hint)
    except ToolMissing as error:
        if target and target.system.runtime.kind != "singularity":
            kind = target.system.runtime.kind
            return None, Check(check_name, "skip", f"not found; {target.name} needs {kind} instead")
        # A check shows its hint in one line, so the lines are joined.
        hint_lines = [line.strip() for line in (error.hint or "").splitlines()]
        return None, Check(check_name, "fail", error.what, "; ".join(hint_lines))
    # An older runtime passes no options to mksquashfs. Then mksquashfs chooses the compression.
    levels = "any compression" if tool.capabilities.mksquashfs_args else "its own compression only"
    finding = f"{tool} at {tool.path}, {levels}"
    if tool.below_floor:  # older than the version that can start a .sif of imgkit
        return tool, Check(check_name, "warn", finding, f"a .sif of imgkit needs {runtime.FLOOR}")
    return tool, Check(check_name, "ok", finding)


def _check_kernel(machine: Machine, tool: RuntimeTool) -> Iterator[Check]:
    """Check what the runtime needs of the kernel to start a container for an ordinary user.

    Nothing is checked for root. For a runtime that is installed setuid, the only check says that it needs
    nothing.
    """
    if machine.uid == 0:
        return
    starter = _find_setuid_starter(tool)
    if starter:
        yield Check("user namespaces", "ok", f"not needed: {starter} is setuid")
        return
    yield _check_namespaces(machine)
    # A runtime without setuid may not mount the .sif in the kernel. It mounts it with FUSE instead.
    device = machine.root / "dev/fuse"
    if os.access(device, os.R_OK | os.W_OK):
        yield Check("fuse", "ok", "/dev/fuse can be opened")
        return
    state = "cannot be opened" if device.exists() else "is missing"
    hint = "ask an administrator: modprobe fuse; chmod 0666 /dev/fuse"
    yield Check("fuse", "warn", f"/dev/fuse {state}: every start unpacks the whole .sif", hint)


def _find_setuid_starter(tool: RuntimeTool) -> Path | None:
    """Return the setuid program of a runtime that starts containers, or None if the runtime is not setuid."""
    # The starter of PREFIX/bin/singularity is PREFIX/libexec/singularity/bin/starter-suid.
    prefix = tool.path.resolve().parent.parent
    for flavour in runtime.COMMANDS:
        starter = prefix / "libexec" / flavour / "bin" / "starter-suid"
        if starter.exists() and starter.stat().st_mode & stat.S_ISUID:
            return starter
    return None


def _check_namespaces(machine: Machine) -> Check:
    """Check whether the kernel allows ordinary users to create a user namespace.

    A runtime that is not setuid needs one to start a container. The first setting that forbids it is
    reported.
    """
    check_name = "user namespaces"
    for setting in (*rights.SETTINGS, _APPARMOR):
        if rights.forbids_namespaces(machine.root, setting):
            problem = f"{setting.problem}: ordinary users cannot start a container"
            # AppArmor is only a warning, because its profile may exempt the runtime.
            verdict: Verdict = "warn" if setting is _APPARMOR else "fail"
            return Check(check_name, verdict, problem, f"{setting.hint}; or install the runtime setuid")
    max_namespaces = rights.read_small_file(machine.root / rights.MAX_NAMESPACES) or "any number"
    return Check(check_name, "ok", f"allowed, at most {max_namespaces}")


def _check_build_rights(machine: Machine) -> Check:
    """Check with which rights ``imgkit build --with apptainer`` would run the steps of a recipe.

    This is a build without an engine. The check warns if this user cannot run the steps, or only with rights
    that are not enough for every recipe.
    """
    check_name = "build --with apptainer"
    user_rights = rights.inspect_rights(root=machine.root, uid=machine.uid)
    if not user_rights.way:  # the steps cannot run
        return Check(check_name, "warn", user_rights.problem, user_rights.hint)
    steps = f"steps run {user_rights.way}"  # "steps run as root of a user namespace ..."
    if user_rights.problem:
        return Check(check_name, "warn", f"{steps}; {user_rights.problem}", user_rights.hint)
    return Check(check_name, "ok", steps)


_SIF_CHECK_NAME = "imgkit sif"


def _check_sif_writer(tool: RuntimeTool | None, runtime_verdict: Verdict) -> Check:
    """Check how ``imgkit sif`` would write a .sif: by itself, or with the runtime `tool`, which is slower.

    If `tool` is None, there is no runtime. `runtime_verdict` is then the verdict if imgkit cannot write the
    file itself: ``fail``, or ``skip`` for a recipe that needs no .sif.
    """
    try:
        squasher = squash.choose()  # the program with which imgkit itself would make the squashfs
    except ToolMissing as error:
        return _check_sif_without_squasher(tool, runtime_verdict, error.what)
    finding = f"writes the file itself, with {squasher}"
    if squasher.note:
        return Check(_SIF_CHECK_NAME, "warn", f"{finding}; {squasher.note}", squash.INSTALL)
    if squasher.zstd_error:
        finding += ", which lacks zstd: gzip, slower at every start"
        return Check(_SIF_CHECK_NAME, "warn", finding, squash.INSTALL)
    # The constant is the text "Singularity 3.8 or later, ...": these runtimes can start the file.
    return Check(_SIF_CHECK_NAME, "ok", f"{finding}; it runs under {runtime.FLOOR}")


def _check_sif_without_squasher(tool: RuntimeTool | None, runtime_verdict: Verdict, obstacle: str) -> Check:
    """Check whether the runtime `tool` can write a .sif, because imgkit has no program for that.

    `runtime_verdict` is the verdict if there is no runtime. `obstacle` says which program imgkit needs.
    """
    # If there is an mksquashfs that imgkit cannot use, its version explains why.
    path = mksquashfs.find_any()
    if path:
        obstacle += f" (version {mksquashfs.read_version(path)})"
    if tool is None:
        finding = f"cannot convert: {obstacle}, and there is no runtime"
        return Check(_SIF_CHECK_NAME, runtime_verdict, finding, squash.INSTALL)
    finding = f"{tool} builds the file, which is slower: {obstacle}"
    return Check(_SIF_CHECK_NAME, "warn", finding, squash.INSTALL)


def _check_zstd() -> Check:
    """Check whether the program zstd is on PATH. It reads archives that were compressed with zstd."""
    path = shutil.which("zstd")
    if path:
        return Check("zstd", "ok", path)
    hint = "apt-get install zstd, or module load zstd; only archives saved with --compression zstd need it"
    return Check("zstd", "warn", "not on PATH", hint)


def _check_disks(machine: Machine, purpose: Purpose) -> Iterator[Check]:
    """Check the free space in the folder for temporary files and in the current folder.

    `purpose` is ``build``, ``sif`` or ``any``. The folders must have space for what it writes. A build with
    an engine writes no .sif.
    """
    is_build = purpose == "build"
    current = Path.cwd()
    current_bytes = _BUILD_SPACE_BYTES if is_build else _SIF_SPACE_BYTES
    try:
        # The folder for temporary files of any .sif in the current folder, without --tmpdir (None).
        scratch = tmp_base(current / "image.sif", None)
    except UsageError as error:
        yield Check("disk tmp", "fail", error.what, f"{error.where}: {error.hint}")
        yield _check_space("disk here", current, current_bytes)
        return
    yield _check_scratch(machine, scratch, current, 0 if is_build else _SIF_SPACE_BYTES)
    # If both are the same folder, the check above includes the .sif, but not what a build writes.
    is_covered = scratch == current and not is_build
    if not is_covered:
        yield _check_space("disk here", current, current_bytes)


def _check_scratch(machine: Machine, scratch: Path, current: Path, sif_bytes: int) -> Check:
    """Check the space in `scratch`, the folder for temporary files of a conversion to a .sif.

    The .sif itself is written to the folder `current` and needs `sif_bytes`.
    """
    needed_bytes = _estimate_scratch_bytes()
    if scratch.stat().st_dev == current.stat().st_dev:
        # If both folders are on the same disk, it must hold the .sif as well as the temporary files.
        needed_bytes += sif_bytes
    check = _check_space("disk tmp", scratch, needed_bytes)
    if _file_system(machine, scratch) in ("tmpfs", "ramfs"):
        hint = "unpacked files would use memory: imgkit sif --tmpdir FOLDER-ON-A-DISK"
        return Check(check.name, "warn", f"{check.found}, in memory (tmpfs)", hint)
    return check


def _estimate_scratch_bytes() -> int:
    """Return the size of the temporary files that `imgkit sif` makes for one of NVIDIA's images.

    The size depends on the program that writes the file. A new mksquashfs needs no temporary files, and a
    runtime needs a multiple of the image's size.
    """
    try:
        share = squash.choose().disk_share
    except ToolMissing:
        share = convert.RUNTIME_DISK_SHARE
    return int(share * _NVIDIA_IMAGE_BYTES)


def _check_space(name: str, folder: Path, needed_bytes: int) -> Check:
    """Check whether `folder` has `needed_bytes` of free space."""
    free_bytes = shutil.disk_usage(folder).free
    finding = f"{size_text(free_bytes)} free in {folder}"
    if free_bytes >= needed_bytes:
        return Check(name, "ok", finding)
    hint = f"an NVIDIA PyTorch image needs {size_text(needed_bytes)}: use a folder with more space"
    return Check(name, "warn", finding, hint)


def _file_system(machine: Machine, folder: Path) -> str:
    """Return the type of the file system that holds `folder`, such as ``ext4``, or "" if it is unknown."""
    real_folder = folder.resolve()
    deepest_parts = 0
    file_system = ""
    # Each line is "DEVICE PATH TYPE OPTIONS ...". The mount with the longest path that contains `folder`
    # counts. If two mounts have the same path, the later one hides the earlier one.
    for line in rights.read_small_file(machine.root / "proc/mounts").splitlines():
        _, path, mount_type, *_ = line.split()
        mount = Path(path.replace("\\040", " "))  # the kernel writes a space as \040
        if real_folder.is_relative_to(mount) and len(mount.parts) >= deepest_parts:
            deepest_parts = len(mount.parts)
            file_system = mount_type
    return file_system


def _check_emulation(machine: Machine, target: Target | None) -> Iterator[Check]:
    """Check whether this machine can run programs of the architecture of `target`.

    Nothing is checked if there is no recipe (`target` is None), or if it allows this machine's architecture.
    """
    if target is None or f"linux/{machine.arch}" in target.platforms:
        return
    # The first platform of a recipe is its default.
    _, _, arch = target.platforms[0].partition("/")
    problem = emulator_problem(arch, root=machine.root)  # empty if qemu can run such programs
    if not problem:
        yield Check("emulation", "ok", f"qemu runs {arch} programs on this {machine.arch} machine")
        return
    finding = f"{target.name} is for {arch}, this machine is {machine.arch}: {problem}"
    hint = f"docker run --privileged --rm tonistiigi/binfmt --install {arch}; or build on {arch}"
    yield Check("emulation", "warn", finding, hint)
