"""``dist-doctor --bundle FILE``: this node saved as an archive, to replay its decisions elsewhere."""

from __future__ import annotations

import io
import json
import os
import shlex
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from imgkit_entrypoints import facts, files, json_text, secret_patterns, system
from imgkit_entrypoints.doctor import saved_environment
from imgkit_entrypoints.doctor.checks import software
from imgkit_entrypoints.doctor.saved_environment import ENVIRONMENT
from imgkit_entrypoints.facts import NOT_FILES, HostFacts, Reader, health, host_libs
from imgkit_entrypoints.facts.reader import Entry, Recorder, entries
from imgkit_entrypoints.facts.software import MANIFEST_JSON, absent_files, image_env, manifest
from imgkit_entrypoints.system import SYSTEM_JSON


def save(target: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """Write the archive; return the names of variables about a launch that were left out.

    Raises
    ------
    UsageError : `target` cannot be written.
    """
    reader, host = Reader(root=facts.root_of(env)), facts.gather(env=env)
    variables, left_out = saved_environment.select(env)
    texts = (
        *_image_files(reader),
        *_check_files(reader, host),
        (ENVIRONMENT, saved_environment.to_text(variables)),
    )
    members = {entry.path: entry for entry in (*facts.snapshot(env=env), *_check_entries(reader, host, env))}
    members |= {path.lstrip("/"): Entry(path.lstrip("/"), "file", text) for path, text in texts}
    hint = "--bundle /tmp/node.tar.gz"
    with (
        files.replacing(target, failed="cannot write the bundle", hint=hint) as file,
        tarfile.open(fileobj=file, mode="w:gz") as archive,
    ):
        # Host names and paths are nobody else's business until the user sends them.
        os.fchmod(file.fileno(), 0o600)
        for path in sorted(members):
            _add(archive, members[path])
    return left_out


def replay_command(target: Path) -> str:
    """Return the commands that replay the archive on another machine."""
    name = shlex.quote(target.name)
    return (
        f"mkdir node && tar -xzf {name} -C node && IMGKIT_ROOT=node dist-doctor, "
        "also dist-env and dist-run --dry-run"
    )


def _image_files(reader: Reader) -> Iterator[tuple[str, str]]:
    """Yield what a replay reads of the image's own files, each as a path and its text."""
    text = reader.text(str(SYSTEM_JSON))
    if text:
        try:
            # Only variables that a replay reads: a recipe's author may have written a secret into it.
            env = system.from_json(text).env
            text = json.dumps({**json_text.parse(text), "env": saved_environment.select(env)[0]})
        except (ValueError, TypeError, KeyError):
            pass  # the replay shall complain about it, too
        yield str(SYSTEM_JSON), text + "\n"
    # Only what a replay reads of the manifest, which has the whole environment of the base image.
    platform = manifest(reader).get("platform")
    if isinstance(platform, str):
        values: dict[str, object] = {"platform": platform}
        if (image := image_env(reader)) is not None:
            # The empty PATH: a replay knows that no other variable of a launch is the image's.
            values["base"] = {"env": {"PATH": "", **saved_environment.select(image)[0]}}
        yield MANIFEST_JSON, json.dumps(values) + "\n"


def _check_files(reader: Reader, host: HostFacts) -> Iterator[tuple[str, str]]:
    """Yield what checks read of commands and libraries, each as a path and its text."""
    if host.gpu_devices:
        yield health.NVIDIA_SMI, health.nvidia_smi(reader) + "\n"
        yield health.XIDS, health.xids(reader) + "\n"
    # Only the line of a library that a check reads.
    path, version = software.image_glibc(host, reader)
    versions = {**software.needed_glibc(host, reader), **({path: version} if version else {})}
    for name, newest in versions.items():
        yield name, f"GLIBC_2.{newest}\n"


def _check_entries(reader: Reader, host: HostFacts, env: Mapping[str, str]) -> Iterator[Entry]:
    """Yield the files and folders that checks read besides `facts.gather`."""
    recorder = Recorder(root=reader.root)
    recorder.names("/sys/class/iommu")
    recorder.exists(host_libs.COMPAT)
    health.links(recorder, host)
    health.port_errors(recorder, host)
    absent_files(recorder, env)
    yield from (entry for entry in entries(recorder, {}) if entry.path != NOT_FILES)


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.path)
    info.mode, data = 0o644, b""
    if entry.kind == "folder":
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    elif entry.kind == "link":
        info.type, info.linkname = tarfile.SYMTYPE, entry.content
    else:
        # Also texts that others wrote: mount options, messages of drivers, settings of NCCL.
        data = secret_patterns.masked(entry.content).encode("utf-8", "surrogateescape")
        info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
