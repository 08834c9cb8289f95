"""Checks of this machine and its engines: can it build, save and convert images?

Runs on a laptop, in a pipeline and on a cluster's login node, and loads the engine's SDK only where there is
an engine to ask. Every verdict other than ok names a fix. Engines: the one that every verb uses, and the
others that this user could choose.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from imgkit_builder.apptainer import rights
from imgkit_builder.base.checks import Check, passed
from imgkit_builder.base.sizes import size_text
from imgkit_builder.engine import address, builders, connection
from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.connection import EngineFacts
from imgkit_builder.oci.platform import emulator_fault, host_arch
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif import convert, mksquashfs, runtime, squash
from imgkit_builder.sif.workspace import PACKED_SHARE, tmp_base
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import ImgkitError, ToolMissing, UsageError

Purpose = Literal["any", "build", "sif"]

_NVIDIA_IMAGE_BYTES = 20 * 10**9
"""Rough size of NVIDIA's PyTorch images, uncompressed."""

_SIF_SPACE_BYTES = int(PACKED_SHARE * _NVIDIA_IMAGE_BYTES)
"""Space for a .sif of such an image."""

_USERNS = "proc/sys/user/max_user_namespaces"
_CLONE = "proc/sys/kernel/unprivileged_userns_clone"
_APPARMOR = "proc/sys/kernel/apparmor_restrict_unprivileged_userns"

_BUILD_SPACE_BYTES = 2 * _NVIDIA_IMAGE_BYTES
"""Space for such an image, and for its archive or the layers of the next one."""
_OTHER_S = 1.0
"""Limit for an answer of an engine that is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine to look at; tests use another root or user."""

    root: Path = Path("/")
    uid: int = field(default_factory=os.getuid)
    arch: str = field(default_factory=host_arch)

    def text(self, path: str) -> str:
        """Stripped content of a small file below the root; empty where it cannot be read."""
        try:
            return files.read_text(self.root / path, errors="replace").strip()
        except OSError:
            return ""


def examine(
    target: Target | None = None, *, purpose: Purpose = "any", machine: Machine | None = None
) -> tuple[Check, ...]:
    """Check everything within a second, and change nothing.

    A check fails where it rules out `purpose`: ``build`` needs an engine or a runtime that builds, ``sif``
    everything but the engine, ``any`` either of the two. Where only the other purpose needs it, the check
    warns.
    """
    machine = machine or Machine()
    (engine, *engines), tool = checks(), _runtime(target)
    way = _way(tool)
    definitions = (_definitions(machine),) if tool.verdict in ("ok", "warn") else ()
    tool_checks = (
        # Without a runtime this machine cannot run a .sif, but imgkit may still write one.
        tool if way.verdict == "fail" else _softer(tool),
        *_modules(target),
        *(_unprivileged(machine, tool) if tool.verdict in ("ok", "warn") else ()),
        *definitions,
        way,
        _zstd(),
        *_disks(machine, purpose),
        *_amd_gpus(machine),
        *_user_packages(),
    )
    can_build, can_convert = engine.verdict != "fail", passed(tool_checks)
    if purpose == "build" or (purpose == "any" and can_build):
        tool_checks = tuple(_softer(check) for check in tool_checks)
    if (
        purpose == "build"
        and engine.verdict == "fail"
        and any(check.verdict == "ok" for check in definitions)
    ):
        hint = f"imgkit build RECIPE --with apptainer needs no engine; {engine.hint}"
        engine = dataclasses.replace(engine, verdict="warn", hint=hint)
    if purpose == "sif" or (purpose == "any" and can_convert):
        engine = _softer(engine)
    return (_python(), engine, *engines, *_emulation(machine, target), *tool_checks)


def _softer(check: Check) -> Check:
    if check.verdict != "fail":
        return check
    return Check(name=check.name, verdict="warn", found=check.found, hint=check.hint)


def _python() -> Check:
    return Check(name="python", verdict="ok", found=f"{platform.python_version()} at {sys.executable}")


def _runtime(target: Target | None) -> Check:
    name, kind = "singularity", target.system.runtime.kind if target else "singularity"
    try:
        tool = runtime.find_runtime(module_hint=(target.module_line or None) if target else None)
    except ToolMissing as error:
        if target and kind != "singularity":
            return Check(name=name, verdict="skip", found=f"not found; {target.name} needs {kind} instead")
        hint = "; ".join(line.strip() for line in (error.hint or "").splitlines())
        return Check(name=name, verdict="fail", found=error.what, hint=hint)
    levels = "any compression" if tool.capabilities.mksquashfs_args else "its own compression only"
    text = f"{tool} at {tool.path}, {levels}"
    if tool.below_floor:
        return Check(name=name, verdict="warn", found=text, hint=f"a .sif of imgkit needs {runtime.FLOOR}")
    return Check(name=name, verdict="ok", found=text)


def _modules(target: Target | None) -> Iterator[Check]:
    name, module_line = "modules", target.module_line if target else ""
    if os.environ.get("LMOD_CMD"):
        yield Check(name=name, verdict="ok", found=f"Lmod {os.environ.get('LMOD_VERSION', '')}".rstrip())
    elif os.environ.get("MODULESHOME") or "BASH_FUNC_module%%" in os.environ:
        home = os.environ.get("MODULESHOME", "")
        yield Check(name=name, verdict="ok", found=f"environment modules {home}".rstrip())
    elif module_line:
        yield Check(name=name, verdict="skip", found=f"not found; on the cluster: {module_line}")


def _unprivileged(machine: Machine, tool: Check) -> Iterator[Check]:
    """Kernel features that a runtime needs for ordinary users; root and setuid runtimes need none of them."""
    if machine.uid == 0:
        return
    starter = _setuid_starter(machine, tool.found)
    if starter:
        yield Check(name="user namespaces", verdict="ok", found=f"not needed: {starter} is setuid")
        return
    yield _namespaces(machine)
    yield _fuse(machine)


def _setuid_starter(machine: Machine, runtime_text: str) -> Path | None:
    program = runtime_text.partition(" at ")[2].partition(",")[0]
    prefix = Path(program).resolve().parent.parent
    for flavour in runtime.COMMANDS:
        starter = prefix / "libexec" / flavour / "bin" / "starter-suid"
        if starter.exists() and starter.stat().st_mode & 0o4000:
            return starter
    return None


def _namespaces(machine: Machine) -> Check:
    name = "user namespaces"
    for path, refuses, fix in ((_USERNS, "0", "15000"), (_CLONE, "0", "1"), (_APPARMOR, "1", "0")):
        if machine.text(path) != refuses:
            continue
        key = path.removeprefix("proc/sys/").replace("/", ".")
        return Check(
            name=name,
            # Ubuntu's packages contain an AppArmor profile that lets the runtime through.
            verdict="warn" if path == _APPARMOR else "fail",
            found=f"/{path} is {refuses}: ordinary users cannot start a container",
            hint=f"ask an administrator: sysctl -w {key}={fix}; or install the runtime setuid",
        )
    return Check(name=name, verdict="ok", found=f"allowed, at most {machine.text(_USERNS) or 'any number'}")


def _definitions(machine: Machine) -> Check:
    """How steps of a recipe would run without an engine."""
    name, access = "build --with apptainer", rights.look(root=machine.root, uid=machine.uid)
    if not access.way:
        return Check(name=name, verdict="warn", found=access.fault, hint=access.hint)
    steps = f"steps run {access.way}"
    if access.fault:
        return Check(name=name, verdict="warn", found=f"{steps}; {access.fault}", hint=access.hint)
    return Check(name=name, verdict="ok", found=steps)


def _fuse(machine: Machine) -> Check:
    device = machine.root / "dev/fuse"
    if os.access(device, os.R_OK | os.W_OK):
        return Check(name="fuse", verdict="ok", found="/dev/fuse can be opened")
    state = "cannot be opened" if device.exists() else "is missing"
    return Check(
        name="fuse",
        verdict="warn",
        found=f"/dev/fuse {state}: every start unpacks the whole .sif",
        hint="ask an administrator: modprobe fuse; chmod 0666 /dev/fuse",
    )


def _way(tool: Check) -> Check:
    """Report how `imgkit sif` would write a file: itself, or by the runtime."""
    name, hint = "imgkit sif", squash.INSTALL
    try:
        squasher = squash.choose()
    except ToolMissing as error:
        path = mksquashfs.find()
        obstacle = f"{error.what}{f' (version {mksquashfs.version(path)})' if path else ''}"
        if tool.verdict in ("fail", "skip"):
            text = f"cannot convert: {obstacle}, and there is no runtime"
            return Check(name=name, verdict=tool.verdict, found=text, hint=hint)
        text = f"{tool.found.partition(' at ')[0]} builds the file, which is slower: {obstacle}"
        return Check(name=name, verdict="warn", found=text, hint=hint)
    text = f"writes the file itself, with {squasher}"
    if squasher.note:
        return Check(name=name, verdict="warn", found=f"{text}; {squasher.note}", hint=hint)
    if squasher.zstd_error:
        text += ", which lacks zstd: gzip, slower at every start"
        return Check(name=name, verdict="warn", found=text, hint=hint)
    return Check(name=name, verdict="ok", found=f"{text}; it runs under {runtime.FLOOR}")


def _zstd() -> Check:
    path = shutil.which("zstd")
    if path:
        return Check(name="zstd", verdict="ok", found=path)
    hint = "apt-get install zstd, or module load zstd; only archives saved with --compression zstd need it"
    return Check(name="zstd", verdict="warn", found="not on PATH", hint=hint)


def _disks(machine: Machine, purpose: Purpose) -> Iterator[Check]:
    current, sif_bytes = Path.cwd(), 0 if purpose == "build" else _SIF_SPACE_BYTES
    try:
        scratch = tmp_base(current / "image.sif", None)
    except UsageError as error:
        yield Check(name="disk tmp", verdict="fail", found=error.what, hint=f"{error.where}: {error.hint}")
    else:
        shared = scratch.stat().st_dev == current.stat().st_dev
        check = _space("disk tmp", scratch, _scratch_bytes() + (sif_bytes if shared else 0))
        if _file_system(machine, scratch) in ("tmpfs", "ramfs"):
            hint = "unpacked files would use memory: imgkit sif --tmpdir FOLDER-ON-A-DISK"
            text = f"{check.found}, in memory (tmpfs)"
            check = Check(name=check.name, verdict="warn", found=text, hint=hint)
        yield check
        if scratch == current and purpose != "build":
            return
    yield _space("disk here", current, _BUILD_SPACE_BYTES if purpose == "build" else sif_bytes)


def _scratch_bytes() -> int:
    """Size of the temporary files that `imgkit sif` would write for an NVIDIA image."""
    try:
        share = squash.choose().disk_share
    except ToolMissing:
        share = convert.RUNTIME_DISK_SHARE
    return int(share * _NVIDIA_IMAGE_BYTES)


def _space(name: str, folder: Path, wanted_bytes: int) -> Check:
    free = shutil.disk_usage(folder).free
    text = f"{size_text(free)} free in {folder}"
    if free >= wanted_bytes:
        return Check(name=name, verdict="ok", found=text)
    hint = f"an NVIDIA PyTorch image needs {size_text(wanted_bytes)}: use a folder with more space"
    return Check(name=name, verdict="warn", found=text, hint=hint)


def _file_system(machine: Machine, folder: Path) -> str:
    """Type of the file system of `folder`; empty where it is unknown."""
    folder, depth, kind = folder.resolve(), 0, ""
    for line in machine.text("proc/mounts").splitlines():
        _, where, what, *_ = line.split()
        mount = Path(where.replace("\\040", " "))
        if folder.is_relative_to(mount) and len(mount.parts) >= depth:
            depth, kind = len(mount.parts), what
    return kind


def _emulation(machine: Machine, target: Target | None) -> Iterator[Check]:
    """Whether images for another architecture can be built here."""
    if target is None or f"linux/{machine.arch}" in target.platforms:
        return
    name, arch = "emulation", target.platforms[0].partition("/")[2]
    fault = emulator_fault(arch, root=machine.root)
    if not fault:
        yield Check(
            name=name, verdict="ok", found=f"qemu runs {arch} programs on this {machine.arch} machine"
        )
        return
    yield Check(
        name=name,
        verdict="warn",
        found=f"{target.name} is for {arch}, this machine is {machine.arch}: {fault}",
        hint=f"docker run --privileged --rm tonistiigi/binfmt --install {arch}; or build on {arch}",
    )


def _amd_gpus(machine: Machine) -> Iterator[Check]:
    """GPUs of AMD, with their compute driver, which imgkit does not use."""
    cards = sorted((machine.root / "sys/class/drm").glob("card*"))
    count = sum(machine.text(f"sys/class/drm/{card.name}/device/vendor") == "0x1002" for card in cards)
    if count and (machine.root / "dev/kfd").exists():
        yield Check(
            name="gpus",
            verdict="warn",
            found=f"{count} AMD GPUs (/dev/kfd); imgkit supports NVIDIA GPUs only",
            hint="build and convert images here; run them on NVIDIA GPUs, or on processors: --device cpu",
        )


def _user_packages() -> Iterator[Check]:
    home = os.environ.get("HOME", "")
    folders = sorted(Path(home).glob(".local/lib/python3*/site-packages")) if home else []
    if folders:
        versions = ", ".join(path.parent.name for path in folders)
        ignored = "imgkit's images ignore them (PYTHONNOUSERSITE), other images may not"
        yield Check(name="~/.local", verdict="ok", found=f"packages of {versions}; {ignored}")


def checks() -> tuple[Check, ...]:
    """A check of the engine that every verb uses, then one of each other engine that could be chosen."""
    buildx = builders.buildx_version()
    try:
        used = address.endpoint()
        first = _used(used, buildx)
    except ImgkitError as error:
        used = Endpoint(host="", source=error.where or "")
        first = _failed(error)
    return (first, *_others(address.others(used), used, buildx))


def _failed(error: ImgkitError) -> Check:
    text = f"{error.where}: {error.what}" if error.where else error.what
    return Check(name="docker", verdict="fail", found=text, hint=error.hint or "")


def _used(endpoint: Endpoint, buildx: str) -> Check:
    try:
        facts = connection.query(endpoint)
    except ImgkitError as error:
        return _failed(error)
    text, note = _described(facts, buildx)
    free_bytes = facts.free_bytes
    if free_bytes is not None:
        text += f", {size_text(free_bytes)} free for images"
    if free_bytes is None or free_bytes >= _BUILD_SPACE_BYTES:
        return Check(name="docker", verdict="ok", found=text, hint=note)
    hint = "an NVIDIA PyTorch image needs 20 GB, and saving it as much again; see: docker system df"
    return Check(name="docker", verdict="warn", found=text, hint=hint)


def _others(endpoints: Sequence[Endpoint], used: Endpoint, buildx: str) -> tuple[Check, ...]:
    if not endpoints:
        return ()
    with ThreadPoolExecutor(max_workers=len(endpoints)) as pool:
        return tuple(pool.map(lambda endpoint: _other(endpoint, used, buildx), endpoints))


def _other(endpoint: Endpoint, used: Endpoint, buildx: str) -> Check:
    name = "not used"
    if endpoint.host.startswith("ssh://"):
        # ssh may take long, or ask for a password.
        return Check(
            name=name,
            verdict="skip",
            found=f"{_reached(endpoint)}: not queried over ssh",
            hint=f"to use it: {choice(endpoint, used)}",
        )
    try:
        facts = connection.query(endpoint, timeout_s=_OTHER_S)
    except ImgkitError as error:
        return Check(name=name, verdict="skip", found=f"{_reached(endpoint)}: {error.what}")
    text, _ = _described(facts, buildx)
    return Check(name=name, verdict="ok", found=text, hint=f"to use it: {choice(endpoint, used)}")


def _described(facts: EngineFacts, buildx: str) -> tuple[str, str]:
    """What an engine is, and what its builder lacks."""
    builder = builders.choose(facts)
    also = f" or buildx {buildx}" if buildx and not facts.is_podman else ""
    parts = (
        f"{facts.product} {facts.version}",
        f"API {facts.api}",
        facts.arch,
        f"store {facts.store}",
        f"builder {builder.name}{also}",
        _reached(facts.endpoint),
    )
    return ", ".join(parts), builder.note


def _reached(endpoint: Endpoint) -> str:
    if endpoint.context:
        return f"context {endpoint.context} at {endpoint.host}"
    return f"at {endpoint.host}" + (f" ({endpoint.source})" if endpoint.source else "")


def choice(endpoint: Endpoint, used: Endpoint) -> str:
    """The command after which every verb uses `place` instead of `used`."""
    if not endpoint.context:
        return f"export DOCKER_HOST={endpoint.host}"
    # A variable goes before the context that is in use.
    variable = used.source if used.source in ("DOCKER_HOST", "DOCKER_CONTEXT") else ""
    return f"{f'unset {variable}; ' if variable else ''}docker context use {endpoint.context}"
