"""Read which software the image and the driver provide: libraries, NCCL and its configuration, GPUDirect.

All facts come from files. No library is loaded and torch is not imported, because that takes seconds.
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

# Libraries that matter for the network, by the names under which programs open them.
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
_BEFORE_VERSION = b"Initializing aws-ofi-nccl "
"""Part of a message of aws-ofi-nccl. In the plug-in's file, the version directly follows this text."""
_PLUGIN_VERSION = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})*")


def library_folders(reader: Reader, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders in which the dynamic linker searches for libraries, in the linker's order.

    The folders come from LD_LIBRARY_PATH, /etc/ld.so.conf.d and the linker's built-in list. Relative folders
    are left out.
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
    """Find the network's libraries on the library path, and return those that exist.

    If several folders contain a library, the result has the file in the first folder, which programs would
    load.

    Parameters
    ----------
    plugin_files : further libraries to find, by name or absolute path (`named_plugins`).
    """
    folders = library_folders(reader, env)
    libraries = []
    inspected: dict[str, LibraryDetails] = {}
    for name in dict.fromkeys((*LIBRARIES, *plugin_files)):
        path = _find_file(reader, name, folders)
        if path:
            target = reader.target(path)
            if target not in inspected:  # the plug-in's two names are usually links to one file
                inspected[target] = inspect_library(reader, name, target)
            version, opens = inspected[target]
            libraries.append(Library(name=name, path=path, target=target, version=version, opens=opens))
        elif name in plugin_files and reader.live and _is_in_linker_cache(name):
            # /etc/ld.so.conf may list folders that `library_folders` does not read. The dynamic linker's
            # cache has the names of all libraries in these folders. It is the cache of this machine, so it
            # counts only if `reader` reads this machine's files and not a saved copy of another's (`live`).
            libraries.append(Library(name=name, path=name, target=name))
    return tuple(libraries)


def _find_file(reader: Reader, name: str, folders: Sequence[str]) -> str:
    """Return the path of the first file `name` in `folders`, or "" if there is none.

    If `name` is an absolute path, `folders` are ignored.
    """
    paths = [name] if name.startswith("/") else [f"{folder}/{name}" for folder in folders]
    for path in paths:
        if reader.exists(path):
            return path
    return ""


class LibraryDetails(NamedTuple):
    """What is found in the files of libfabric and of NCCL's plug-in aws-ofi-nccl. A text may be empty."""

    version: str = ""
    opens: str = ""
    """See `Library.opens`."""


def inspect_library(reader: Reader, name: str, target: str) -> LibraryDetails:
    """Return the version of libfabric or aws-ofi-nccl, and the library that aws-ofi-nccl opens at run time.

    For libfabric, the second text is "". For other libraries, both texts are "".

    Parameters
    ----------
    name : the name under which programs open the library, such as ``libnccl-net.so``.
    target : the file of the library.
    """
    if name.startswith("libfabric."):
        return LibraryDetails(_find_libfabric_version(reader, target))
    if not name.startswith("libnccl-net"):
        return LibraryDetails()
    content = reader.content(target) or b""
    version = _find_plugin_version(content)
    if not version:  # another plug-in of NCCL
        return LibraryDetails()
    # A program that opens a library by name contains the name between zero bytes.
    has_cudart_name = f"\0{_CUDART}\0".encode() in content
    return LibraryDetails(version, _CUDART if has_cudart_name else "")


def _find_plugin_version(content: bytes) -> str:
    """Return the version of aws-ofi-nccl in the content of its file, or "" if it is another plug-in.

    The file contains the text ``Initializing aws-ofi-nccl 1.9.1``, a message of the plug-in.
    """
    # `find` is used because a regular expression for the whole text would take twice as long.
    start = content.find(_BEFORE_VERSION)
    if start < 0:
        return ""
    match = _PLUGIN_VERSION.match(content, start + len(_BEFORE_VERSION))
    return match[0].decode() if match else ""


def _find_libfabric_version(reader: Reader, target: str) -> str:
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
    """Split a value of `NET_PLUGIN` into plug-ins: ``ofi,/opt/libnccl-net.so`` names two of them.

    Newer versions of NCCL read the value as a list. Relative paths are left out, because they depend on the
    folder in which a worker starts. Values that stand for no file are left out, too.
    """
    names = []
    for name in map(str.strip, value.split(",")):
        is_relative = "/" in name and not name.startswith("/")
        if name and name not in _NO_FILES and not is_relative:
            names.append(name)
    return tuple(names)


def plugin_files(plugin: str) -> tuple[str, ...]:
    """Return the files that NCCL tries to open for a plug-in: ``ofi -> ofi, libnccl-net-ofi.so``.

    If `plugin` is a path, NCCL tries only this file.
    """
    return (plugin,) if "/" in plugin else (plugin, f"libnccl-net-{plugin}.so")


def named_plugins(
    recipe: SystemFacts, env: Mapping[str, str], settings: Sequence[Setting]
) -> tuple[str, ...]:
    """Return the files of all network plug-ins that the environment, nccl.conf or the recipe names."""
    conf_values = [setting.value for setting in settings if setting.name == NET_PLUGIN]
    file_names: dict[str, None] = {}  # each name once, in order
    for value in (env.get(NET_PLUGIN, ""), *conf_values, recipe.env.get(NET_PLUGIN, "")):
        for name in split_plugins(value):
            file_names.update(dict.fromkeys(plugin_files(name)))
    return tuple(file_names)


def read_recipe(reader: Reader) -> SystemFacts:
    """Return what the recipe says about the cluster, or the defaults if its file cannot be read.

    The file is /opt/imgkit/system.json. Errors are ignored, because `facts.system_facts` reads the same file
    and reports them to the user.
    """
    try:
        return system.from_json(reader.text(str(system.SYSTEM_JSON)) or "{}")
    except (ValueError, TypeError, KeyError):
        return SystemFacts()


def image_env(reader: Reader) -> Mapping[str, str] | None:
    """Return the variables that the image's base and recipe set, or None if they are unknown.

    They are in the image's manifest. If imgkit has not built the image, there is no manifest.
    """
    manifest_values = manifest(reader)  # {} without a manifest
    base, recipe_env = manifest_values.get("base"), manifest_values.get("env")
    base_env = base.get("env") if isinstance(base, dict) else None
    # Every base image sets at least PATH. If the manifest has no variables of the base, they are unknown.
    if not base_env or not isinstance(base_env, dict):
        return None
    # A variable of the recipe replaces that of the base.
    variables = dict(base_env)
    if isinstance(recipe_env, dict):
        variables |= recipe_env
    return {name: value for name, value in variables.items() if isinstance(value, str)}


def manifest(reader: Reader) -> dict[str, Any]:
    """Return the image's manifest (/opt/imgkit/manifest.json), or an empty dict if it cannot be read."""
    try:
        data = json_text.parse(reader.text(MANIFEST_JSON) or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def inaccessible_gpus(reader: Reader, env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the device files of NVIDIA GPUs that programs in this container cannot use, with the reasons.

    There are two possible causes. Apptainer always mounts /dev, but adds the driver's library only with
    ``--nv``. Slurm gives a job no access to the GPUs of other jobs.
    """
    paths = [f"/dev/{name}" for name in reader.names("/dev", NVIDIA_FILES)]
    # In a saved tree of files (IMGKIT_ROOT), it is unknown which device files could be opened.
    if not reader.live:
        return {}
    if paths and not _has_cuda(reader, env):
        return dict.fromkeys(paths, f"no {_CUDA}, which --nv adds")
    # The check uses os.access, because the driver takes seconds to open the device file of an idle GPU.
    inaccessible = [path for path in paths if not os.access(path, os.R_OK | os.W_OK)]
    return dict.fromkeys(inaccessible, "not accessible to this process")


def _has_cuda(reader: Reader, env: Mapping[str, str]) -> bool:
    """Return whether the dynamic linker finds the driver's library (libcuda) in this container."""
    folders = library_folders(reader, env)
    return _find_file(reader, _CUDA, folders) != "" or _is_in_linker_cache(_CUDA)


def _is_in_linker_cache(name: str) -> bool:
    """Return whether the dynamic linker's cache on this machine contains a library with this name.

    The cache (/etc/ld.so.cache) is a binary file in which each path ends with a zero byte.
    """
    try:
        cache = files.read_bytes(Path("/etc/ld.so.cache"))
    except OSError:
        return False
    return f"/{name}\0".encode() in cache


def verbs_providers(reader: Reader, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the installed drivers of libibverbs, which are called providers: ``mlx5``.

    If the provider for a device is missing, NCCL reports "No device found".
    """
    providers = {name.removesuffix(".driver") for name in reader.names("/etc/libibverbs.d", r".*\.driver")}
    for folder in library_folders(reader, env):
        for name in reader.names(f"{folder}/libibverbs", r"lib\w+-rdmav\d+\.so"):
            providers.add(name.removeprefix("lib").rsplit("-rdmav", 1)[0])
    return tuple(sorted(providers))


def torch_version(reader: Reader) -> str:
    """Return the version of the image's torch, such as ``2.3.0a0+40ec155e58.nv24.3``, or an empty text.

    The version is read from the file torch/version.py. An import of torch would take seconds, and
    importlib.metadata would take a quarter of imgkit's start-up time.
    """
    _, text = _find_torch_version_file(reader)
    return _find_assigned_text(text, "__version__")


def _find_torch_version_file(reader: Reader) -> tuple[str, str]:
    """Return the path and the content of torch's version.py, or two empty texts if torch is not installed.

    If several folders contain torch, the file belongs to the one that Python would import.
    """
    for folder in _list_python_folders():
        path = f"{folder}/torch/version.py"
        text = reader.text(path) or ""
        if _find_assigned_text(text, "__version__"):
            return path, text
    return "", ""


def _find_assigned_text(text: str, name: str) -> str:
    """Return the text that torch's version.py assigns to a variable, or "" if it assigns none.

    The line for `name` is ``__version__ = '2.3.0'``, ``cuda: Optional[str] = '12.4'`` or ``hip = None``.
    """
    match = re.search(rf"^{name}(?:: [^=\n]+)? = '([^'\n]+)'", text, re.MULTILINE)
    return match[1] if match else ""


def torch_cuda(reader: Reader) -> str:
    """Return the version of CUDA for which torch is built, or "" if torch is built for CPUs only."""
    _, text = _find_torch_version_file(reader)
    return _find_assigned_text(text, "cuda")


def _list_python_folders() -> tuple[str, ...]:
    """Return the absolute folders from which Python imports modules."""
    return tuple(folder for folder in sys.path if folder.startswith("/"))


def rocm_evidence(reader: Reader) -> str:
    """Return evidence that this image is built for AMD GPUs, or "" if it is not.

    If the image has torch, only the GPUs for which torch is built count. A folder /opt/rocm may be mounted
    from the node, even if torch is built for other GPUs.
    """
    path, text = _find_torch_version_file(reader)
    if path:
        hip_version = _find_assigned_text(text, "hip")
        return f"{path}: hip = {hip_version}" if hip_version else ""
    return next((path for path in ("/opt/rocm/.info/version", "/opt/rocm") if reader.exists(path)), "")


class Nccl(NamedTuple):
    """The version of an installed NCCL library. All texts are empty if it is unknown."""

    version: str = ""
    source: str = ""
    """The evidence for the version."""
    owner: str = ""
    """``torch`` if NCCL comes from a wheel, ``image`` if it is on the library path; otherwise empty."""


def loaded_nccl(reader: Reader, env: Mapping[str, str], on_library_path: Nccl) -> Nccl:
    """Return the version of the NCCL that torch loads.

    A version in ``IMGKIT_NCCL_VERSION`` takes precedence. Otherwise, torch loads NCCL from the wheel that was
    installed with torch, or from the library path.

    Parameters
    ----------
    on_library_path : the NCCL on the library path, which is the result of `image_nccl`.

    Raises
    ------
    UsageError : ``IMGKIT_NCCL_VERSION`` is not a version.
    """
    option = env.get("IMGKIT_NCCL_VERSION")
    if option:
        # The whole text must be a version, without anything before or after it.
        if _version(option) != option:
            problem, hint = f"{option!r} is not an NCCL version", "give, for example, 2.20.5"
            raise UsageError(problem, where="IMGKIT_NCCL_VERSION", hint=hint)
        return Nccl(option, f"IMGKIT_NCCL_VERSION={option}")
    for folder in _list_python_folders():
        # The wheel's metadata is a folder such as nvidia_nccl_cu12-2.20.5.dist-info.
        for name in reader.names(folder, r"nvidia_nccl_cu\d+-\d.*\.dist-info"):
            _, _, wheel_version = name.partition("-")
            version = _version(wheel_version)
            # Another package may have installed the wheel, although torch does not use it.
            if version and _is_linked_to_wheel(reader):
                return Nccl(version, f"{folder}/{name}", "torch")
    return on_library_path


def image_nccl(reader: Reader, env: Mapping[str, str]) -> Nccl:
    """Return the version of the NCCL on the library path.

    It is part of the file's name, such as libnccl.so.2.20.5. If there is no such file, the version is the
    value of NCCL_VERSION, a variable that NVIDIA's images set.
    """
    for folder in library_folders(reader, env):
        real_file = reader.target(f"{folder}/libnccl.so.2")
        # The name libnccl.so.2 is a link, and the name of the file to which it leads has the whole version.
        match = re.search(r"libnccl\.so\.(\d+\.\d+\.\d+)$", real_file)
        if match:
            return Nccl(match[1], f"{folder}/libnccl.so.2 -> {real_file}", "image")
    version = _version(env.get("NCCL_VERSION", ""))
    if not version:
        return Nccl()
    return Nccl(version, f"NCCL_VERSION={env['NCCL_VERSION']}", "image")


def _is_linked_to_wheel(reader: Reader) -> bool:
    """Return whether torch loads NCCL from the installed wheel, and not from the library path.

    If it does, the folder of the wheel is in the RPATH or RUNPATH of torch's library. These are lists of
    folders in which the dynamic linker searches. The torch of an NGC image uses the library path, even if
    another package has installed the wheel.

    If torch's library cannot be read, the result is True, because a wheel of NCCL is usually installed with a
    torch that uses it.
    """
    version_file, _ = _find_torch_version_file(reader)  # "" without torch, so the library is not found below
    torch_folder, _, _ = version_file.rpartition("/")
    try:
        library = elf.read(reader.real_path(f"{torch_folder}/lib/libtorch_cuda.so"))
    except (OSError, elf.NotShared):
        return True
    return any("nvidia/nccl" in folder for folder in (*library.rpath, *library.runpath))


def _version(text: str) -> str:
    """Return the version at the beginning of a text, or "": ``2.20.5-1+cuda12.4 -> 2.20.5``."""
    match = re.match(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else ""


def nccl_settings(reader: Reader, env: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the variables that nccl.conf files set. NCCL reads a file of the system and a file of the user.

    The system's file is /etc/nccl.conf. The user's file is the one in NCCL_CONF_FILE, or ~/.nccl.conf if the
    variable is not set. If both files set a variable, the user's file takes precedence.
    """
    paths = ["/etc/nccl.conf"]
    if env.get("NCCL_CONF_FILE"):
        paths.append(env["NCCL_CONF_FILE"])
    elif env.get("HOME", "").startswith("/"):
        paths.append(f"{env['HOME']}/.nccl.conf")
    settings: dict[str, Setting] = {}
    # The user's file comes first, and `setdefault` keeps its values.
    for path in reversed(paths):
        # Each line is NAME=VALUE. A line that begins with # is a comment.
        for line in (reader.text(path) or "").splitlines():
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#"):
                settings.setdefault(name.strip(), Setting(name=name.strip(), value=value.strip(), path=path))
    return tuple(settings.values())


FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE", "NCCL_IBVERBS_LIB")
"""Variables whose value is the path of a file that NCCL reads at its start."""


def absent_files(reader: Reader, env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return a problem and its remedy for each variable that names a missing file.

    Only the variables in `FILES` are checked. Each of them names a file that NCCL reads, such as
    NCCL_TOPO_FILE.
    """
    problems = []
    for name in FILES:
        path = env.get(name, "")
        if path.startswith("/") and not reader.exists(path):
            problem = f"{name}={path}: there is no such file, so NCCL ignores it or exits"
            problems.append((problem, f"bind the file into the container (--bind {path}), or unset {name}"))
    return tuple(problems)


def find_peermem(reader: Reader) -> str:
    """Return evidence of the kernel module for GPUDirect RDMA, or "" if the module is not loaded.

    The evidence is the path of the module's version file and its content. NCCL looks for the module at the
    same paths (gdr.cc).
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


def supports_dmabuf(reader: Reader) -> bool:
    """Return whether NICs can read GPU memory through DMA-BUF, a mechanism of the kernel.

    This requires the open kernel module of NVIDIA's driver, and Linux 5.12 or later.
    """
    kernel = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", reader.text("/proc/sys/kernel/osrelease") or "")
    is_open = "Open Kernel Module" in read_driver(reader)
    return bool(kernel and is_open and (int(kernel[1]), int(kernel[2])) >= (5, 12))


_CAP_SYS_NICE = 1 << 23
"""The bit of CAP_SYS_NICE in CapEff (include/uapi/linux/capability.h of Linux)."""


def find_numa_fault(reader: Reader) -> str:
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
