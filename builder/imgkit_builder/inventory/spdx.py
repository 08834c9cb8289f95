"""An inventory as SPDX 2.3 JSON (https://spdx.github.io/spdx-spec/v2.3/).

The same inventory gives the same bytes: the namespace, which must differ between documents, is their digest.
Scanners find a package in their databases by its URL (github.com/package-url/purl-spec). Licenses are left
out, which SPDX 2.3 reads as NOASSERTION.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any
from urllib.parse import quote, urlencode

from imgkit_builder.inventory.packages import BakedFile, Inventory, Package
from imgkit_entrypoints import __version__

_NAMESPACE = "https://spdx.org/spdxdocs/imgkit-"
_NONE = "NOASSERTION"
_IMAGE = "SPDXRef-Image"
_BASE = "SPDXRef-Base"


def spdx_document(inventory: Inventory) -> str:
    """Return the document that lists `inventory`."""
    name = inventory.recipe or "image"
    packages = [_image_element(name, _IMAGE, comment=f"linux/{inventory.arch}")]
    packages += [_base_element(inventory)] if inventory.base else []
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(inventory.created_s))
    listed = [_package_element(item, inventory) for item in inventory.packages]
    baked = [_file_element(item) for item in inventory.baked]
    data: dict[str, Any] = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "creationInfo": {"created": created, "creators": [f"Tool: imgkit-{__version__}"]},
        "packages": [*packages, *listed],
        "files": baked,
        "relationships": [
            _relationship("SPDXRef-DOCUMENT", "DESCRIBES", _IMAGE),
            *([_relationship(_IMAGE, "DESCENDANT_OF", _BASE)] if inventory.base else []),
            *(_relationship(_IMAGE, "CONTAINS", item["SPDXID"]) for item in listed),
            # A package with files would need a digest over all files of the image.
            *(_relationship("SPDXRef-DOCUMENT", "DESCRIBES", item["SPDXID"]) for item in baked),
        ],
    }
    if inventory.left_out:
        data["comment"] = "left out: " + "; ".join(inventory.left_out)
    data["documentNamespace"] = _NAMESPACE + hashlib.sha256(json.dumps(data).encode()).hexdigest()
    return json.dumps(data, indent=1) + "\n"


def _image_element(name: str, spdx_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "SPDXID": spdx_id,
        "downloadLocation": _NONE,
        "filesAnalyzed": False,
        "primaryPackagePurpose": "CONTAINER",
        **fields,
    }


def _base_element(inventory: Inventory) -> dict[str, Any]:
    digest = inventory.base_digest
    if not digest:
        return _image_element(inventory.base, _BASE)
    checksums = [_sha256_element(digest.removeprefix("sha256:"))]
    return _image_element(inventory.base, _BASE, versionInfo=digest, checksums=checksums)


def _sha256_element(digest: str) -> dict[str, str]:
    return {"algorithm": "SHA256", "checksumValue": digest}


def _package_element(package: Package, inventory: Inventory) -> dict[str, Any]:
    purl = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": package_url(package, inventory),
    }
    element: dict[str, Any] = {
        "name": package.name,
        "SPDXID": _spdx_id(package.kind, package.name, package.version, package.architecture, package.folder),
        "versionInfo": package.version,
        "downloadLocation": package.url or _NONE,
        "filesAnalyzed": False,
        "externalRefs": [purl],
    }
    if package.sha256:
        element["checksums"] = [_sha256_element(package.sha256)]
    if package.folder:
        element["comment"] = f"in {package.folder}"
    return element


def _file_element(item: BakedFile) -> dict[str, Any]:
    return {
        "fileName": f".{item.path}",
        "SPDXID": _spdx_id("File", item.path),
        "checksums": [{"algorithm": "SHA1", "checksumValue": item.sha1}, _sha256_element(item.sha256)],
        "comment": "put there by imgkit",
    }


def _spdx_id(kind: str, *parts: str) -> str:
    """Return an id of letters and digits that stands for `parts` alone."""
    return f"SPDXRef-{kind}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]}"


def _relationship(item: str, kind: str, related: str) -> dict[str, str]:
    return {"spdxElementId": item, "relationshipType": kind, "relatedSpdxElement": related}


def package_url(package: Package, inventory: Inventory) -> str:
    """Return the package URL of `package` in the image of `inventory`."""
    version = quote(package.version, safe=":")
    if package.kind == "pypi":
        return f"pkg:pypi/{package.name.lower().replace('_', '-')}@{version}"
    distribution = inventory.distribution or "debian"
    qualifiers = {"arch": package.architecture} if package.architecture else {}
    if inventory.distribution and inventory.release:
        qualifiers["distro"] = f"{distribution}-{inventory.release}"
    end = f"?{urlencode(qualifiers)}" if qualifiers else ""
    return f"pkg:deb/{distribution}/{quote(package.name, safe='')}@{version}{end}"
