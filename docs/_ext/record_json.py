"""Record one JSON object per verb for the site: `python docs/_ext/record_json.py FOLDER`.

FOLDER has the standard output of each verb as NAME.json, with the command on the first line. The objects are
shortened for reading, and replace those of the same commands in docs/_ext/json_examples.json; others stay.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ITEMS, TEXT, DIGEST = 1, 100, 12


def shorten(value: Any) -> Any:
    """Return `value` with the first item of each list, and with long texts and digests cut."""
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        words = all(isinstance(item, str) for item in value)
        return [shorten(item) for item in (value if words and len(value) < 9 else value[:ITEMS])]
    if isinstance(value, str):
        text = re.sub(rf"\b([0-9a-f]{{{DIGEST}}})[0-9a-f]{{28,}}\b", r"\1...", value)
        return text if len(text) <= TEXT else text[:TEXT] + "..."
    return value


def main(folder: Path) -> None:
    """Record the examples of all files in `folder`."""
    target = Path(__file__).with_name("json_examples.json")
    examples = json.loads(target.read_text(encoding="utf-8"))
    for path in sorted(folder.glob("*.json")):
        command, _, text = path.read_text(encoding="utf-8").partition("\n")
        examples[command] = shorten(json.loads(text))
    examples = dict(sorted(examples.items(), key=lambda item: (item[0].startswith("dist-"), item[0])))
    target.write_text(json.dumps(examples, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
