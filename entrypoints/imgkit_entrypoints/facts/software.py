"""Software of image and driver: libraries, NCCL's version and configuration files, GPUDirect."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts.compute import NVIDIA_FILES, driver
from imgkit_entrypoints.facts.host_facts import Library, Setting
from imgkit_entrypoints.facts.reader import Reader
from imgkit_entrypoints.system import SYSTEM_JSON

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
)

_CUDA = "libcuda.so.1"


def library_folders(reader: Reader, env: Mapping[str, str]) -> tuple[str, ...]:
    """Folders in which the dynamic linker looks, in its order."""
    machine = platform.machine() if reader.live else str(reader.not_files().get("arch") or platform.machine())
    configured = (
        line.strip()
        for name in reader.names("/etc/ld.so.conf.d")
        for line in (reader.text(f"/etc/ld.so.conf.d/{name}") or "").splitlines()
        if line.startswith("/")
    )
    triple = f"{machine}-linux-gnu"
    fixed = (f"/lib/{triple}", f"/usr/lib/{triple}", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
    own = (item for item in env.get("LD_LIBRARY_PATH", "").split(":") if item.startswith("/"))
    return tuple(dict.fromkeys((*own, *configured, *fixed)))


def libraries(reader: Reader, env: Mapping[str, str], plugin_files: Sequence[str]) -> tuple[Library, ...]:
    """First place of each library that a fabric needs, and of `plugin_files`, which may be paths."""
    folders = library_folders(reader, env)
    found = []
    for name in dict.fromkeys((*LIBRARIES, *plugin_files)):
        places = (name,) if name.startswith("/") else (f"{folder}/{name}" for folder in folders)
        path = next((place for place in places if reader.exists(place)), None)
        if path:
            found.append(Library(name=name, path=path, target=reader.target(path)))
        elif name in plugin_files and reader.live and f"/{name}\0".encode() in _linker_cache():
            # A site's own ld.so.conf may name folders that are not read here.
            found.append(Library(name=name, path=name, target=name))
    return tuple(found)


NET_PLUGIN = "NCCL_NET_PLUGIN"
_NO_FILES = ("none", "STATIC_PLUGIN")
"""Values of `NET_PLUGIN` for which NCCL opens no file."""


def plugins(value: str) -> tuple[str, ...]:
    """The plug-ins in a value of `NET_PLUGIN`, which newer versions of NCCL read as a list.

    A relative path is left out: it depends on the folder in which a worker starts.
    """
    words = (part.strip() for part in value.split(","))
    return tuple(
        word for word in words if word and word not in _NO_FILES and (word.startswith("/") or "/" not in word)
    )


def plugin_files(word: str) -> tuple[str, ...]:
    """Files that NCCL tries to open for a plug-in, in its order."""
    return (word,) if "/" in word else (word, f"libnccl-net-{word}.so")


def named_plugins(reader: Reader, env: Mapping[str, str], settings: Sequence[Setting]) -> tuple[str, ...]:
    """Files of the plug-ins that the environment, an nccl.conf or the recipe names."""
    recipe = baked(reader, str(SYSTEM_JSON)).get("env")
    values = (
        env.get(NET_PLUGIN),
        *(item.value for item in settings if item.name == NET_PLUGIN),
        recipe.get(NET_PLUGIN) if isinstance(recipe, dict) else None,
    )
    words = (word for value in values if isinstance(value, str) for word in plugins(value))
    return tuple(dict.fromkeys(name for word in words for name in plugin_files(word)))


def image_env(reader: Reader) -> Mapping[str, str] | None:
    """Variables that the image sets, of its base and its recipe; None if no manifest states them."""
    manifest = baked(reader, MANIFEST_JSON)
    base, own = manifest.get("base"), manifest.get("env")
    inherited = base.get("env") if isinstance(base, dict) else None
    # Every image has a PATH: without a variable, nothing is known about its base.
    if not inherited or not isinstance(inherited, dict):
        return None
    both = {**inherited, **(own if isinstance(own, dict) else {})}
    return {name: value for name, value in both.items() if isinstance(value, str)}


def baked(reader: Reader, path: str) -> dict[str, Any]:
    """A JSON object of the image; empty if it is none, about which the reader of its values complains."""
    try:
        data = json_text.parse(reader.text(path) or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def closed_gpus(reader: Reader, env: Mapping[str, str]) -> Mapping[str, str]:
    """Device files of NVIDIA GPUs that no program here can use, each with the reason.

    Apptainer mounts the whole /dev, also without ``--nv``, which brings the driver's library. Slurm closes
    the GPUs of other jobs to this one. A saved tree lists both under ``closed``.
    """
    paths = [f"/dev/{name}" for name in reader.names("/dev", NVIDIA_FILES)]
    if not reader.live:
        listed = reader.not_files().get("closed", ())
        return {path: "closed" for path in paths if path in listed}
    found = paths and any(reader.exists(f"{folder}/{_CUDA}") for folder in library_folders(reader, env))
    if paths and not found and f"/{_CUDA}\0".encode() not in _linker_cache():
        return dict.fromkeys(paths, f"no {_CUDA}, which --nv adds")
    # They are not opened: the driver of an idle GPU takes seconds for that.
    return {
        path: "not accessible to this process" for path in paths if not os.access(path, os.R_OK | os.W_OK)
    }


def _linker_cache() -> bytes:
    # Not through the reader, which a saved tree would keep all of it from.
    try:
        return files.read_bytes(Path("/etc/ld.so.cache"))
    except OSError:
        return b""


def verbs_providers(reader: Reader, env: Mapping[str, str]) -> tuple[str, ...]:
    """Names of libibverbs' drivers, such as ``mlx5``; without a driver NCCL reports "No device found"."""
    found = {
        name.removesuffix(".driver") for name in reader.names("/etc/libibverbs.d") if name.endswith(".driver")
    }
    for folder in library_folders(reader, env):
        for name in reader.names(f"{folder}/libibverbs", r"lib\w+-rdmav\d+\.so"):
            found.add(name.removeprefix("lib").rsplit("-rdmav", 1)[0])
    return tuple(sorted(found))


def torch(reader: Reader) -> str:
    """Version of the image's torch, such as ``2.3.0a0+40ec155e58.nv24.3``; empty if there is none.

    The source is torch's version.py: importing torch takes seconds, and importlib.metadata would take a
    quarter of our start-up.
    """
    _, text = _torch_version_file(reader)
    found = _VERSION_LINE.search(text)
    return found[1] if found else ""


_VERSION_LINE = re.compile(r"^__version__ = '([^']+)'", re.MULTILINE)


def _torch_version_file(reader: Reader) -> tuple[str, str]:
    """Path and content of the version.py of the torch that Python finds; empty if there is none."""
    for folder in sys.path:
        path = f"{folder}/torch/version.py"
        text = reader.text(path) if folder.startswith("/") else None
        if text and _VERSION_LINE.search(text):
            return path, text
    return "", ""


def rocm(reader: Reader) -> str:
    """Evidence that this image is made for AMD GPUs; empty if it is not.

    torch decides where there is one: a node's ROCm may be mounted into a container with another torch.
    """
    path, text = _torch_version_file(reader)
    if path:
        hip = re.search(r"^hip(?:: [^=\n]+)? = '([^'\n]+)'", text, re.MULTILINE)
        return f"{path}: hip = {hip[1]}" if hip else ""
    return next((place for place in ("/opt/rocm/.info/version", "/opt/rocm") if reader.exists(place)), "")


def nccl(reader: Reader, env: Mapping[str, str]) -> tuple[str, str]:
    """Version of the NCCL that torch loads here, and its source; both are empty if unknown.

    torch is not imported, because that takes seconds. A torch wheel finds the NCCL wheel beside it before any
    library path; an NGC image has NCCL as a system library.

    Raises
    ------
    UsageError : ``IMGKIT_NCCL_VERSION`` is not a version.
    """
    stated = env.get("IMGKIT_NCCL_VERSION")
    if stated:
        version = _version(stated)
        if not version or version != stated:
            raise UsageError(
                f"{stated!r} is not an NCCL version",
                where="IMGKIT_NCCL_VERSION",
                hint="give, for example, 2.20.5",
            )
        return version, f"IMGKIT_NCCL_VERSION={stated}"
    for folder in sys.path:
        wheels = reader.names(folder, r"nvidia_nccl_cu\d+-\d.*\.dist-info") if folder.startswith("/") else ()
        for name in wheels:
            version = _version(name.split("-")[1])
            if version:
                return version, f"{folder}/{name}"
    for folder in library_folders(reader, env):
        target = reader.target(f"{folder}/libnccl.so.2")
        found = re.search(r"libnccl\.so\.(\d+\.\d+\.\d+)$", target)
        if found:
            return found[1], f"{folder}/libnccl.so.2 -> {target}"
    said = _version(env.get("NCCL_VERSION", ""))
    return (said, f"NCCL_VERSION={env['NCCL_VERSION']}") if said else ("", "")


def _version(text: str) -> str:
    found = re.match(r"\d+\.\d+(\.\d+)?", text)
    return found[0] if found else ""


def nccl_settings(reader: Reader, env: Mapping[str, str]) -> tuple[Setting, ...]:
    """Settings of nccl.conf files; the first file that names a variable counts, after the environment."""
    home = env.get("HOME", "")
    own = env.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home.startswith("/") else "")
    found: dict[str, Setting] = {}
    for path in (own, "/etc/nccl.conf"):
        for line in (reader.text(path) or "").splitlines() if path else ():
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#"):
                found.setdefault(name.strip(), Setting(name=name.strip(), value=value.strip(), path=path))
    return tuple(found.values())


FILES = ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE", "NCCL_IBVERBS_LIB")
"""Variables that name a file, which NCCL reads at its start."""


def absent_files(reader: Reader, env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Variables of `env` whose file does not exist: what is wrong, and the remedy."""
    wrong = [name for name in FILES if env.get(name, "").startswith("/") and not reader.exists(env[name])]
    return tuple(
        (
            f"{name}={env[name]}: there is no such file, so NCCL ignores it or exits",
            f"bind the file into the container (--bind {env[name]}), or unset {name}",
        )
        for name in wrong
    )


def peermem(reader: Reader) -> str:
    """Version file of the peer memory module with its content; empty if there is none (NCCL's gdr.cc)."""
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
    """True if GPU memory can be shared as DMA-BUF: open kernel module of the driver, and Linux >= 5.12."""
    found = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", reader.text("/proc/sys/kernel/osrelease") or "")
    return bool(
        found and "Open Kernel Module" in driver(reader) and (int(found[1]), int(found[2])) >= (5, 12)
    )
