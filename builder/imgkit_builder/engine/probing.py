"""Runs the base once to learn its Python, torch and NCCL; the result is cached by image id."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.engine import containers
from imgkit_builder.engine.connection import Engine
from imgkit_builder.image import inside
from imgkit_builder.oci.manifest import BaseImage, Probe
from imgkit_entrypoints import json_text

SCHEMA = 1


def probe(engine: Engine, base: BaseImage) -> Probe:
    """Versions inside `base`; `Probe.skipped` is the reason where it could not run.

    Notes
    -----
    Importing torch takes seconds, so the result is cached. The content behind an image id never changes,
    so a cached result never becomes wrong.
    """
    found = _known(base.id)
    if found is not None:
        return found
    name = base.name if engine.names_manifests else base.id or base.name
    finished = containers.run(engine, name, inside.argv(), platform=base.platform)
    return _learned(base.id, finished.output) or Probe(
        skipped=_why_not(engine, base, finished.returncode, finished.output)
    )


def _learned(image_id: str, output: str) -> Probe | None:
    """The probe in the `output` of ``image.inside``, which is kept for later; None where it has none."""
    seen = inside.parse(output)
    if seen is None:
        return None
    found = Probe(
        python=seen.python,
        torch=seen.torch,
        cuda=seen.cuda,
        nccl=seen.nccl,
        pip_conflicts=seen.pip_conflicts or (),
    )
    text = json.dumps({"schema": SCHEMA, **dataclasses.asdict(found)}, indent=2)
    files.write_cache(_kept(image_id), text + "\n")
    return found


def _why_not(engine: Engine, base: BaseImage, returncode: int, output: str) -> str:
    if returncode == containers.NOT_FOUND:
        return "the base has no python3"
    if "exec format error" in output.lower():
        return f"the base is {base.platform}, but the engine runs {engine.platform} and has no emulator"
    lines = output.strip().splitlines()
    return f"python3 failed with exit code {returncode}: {lines[-1] if lines else 'no output'}"


def _kept(image_id: str) -> Path:
    return files.cache_dir() / "probe" / f"{image_id.partition(':')[2] or 'unknown'}.json"


def _known(image_id: str) -> Probe | None:
    """The probe of an earlier run."""
    try:
        data = json_text.parse(files.read_own(_kept(image_id)))
        if data.pop("schema") != SCHEMA:
            return None
        data["pip_conflicts"] = tuple(data["pip_conflicts"])
        return Probe(**data)
    except (OSError, ValueError, KeyError, TypeError):
        return None
