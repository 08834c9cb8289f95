"""Read the software of the image and the driver: libraries, NCCL with its configuration files, GPUDirect.

Nothing is imported or loaded for this, because an import of torch takes seconds.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from imgkit_entrypoints import files, json_text, system
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts import elf
from imgkit_entrypoints.facts.compute import NVIDIA_FILES, read_driver
from imgkit_entrypoints.facts.host_facts import Library, Setting
from imgkit_entrypoints.facts.reader import Reader
from imgkit_entrypoints.system import SystemFacts

MANIFEST_JSON = "/opt/imgkit/manifest.json"

# Libraries of a fabric, by the names under which programs open them.
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
"""Text in the file of aws-ofi-nccl, which prints it at its start in front of its version."""
_PLUGIN_VERSION = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})*")


def library_folders(reader: Reader, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders in which the dynamic linker searches for libraries, in its order.

    They come from LD_LIBRARY_PATH, /etc/ld.so.conf.d and the linker's own list. Relative folders are left
    out.
    """
    configured = []
    for name in reader.names("/etc/ld.so.conf.d"):
        for line in (reader.text(f"/etc/ld.so.conf.d/{name}") or "").splitlines():
            if line.startswith("/"):
                configured.append(line.strip())
    triple = f"{platform.machine()}-linux-gnu"
    # Debian and Ubuntu have folders such as /usr/lib/x86_64-linux-gnu, other distributions have /usr/lib64.
    fixed = (f"/lib/{triple}", f"/usr/lib/{triple}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
    user = (folder for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/"))
    return tuple(dict.fromkeys((*user, *configured, *fixed)))


def find_libraries(
    reader: Reader, env: Mapping[str, str], plugin_files: Sequence[str]
) -> tuple[Library, ...]:
    """Return the libraries of a fabric that exist, each with the first file on the library path.

    Parameters
    ----------
    plugin_files : further libraries, by name or absolute path (`named_plugins`).
    """
    folders = library_folders(reader, env)
    libraries = []
    inspected: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys((*LIBRARIES, *plugin_files)):
        path = _find_file(reader, name, folders)
        if path:
            target = reader.target(path)
            if target not in inspected:  # the plug-in's two names are usually links to one file
                inspected[target] = inspect_library(reader, name, target)
            version, opens = inspected[target]
            libraries.append(Library(name=name, path=path, target=target, version=version, opens=opens))
        elif name in plugin_files and reader.live and _is_in_linker_cache(name):
            # The site's ld.so.conf may name folders that `library_folders` does not know. The linker's cache
            # has the names of all libraries in them.
            libraries.append(Library(name=name, path=name, target=name))
    return tuple(libraries)


def _find_file(reader: Reader, name: str, folders: Sequence[str]) -> str:
    """Return the first file `name` in `folders`, or an empty text. An absolute path needs no folder."""
    paths = [name] if name.startswith("/") else [f"{folder}/{name}" for folder in folders]
    for path in paths:
        if reader.exists(path):
            return path
    return ""


def inspect_library(reader: Reader, name: str, target: str) -> tuple[str, str]:
    """Return the version of libfabric or aws-ofi-nccl, and the library that aws-ofi-nccl opens while it runs.

    The second text is "" for libfabric. Both texts are "" for other libraries.
    """
    if name.startswith("libfabric."):
        return _libfabric_version(reader, target), ""
    if not name.startswith("libnccl-net"):
        return "", ""
    # Only the plug-in itself holds its version. A regular expression for the whole text would take twice as
    # long as find.
    content = reader.content(target) or b""
    start = content.find(_INITIALIZING)
    if start < 0:
        return "", ""
    version = _PLUGIN_VERSION.match(content, start + len(_INITIALIZING))
    if version is None:
        return "", ""
    opens = _CUDART if f"\0{_CUDART}\0".encode() in content else ""
    return version[0].decode(), opens


def _libfabric_version(reader: Reader, target: str) -> str:
    """Return the version of the libfabric in the file `target`, or an empty text if it is unknown."""
    folder, _, _ = target.rpartition("/")
    text = reader.text(f"{folder}/pkgconfig/libfabric.pc") or ""
    match = re.search(r"^Version:\s*(\S+)", text, re.MULTILINE)
    if match is None:  # without this file, a path such as /opt/cray/libfabric/1.22.0/ has the version
        match = re.search(r"/libfabric/([0-9][^/]*)/", target)
    return match[1] if match else ""


NET_PLUGIN = "NCCL_NET_PLUGIN"
_NO_FILES = ("none", "STATIC_PLUGIN")
"""Values of `NET_PLUGIN` for which NCCL opens no file."""


def split_plugins(value: str) -> tuple[str, ...]:
    """Return the plug-ins that a value of `NET_PLUGIN` names: ``ofi,/opt/libnccl-net.so`` has two.

    Newer versions of NCCL read the value as a list. A relative path is left out, because its meaning depends
    on the folder in which a worker starts.
    """
    names = []
    for name in map(str.strip, value.split(",")):
        is_relative = "/" in name and not name.startswith("/")
        if name and name not in _NO_FILES and not is_relative:
            names.append(name)
    return tuple(names)


def plugin_files(plugin: str) -> tuple[str, ...]:
    """Return the files that NCCL tries to open for a plug-in: ``ofi -> ofi, libnccl-net-ofi.so``."""
    return (plugin,) if "/" in plugin else (plugin, f"libnccl-net-{plugin}.so")


def named_plugins(
    recipe: SystemFacts, env: Mapping[str, str], settings: Sequence[Setting]
) -> tuple[str, ...]:
    """Return the files of all network plug-ins that the environment, nccl.conf or the recipe names."""
    values = [setting.value for setting in settings if setting.name == NET_PLUGIN]
    file_names: dict[str, None] = {}  # each name once, in order
    for value in (env.get(NET_PLUGIN, ""), *values, recipe.env.get(NET_PLUGIN, "")):
        for name in split_plugins(value):
            file_names.update(dict.fromkeys(plugin_files(name)))
    return tuple(file_names)


def read_recipe(reader: Reader) -> SystemFacts:
    """Return the recipe's facts from /opt/imgkit/system.json, or the defaults if it cannot be read.

    An error is ignored here, since `facts.system_facts` reports it to the user.
    """
    try:
        return system.from_json(reader.text(str(system.SYSTEM_JSON)) or "{}")
    except (ValueError, TypeError, KeyError):
        return SystemFacts()


def image_env(reader: Reader) -> Mapping[str, str] | None:
    """Return the variables that the image's base and recipe set, or None if they are unknown.

    The image's manifest states them. An image that imgkit has not built has no manifest.
    """
    data = manifest(reader)
    base, recipe_env = data.get("base"), data.get("env")
    base_env = base.get("env") if isinstance(base, dict) else None
    # Every image sets at least PATH, so a manifest without variables of the base knows nothing about it.
    if not base_env or not isinstance(base_env, dict):
        return None
    variables = dict(base_env)
    if isinstance(recipe_env, dict):
        variables |= recipe_env
    return {name: value for name, value in variables.items() if isinstance(value, str)}


def manifest(reader: Reader) -> dict[str, Any]:
    """Return the image's manifest (/opt/imgkit/manifest.json), or an empty one if it cannot be read."""
    try:
        data = json_text.parse(reader.text(MANIFEST_JSON) or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def inaccessible_gpus(reader: Reader, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the device files of NVIDIA GPUs that programs in this container cannot use, with the reasons.

    There are two causes. Apptainer mounts all of /dev, but adds the driver's library only with ``--nv``. And
    Slurm gives a job no access to the GPUs of other jobs.
    """
    paths = [f"/dev/{name}" for name in reader.names("/dev", NVIDIA_FILES)]
    # In a saved tree of files, nothing can be opened.
    if not reader.live:
        return {}
    if paths and not _has_cuda(reader, env):
        return dict.fromkeys(paths, f"no {_CUDA}, which --nv adds")
    # os.access instead of opening the files, because the driver takes seconds to open an idle GPU.
    inaccessible = [path for path in paths if not os.access(path, os.R_OK | os.W_OK)]
    return dict.fromkeys(inaccessible, "not accessible to this process")


def _has_cuda(reader: Reader, env: Mapping[str, str]) -> bool:
    """Return whether programs in this container find the driver's library."""
    folders = library_folders(reader, env)
    return _find_file(reader, _CUDA, folders) != "" or _is_in_linker_cache(_CUDA)


def _is_in_linker_cache(name: str) -> bool:
    """Return whether the dynamic linker's cache on this machine has a library of this name.

    The cache is a binary file with the paths of libraries between zero bytes.
    """
    try:
        cache = files.read_bytes(Path("/etc/ld.so.cache"))
    except OSError:
        return False
    return f"/{name}\0".encode() in cache


def verbs_providers(reader: Reader, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of libibverbs' drivers (its providers), such as ``mlx5``.

    If the driver of a device is missing, NCCL reports "No device found".
    """
    providers = {name.removesuffix(".driver") for name in reader.names("/etc/libibverbs.d", r".*\.driver")}
    for folder in library_folders(reader, env):
        for name in reader.names(f"{folder}/libibverbs", r"lib\w+-rdmav\d+\.so"):
            providers.add(name.removeprefix("lib").rsplit("-rdmav", 1)[0])
    return tuple(sorted(providers))


def torch_version(reader: Reader) -> str:
    """Return the version of the image's torch, such as ``2.3.0a0+40ec155e58.nv24.3``, or an empty text.

    It is read from torch/version.py. An import of torch takes seconds, and importlib.metadata would take a
    quarter of imgkit's start-up.
    """
    match = _VERSION_LINE.search(_torch_version_file(reader)[1])
    return match[1] if match else ""


_VERSION_LINE = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)


def _torch_version_file(reader: Reader) -> tuple[str, str]:
    """Return path and content of the version.py of the torch that Python would import, or two empty texts."""
    for folder in _python_folders():
        path = f"{folder}/torch/version.py"
        text = reader.text(path)
        if text and _VERSION_LINE.search(text):
            return path, text
    return "", ""


def torch_cuda(reader: Reader) -> str:
    """Return the version of CUDA that torch is built for, or an empty text for a torch of CPUs."""
    # "cuda: Optional[str] = '12.4'", or "cuda = None"
    match = re.search(r"^cuda(?:: [^=\n]+)? = '([^'\n]+)'", _torch_version_file(reader)[1], re.MULTILINE)
    return match[1] if match else ""


def _python_folders() -> tuple[str, ...]:
    return tuple(folder for folder in sys.path if folder.startswith("/"))


def rocm_evidence(reader: Reader) -> str:
    """Return evidence that this image is made for AMD GPUs, or "" if it is not.

    If the image has torch, only torch's build decides: the node's /opt/rocm may be mounted into a container
    whose torch is for other GPUs.
    """
    path, text = _torch_version_file(reader)
    if path:
        hip = re.search(r"^hip(?:: [^=\n]+)? = '([^'\n]+)'", text, re.MULTILINE)
        return f"{path}: hip = {hip[1]}" if hip else ""
    return next((path for path in ("/opt/rocm/.info/version", "/opt/rocm") if reader.exists(path)), "")


class Nccl(NamedTuple):
    """An NCCL. All texts are empty if it is unknown."""

    version: str = ""
    source: str = ""
    """The evidence for the version."""
    owner: str = ""
    """``torch`` for a wheel beside torch, ``image`` for the library on the library path, else empty."""


def loaded_nccl(reader: Reader, env: Mapping[str, str], on_library_path: Nccl) -> Nccl:
    """Return the NCCL that torch loads, or the version that the user states.

    Parameters
    ----------
    on_library_path : the result of `image_nccl`.

    Raises
    ------
    UsageError : ``IMGKIT_NCCL_VERSION`` is not a version.
    """
    option = env.get("IMGKIT_NCCL_VERSION")
    if option:
        # The text must be nothing but a version.
        if _version(option) != option:
            problem, hint = f"{option!r} is not an NCCL version", "give, for example, 2.20.5"
            raise UsageError(problem, where="IMGKIT_NCCL_VERSION", hint=hint)
        return Nccl(option, f"IMGKIT_NCCL_VERSION={option}")
    for folder in _python_folders():
        # The wheel's metadata is a folder such as nvidia_nccl_cu12-2.20.5.dist-info.
        for name in reader.names(folder, r"nvidia_nccl_cu\d+-\d.*\.dist-info"):
            _, _, text = name.partition("-")
            version = _version(text)
            if version and _is_linked_to_wheel(reader):
                return Nccl(version, f"{folder}/{name}", "torch")
    return on_library_path


def image_nccl(reader: Reader, env: Mapping[str, str]) -> Nccl:
    """Return the NCCL on the library path.

    The file's name has the version, such as libnccl.so.2.20.5. Otherwise the variable NCCL_VERSION counts,
    which NVIDIA's images set.
    """
    for folder in library_folders(reader, env):
        target = reader.target(f"{folder}/libnccl.so.2")
        match = re.search(r"libnccl\.so\.(\d+\.\d+\.\d+)$", target)
        if match:
            return Nccl(match[1], f"{folder}/libnccl.so.2 -> {target}", "image")
    version = _version(env.get("NCCL_VERSION", ""))
    if not version:
        return Nccl()
    return Nccl(version, f"NCCL_VERSION={env['NCCL_VERSION']}", "image")


def _is_linked_to_wheel(reader: Reader) -> bool:
    """Return whether torch loads NCCL from the wheel beside it, and not from the library path.

    torch's library then names the folder of the wheel in its RPATH or RUNPATH (folders that the linker
    searches first). The torch of an NGC image does not, even if another package has installed the wheel. If
    torch's library cannot be read, return True.
    """
    path, _ = _torch_version_file(reader)
    folder, _, _ = path.rpartition("/")
    try:
        library = elf.read(reader.real_path(f"{folder}/lib/libtorch_cuda.so"))
    except (OSError, elf.NotShared):
        return True
    return any("nvidia/nccl" in path for path in (*library.rpath, *library.runpath))


def _version(text: str) -> str:
    """Return the version at the beginning of a text: ``2.20.5-1+cuda12.4 -> 2.20.5``."""
    match = re.match(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else ""


def nccl_settings(reader: Reader, env: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the settings of nccl.conf files. If two files set a variable, the user's file counts.

    The user's file is the one in NCCL_CONF_FILE, or else ~/.nccl.conf. The other file is /etc/nccl.conf.
    """
    paths = ["/etc/nccl.conf"]
    if env.get("NCCL_CONF_FILE"):
        paths.append(env["NCCL_CONF_FILE"])
    elif env.get("HOME", "").startswith("/"):
        paths.append(f"{env['HOME']}/.nccl.conf")
    settings: dict[str, Setting] = {}
    # The user's file comes first, and `setdefault` keeps its values.
    for path in reversed(paths):
        for line in (reader.text(path) or "").splitlines():
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#"):
                settings.setdefault(name.strip(), Setting(name=name.strip(), value=value.strip(), path=path))
    return tuple(settings.values())


FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE", "NCCL_IBVERBS_LIB")
"""Variables whose value is the path of a file that NCCL reads at its start."""


def absent_files(reader: Reader, env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return a problem and its remedy for each variable whose file does not exist.

    The variables are those of `FILES`: each names a file that NCCL reads, such as NCCL_TOPO_FILE.
    """
    problems = []
    for name in FILES:
        path = env.get(name, "")
        if path.startswith("/") and not reader.exists(path):
            problem = f"{name}={path}: there is no such file, so NCCL ignores it or exits"
            problems.append((problem, f"bind the file into the container (--bind {path}), or unset {name}"))
    return tuple(problems)


def peermem(reader: Reader) -> str:
    """Return the version file of the kernel module for GPUDirect with its content, or "" without the module.

    NCCL looks for the module at the same paths (gdr.cc).
    """
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
    """Return whether NICs can read GPU memory through DMA-BUF.

    That needs the driver's open kernel module and Linux 5.12 or later.
    """
    kernel = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", reader.text("/proc/sys/kernel/osrelease") or "")
    is_open = "Open Kernel Module" in read_driver(reader)
    return bool(kernel and is_open and (int(kernel[1]), int(kernel[2])) >= (5, 12))


_CAP_SYS_NICE = 1 << 23
"""The bit of CAP_SYS_NICE in CapEff (include/uapi/linux/capability.h of Linux)."""


def numa_fault(reader: Reader) -> str:
    """Return evidence that the container's system call filter refuses NUMA calls, or "" if it does not.

    Docker's filter allows these calls only to a process with CAP_SYS_NICE.
    """
    status = reader.text("/proc/self/status") or ""
    # "Seccomp: 2" means that a filter is active.
    seccomp = re.search(r"^Seccomp:\s*2$", status, re.MULTILINE)
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", status, re.MULTILINE)
    if not seccomp or not capabilities or int(capabilities[1], 16) & _CAP_SYS_NICE:
        return ""
    lines = f"{seccomp[0]}, {capabilities[0]}".replace("\t", " ")
    return f"/proc/self/status: {lines}, without CAP_SYS_NICE"
