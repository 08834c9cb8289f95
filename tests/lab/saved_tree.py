"""Write a saved machine as a folder, as tar unpacks the archive of ``dist-doctor --bundle``."""

from __future__ import annotations

from pathlib import Path

from imgkit_entrypoints.facts.reader import Entry


def write_tree(entries: tuple[Entry, ...], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        path = folder / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if entry.kind == "folder":
            path.mkdir(exist_ok=True)
        elif entry.kind == "link":
            path.symlink_to(entry.content)
        else:
            path.write_text(entry.content)
