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
from imgkit_entrypoints.facts import NOT_FILES, Reader, health
from imgkit_entrypoints.facts.reader import Entry, Recorder, entries
from imgkit_entrypoints.facts.software import absent_files, image_env

_MANIFEST = "opt/imgkit/manifest.json"


def save(target: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """Write the archive; returns the names of variables about a launch that were left out.

    Raises
    ------
    UsageError : `target` cannot be written.
    """
    members = {
        entry.path: entry
        for entry in (*facts.snapshot(env=env), *_more(Reader(root=facts.root_of(env)), env))
    }
    kept, left_out = saved_environment.chosen(env)
    variables = saved_environment.to_text(kept)
    members[ENVIRONMENT] = Entry(path=ENVIRONMENT, kind="file", content=variables)
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


def how_to_replay(target: Path) -> str:
    """Commands that replay the archive on another machine."""
    name = shlex.quote(target.name)
    return (
        f"mkdir node && tar -xzf {name} -C node && IMGKIT_ROOT=node dist-doctor, "
        "also dist-env and dist-run --dry-run"
    )


def _more(reader: Reader, env: Mapping[str, str]) -> Iterator[Entry]:
    """Files that the checks and the recipe's facts read besides `facts.gather`."""
    text = reader.text(str(system.SYSTEM_JSON))
    try:
        known = system.from_json(text) if text else None
    except (ValueError, TypeError, KeyError):
        known = None
    if text and known is not None:
        # Only variables that a replay reads: a recipe's author may have written a secret into it.
        data = json_text.parse(text)
        data["env"] = saved_environment.chosen(known.env)[0]
        text = json.dumps(data)
    if text:
        yield Entry(path=str(system.SYSTEM_JSON).lstrip("/"), kind="file", content=text + "\n")
    # Only what a replay reads of the manifest, which has the whole environment of the base image.
    try:
        platform = json_text.parse(reader.text(f"/{_MANIFEST}") or "{}").get("platform")
    except (ValueError, AttributeError):
        platform = None
    if isinstance(platform, str):
        kept: dict[str, object] = {"platform": platform}
        if (image := image_env(reader)) is not None:
            # The empty PATH: a replay knows that no other variable of a launch is the image's.
            kept["base"] = {"env": {"PATH": "", **saved_environment.chosen(image)[0]}}
        yield Entry(path=_MANIFEST, kind="file", content=json.dumps(kept) + "\n")
    for name in reader.names("/sys/class/iommu"):
        yield Entry(path=f"sys/class/iommu/{name}", kind="folder")
    if reader.exists("/usr/local/cuda/compat"):
        yield Entry(path="usr/local/cuda/compat", kind="folder")
    host = facts.gather(env=env)
    recorder = Recorder(root=reader.root)
    health.links(recorder, host)
    health.port_errors(recorder, host)
    absent_files(recorder, env)
    yield from (entry for entry in entries(recorder, {}) if entry.path != NOT_FILES)
    if host.gpu_devices:
        for path, text in (
            (health.NVIDIA_SMI, health.nvidia_smi(reader)),
            (health.XIDS, health.xids(reader)),
        ):
            yield Entry(path=path.lstrip("/"), kind="file", content=text + "\n")
    # Only the line of a library that a check reads.
    path, own = software.image_glibc(host, reader)
    versions = {**software.needed_glibc(host, reader), **({path: own} if own else {})}
    for name, newest in versions.items():
        yield Entry(path=name.lstrip("/"), kind="file", content=f"GLIBC_2.{newest}\n")


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.path)
    info.mode = 0o755 if entry.kind == "folder" else 0o644
    if entry.kind == "folder":
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    elif entry.kind == "link":
        info.type, info.linkname = tarfile.SYMTYPE, entry.content
        archive.addfile(info)
    else:
        # Also texts that others wrote: mount options, messages of drivers, settings of NCCL.
        data = secret_patterns.masked(entry.content).encode("utf-8", "surrogateescape")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
