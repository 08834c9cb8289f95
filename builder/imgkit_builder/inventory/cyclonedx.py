"""An inventory as CycloneDX 1.6 JSON (https://cyclonedx.org/docs/1.6/json/); equal ones give equal bytes."""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import Any

from imgkit_builder import __version__
from imgkit_builder.inventory.packages import BakedFile, Inventory, Licence, Package
from imgkit_builder.inventory.purl import purl
from imgkit_builder.inventory.spdx import time_text

_SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
_IMAGE = "image"


def document(inventory: Inventory) -> str:
    """The document that lists `inventory`."""
    components = [
        *([_base(inventory)] if inventory.base else []),
        *(_component(one, inventory) for one in inventory.packages),
        *(_file(one) for one in inventory.baked),
    ]
    data: dict[str, Any] = {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time_text(inventory),
            "tools": {"components": [{"type": "application", "name": "imgkit", "version": __version__}]},
            "component": {
                "type": "container",
                "bom-ref": _IMAGE,
                "name": inventory.recipe or "image",
                "properties": [{"name": "imgkit:platform", "value": f"linux/{inventory.arch}"}],
            },
        },
        "components": components,
        "dependencies": [{"ref": _IMAGE, "dependsOn": [one["bom-ref"] for one in components]}],
    }
    if inventory.left_out:
        data["properties"] = [{"name": "imgkit:left-out", "value": one} for one in inventory.left_out]
    digest = hashlib.sha256(json.dumps(data).encode()).digest()
    # The bits of a random UUID, taken from the content.
    data["serialNumber"] = f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}"
    return json.dumps(data, indent=1) + "\n"


def _base(inventory: Inventory) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "container", "bom-ref": "base", "name": inventory.base}
    if digest := inventory.base_digest.removeprefix("sha256:"):
        found |= {"version": inventory.base_digest, "hashes": [{"alg": "SHA-256", "content": digest}]}
    return found


def _component(package: Package, inventory: Inventory) -> dict[str, Any]:
    url = purl(package, inventory)
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"{url}#{package.folder}" if package.folder else url,
        "name": package.name,
        "version": package.version,
        "purl": url,
    }
    if licences := _licences(package.licence):
        found["licenses"] = licences
    if package.sha256:
        found["hashes"] = [{"alg": "SHA-256", "content": package.sha256}]
    if package.url:
        found["externalReferences"] = [{"type": "distribution", "url": package.url}]
    if package.folder:
        found["properties"] = [{"name": "imgkit:folder", "value": package.folder}]
    return found


def _licences(licence: Licence) -> list[dict[str, Any]]:
    if licence.spdx:
        return [{"expression": licence.spdx}]
    return [{"license": {"name": licence.stated}}] if licence.stated else []


def _file(one: BakedFile) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": one.path,
        "name": one.path,
        "hashes": [{"alg": "SHA-1", "content": one.sha1}, {"alg": "SHA-256", "content": one.sha256}],
    }
