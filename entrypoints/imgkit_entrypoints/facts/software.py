"""Software of image and driver: libraries, NCCL's version and configuration files, GPUDirect."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files, json_text, system
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts import elf
from imgkit_entrypoints.facts.compute import NVIDIA_FILES, driver
from imgkit_entrypoints.facts.host_facts import Library, Setting
from imgkit_entrypoints.facts.reader import Reader
from imgkit_entrypoints.system import SystemFacts

MANIFEST_JSON = "/opt/imgkit/manifest.json"

LIBRARIES = (
    "libibverbs.so.1",
    "librdmacm.so.1",
    "libmlx5.so.1",
    "libnccl.so.2",
    "libnccl-net.so",
    "libnccl-net-ofi.so",
    "libfabric.so.1",
    "libcxi.so.1",
    "libcudart.so",
)

_CUDA = "libcuda.so.1"
_CUDART = "libcudart.so"
_INITIALIZING = b"Initializing aws-ofi-nccl "
"""What aws-ofi-nccl prints at its start, in front of its version."""
_PLUGIN_VERSION = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})*")


def library_folders(reader: Reader, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders in which the dynamic linker looks, in its order."""
    configured = (
        line.strip()
        for name in reader.names("/etc/ld.so.conf.d")
        for line in (reader.text(f"/etc/ld.so.conf.d/{name}") or "").splitlines()
        if line.startswith("/")
    )
    triple = f"{platform.machine()}-linux-gnu"
    fixed = (f"/lib/{triple}", f"/usr/lib/{triple}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
    user = (folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/"))
    return tuple(dict.fromkeys((*user, *configured, *fixed)))


def libraries(reader: Reader, env: Mapping[str, str], plugin_files: Sequence[str]) -> tuple[Library, ...]:
    """Return the first file of each library of a fabric, and of `plugin_files`, which may be paths."""
    folders = library_folders(reader, env)
    libraries = []
    inspected: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys((*LIBRARIES, *plugin_files)):
        paths = (name,) if name.startswith("/") else (f"{folder}/{name}" for folder in folders)
        path = next((path for path in paths if reader.exists(path)), None)
        if path:
            target = reader.target(path)
            if target not in inspected:  # the plug-in's two names are mostly one file
                inspected[target] = inspect_library(reader, name, target)
            version, opens = inspected[target]
            libraries.append(Library(name=name, path=path, target=target, version=version, opens=opens))
        elif name in plugin_files and reader.live and f"/{name}\0".encode() in _linker_cache():
            # A site's own ld.so.conf may name folders that are not read here.
            libraries.append(Library(name=name, path=name, target=name))
    return tuple(libraries)


def inspect_library(reader: Reader, name: str, target: str) -> tuple[str, str]:
    """Return the version of libfabric or aws-ofi-nccl, and what the latter opens; empty for others."""
    if name.startswith("libfabric."):
        text = reader.text(f"{target.rpartition('/')[0]}/pkgconfig/libfabric.pc") or ""
        match = re.search(r"^Version:\s*(\S+)", text, re.MULTILINE) or re.search(
            r"/libfabric/([0-9][^/]*)/", target
        )
        return match[1] if match else "", ""
    if not name.startswith("libnccl-net"):
        return "", ""
    # Nothing else in its folder has the version. A pattern for all of it would take twice as long.
    content = reader.content(target) or b""
    start = content.find(_INITIALIZING)
    version = _PLUGIN_VERSION.match(content, start + len(_INITIALIZING)) if start >= 0 else None
    opens = _CUDART if version and f"\0{_CUDART}\0".encode() in content else ""
    return version[0].decode() if version else "", opens


NET_PLUGIN = "NCCL_NET_PLUGIN"
_NO_FILES = ("none", "STATIC_PLUGIN")
"""Values of `NET_PLUGIN` for which NCCL opens no file."""


def plugins(value: str) -> tuple[str, ...]:
    """Return the plug-ins in a value of `NET_PLUGIN`, which newer versions of NCCL read as a list.

    A relative path is left out: it depends on the folder in which a worker starts.
    """
    names = (name.strip() for name in value.split(","))
    return tuple(
        name for name in names if name and name not in _NO_FILES and (name.startswith("/") or "/" not in name)
    )


def plugin_files(plugin: str) -> tuple[str, ...]:
    """Return the files that NCCL tries to open for a plug-in, in its order."""
    return (plugin,) if "/" in plugin else (plugin, f"libnccl-net-{plugin}.so")


def named_plugins(
    recipe: SystemFacts, env: Mapping[str, str], settings: Sequence[Setting]
) -> tuple[str, ...]:
    """Return the files of the plug-ins that the environment, an nccl.conf or the recipe names."""
    values = [env.get(NET_PLUGIN), *(item.value for item in settings if item.name == NET_PLUGIN)]
    values.append(recipe.env.get(NET_PLUGIN))
    names = (name for value in values if value for name in plugins(value))
    return tuple(dict.fromkeys(file for name in names for file in plugin_files(name)))


def recipe(reader: Reader) -> SystemFacts:
    """Return the recipe's facts in this image; without values if there are none, or none that can be read.

    `facts.system_facts` reports a file that cannot be read.
    """
    try:
        return system.from_json(reader.text(str(system.SYSTEM_JSON)) or "{}")
    except (ValueError, TypeError, KeyError):
        return SystemFacts()


def image_env(reader: Reader) -> Mapping[str, str] | None:
    """Return the variables that base and recipe of the image set; None if no manifest states them."""
    data = manifest(reader)
    base, env = data.get("base"), data.get("env")
    inherited = base.get("env") if isinstance(base, dict) else None
    # Every image has a PATH: without a variable, nothing is known about its base.
    if not inherited or not isinstance(inherited, dict):
        return None
    variables = {**inherited, **(env if isinstance(env, dict) else {})}
    return {name: value for name, value in variables.items() if isinstance(value, str)}


def manifest(reader: Reader) -> dict[str, Any]:
    """Return the image's manifest; empty if there is none that can be read."""
    try:
        data = json_text.parse(reader.text(MANIFEST_JSON) or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def closed_gpus(reader: Reader, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the device files of NVIDIA GPUs that no program here can use, each with the reason.

    Apptainer mounts the whole /dev, also without ``--nv``, which brings the driver's library. Slurm closes
    the GPUs of other jobs to this one.
    """
    paths = [f"/dev/{name}" for name in reader.names("/dev", NVIDIA_FILES)]
    if not reader.live:
        return {}
    has_cuda = paths and any(reader.exists(f"{folder}/{_CUDA}") for folder in library_folders(reader, env))
    if paths and not has_cuda and f"/{_CUDA}\0".encode() not in _linker_cache():
        return dict.fromkeys(paths, f"no {_CUDA}, which --nv adds")
    # They are not opened: the driver of an idle GPU takes seconds for that.
    return {
        path: "not accessible to this process" for path in paths if not os.access(path, os.R_OK | os.W_OK)
    }


def _linker_cache() -> bytes:
    # Not through the reader, which makes a text of it.
    try:
        return files.read_bytes(Path("/etc/ld.so.cache"))
    except OSError:
        return b""


def verbs_providers(reader: Reader, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of libibverbs' drivers, such as ``mlx5``.

    Without a driver NCCL reports "No device found".
    """
    providers = {name.removesuffix(".driver") for name in reader.names("/etc/libibverbs.d", r".*\.driver")}
    for folder in library_folders(reader, env):
        for name in reader.names(f"{folder}/libibverbs", r"lib\w+-rdmav\d+\.so"):
            providers.add(name.removeprefix("lib").rsplit("-rdmav", 1)[0])
    return tuple(sorted(providers))


def torch(reader: Reader) -> str:
    """Return the version of the image's torch, such as ``2.3.0a0+40ec155e58.nv24.3``; empty if there is none.

    The source is torch's version.py: importing torch takes seconds, and importlib.metadata would take a
    quarter of our start-up.
    """
    match = _VERSION_LINE.search(_torch_version_file(reader)[1])
    return match[1] if match else ""


_VERSION_LINE = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)


def _torch_version_file(reader: Reader) -> tuple[str, str]:
    """Return path and content of the version.py of the torch that Python finds; empty if there is none."""
    for folder in _python_folders():
        path = f"{folder}/torch/version.py"
        text = reader.text(path)
        if text and _VERSION_LINE.search(text):
            return path, text
    return "", ""


def torch_cuda(reader: Reader) -> str:
    """Return the version of CUDA that torch is built for; empty if it is built for CPUs."""
    match = re.search(r"^cuda(?:: [^=\n]+)? = '([^'\n]+)'", _torch_version_file(reader)[1], re.MULTILINE)
    return match[1] if match else ""


def _python_folders() -> tuple[str, ...]:
    return tuple(folder for folder in sys.path if folder.startswith("/"))


def rocm(reader: Reader) -> str:
    """Return evidence that this image is made for AMD GPUs; empty if it is not.

    torch decides where there is one: a node's ROCm may be mounted into a container with another torch.
    """
    path, text = _torch_version_file(reader)
    if path:
        hip = re.search(r"^hip(?:: [^=\n]+)? = '([^'\n]+)'", text, re.MULTILINE)
        return f"{path}: hip = {hip[1]}" if hip else ""
    return next((path for path in ("/opt/rocm/.info/version", "/opt/rocm") if reader.exists(path)), "")


def nccl(reader: Reader, env: Mapping[str, str], image: tuple[str, str]) -> tuple[str, str, str]:
    """Return the version of the NCCL that torch loads here, its source, and whose it is; empty if unknown.

    torch is not imported, because that takes seconds. The third value is ``torch`` for the wheel beside it,
    ``image`` for a system library, whose version and source are `image`, as of `image_nccl`.

    Raises
    ------
    UsageError : ``IMGKIT_NCCL_VERSION`` is not a version.
    """
    if option := env.get("IMGKIT_NCCL_VERSION"):
        if _version(option) != option:
            problem, hint = f"{option!r} is not an NCCL version", "give, for example, 2.20.5"
            raise UsageError(problem, where="IMGKIT_NCCL_VERSION", hint=hint)
        return option, f"IMGKIT_NCCL_VERSION={option}", ""
    for folder in _python_folders():
        for name in reader.names(folder, r"nvidia_nccl_cu\d+-\d.*\.dist-info"):
            if (version := _version(name.split("-")[1])) and _is_linked_to_wheel(reader):
                return version, f"{folder}/{name}", "torch"
    version, source = image
    return version, source, "image" if version else ""


def image_nccl(reader: Reader, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the version of the NCCL on the library path, and its source; both are empty if unknown."""
    for folder in library_folders(reader, env):
        target = reader.target(f"{folder}/libnccl.so.2")
        if match := re.search(r"libnccl\.so\.(\d+\.\d+\.\d+)$", target):
            return match[1], f"{folder}/libnccl.so.2 -> {target}"
    version = _version(env.get("NCCL_VERSION", ""))
    return (version, f"NCCL_VERSION={env['NCCL_VERSION']}") if version else ("", "")


def _is_linked_to_wheel(reader: Reader) -> bool:
    """Return whether torch's library names the folder of the NCCL wheel, before any library path.

    That of an NGC image does not, even if another package brought the wheel. A library that cannot be read
    counts as one of a wheel.
    """
    folder = _torch_version_file(reader)[0].rpartition("/")[0]
    try:
        library = elf.read(reader.real_path(f"{folder}/lib/libtorch_cuda.so"))
    except (OSError, elf.NotShared):
        return True
    return any("nvidia/nccl" in path for path in (*library.rpath, *library.runpath))


def _version(text: str) -> str:
    match = re.match(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else ""


def nccl_settings(reader: Reader, env: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the settings of nccl.conf files; the first file that names a variable counts."""
    home = env.get("HOME", "")
    user_file = env.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home.startswith("/") else "")
    settings: dict[str, Setting] = {}
    for path in (user_file, "/etc/nccl.conf"):
        for line in (reader.text(path) or "").splitlines() if path else ():
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#"):
                settings.setdefault(name.strip(), Setting(name=name.strip(), value=value.strip(), path=path))
    return tuple(settings.values())


FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE", "NCCL_IBVERBS_LIB")
"""Variables that name a file, which NCCL reads at its start."""


def absent_files(reader: Reader, env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return what is wrong with each variable of `env` whose file does not exist, and the remedy."""
    names = [name for name in FILES if env.get(name, "").startswith("/") and not reader.exists(env[name])]
    return tuple(
        (
            f"{name}={env[name]}: there is no such file, so NCCL ignores it or exits",
            f"bind the file into the container (--bind {env[name]}), or unset {name}",
        )
        for name in names
    )


def peermem(reader: Reader) -> str:
    """Return the version file of the peer memory module with its content; empty if there is none (gdr.cc)."""
    for path in (
        "/sys/module/nvidia_peermem/version",
        "/sys/kernel/mm/memory_peers/nv_mem/version",
        "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
    ):
        content = reader.text(path)
        if content is not None:
            return f"{path}: {content}"
    return ""


def dmabuf(reader: Reader) -> bool:
    """Return True if GPU memory can be shared as DMA-BUF: open kernel module, and Linux >= 5.12."""
    kernel = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", reader.text("/proc/sys/kernel/osrelease") or "")
    is_open = "Open Kernel Module" in driver(reader)
    return bool(kernel and is_open and (int(kernel[1]), int(kernel[2])) >= (5, 12))


_CAP_SYS_NICE = 1 << 23
"""Linux, include/uapi/linux/capability.h."""


def numa_fault(reader: Reader) -> str:
    """Return evidence that docker's system call filter refuses NUMA calls; empty if nothing does."""
    status = reader.text("/proc/self/status") or ""
    seccomp = re.search(r"^Seccomp:\s*2$", status, re.MULTILINE)
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", status, re.MULTILINE)
    if not seccomp or not capabilities or int(capabilities[1], 16) & _CAP_SYS_NICE:
        return ""
    lines = f"{seccomp[0]}, {capabilities[0]}".replace("\t", " ")
    return f"/proc/self/status: {lines}, without CAP_SYS_NICE"
