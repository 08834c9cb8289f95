"""Write an inventory as SPDX 2.3 JSON (https://spdx.github.io/spdx-spec/v2.3/).

Equal inventories result in equal bytes. The namespace must differ between documents, so it contains a digest
of the document. Scanners find a package in their databases by its package URL
(github.com/package-url/purl-spec). Licenses are left out, which means NOASSERTION in SPDX 2.3.
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
# The word of SPDX for an unknown value.
_UNKNOWN_VALUE = "NOASSERTION"
# The ids of the document, and of the two SPDX packages that represent the image and its base.
_DOCUMENT = "SPDXRef-DOCUMENT"
_IMAGE = "SPDXRef-Image"
_BASE = "SPDXRef-Base"


def spdx_document(inventory: Inventory) -> str:
    """Return the SPDX document about `inventory` as JSON text.

    The same inventory and version of imgkit always give the same text.
    """
    document_name = inventory.recipe or "image"
    image_elements = [_image_element(document_name, _IMAGE, comment=f"linux/{inventory.arch}")]
    relationships = [_relationship(_DOCUMENT, "DESCRIBES", _IMAGE)]
    if inventory.base:
        image_elements.append(_base_element(inventory))
        relationships.append(_relationship(_IMAGE, "DESCENDANT_OF", _BASE))
    package_elements = [_package_element(package, inventory) for package in inventory.packages]
    for element in package_elements:
        relationships.append(_relationship(_IMAGE, "CONTAINS", element["SPDXID"]))
    file_elements = [_file_element(file) for file in inventory.baked]
    for element in file_elements:
        # The document describes these files directly. If they were contained in the image, SPDX would demand
        # a digest over all files of the image.
        relationships.append(_relationship(_DOCUMENT, "DESCRIBES", element["SPDXID"]))
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(inventory.created_s))
    document: dict[str, Any] = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": _DOCUMENT,
        "name": document_name,
        "creationInfo": {"created": created, "creators": [f"Tool: imgkit-{__version__}"]},
        "packages": image_elements + package_elements,
        "files": file_elements,
        "relationships": relationships,
    }
    if inventory.left_out:
        document["comment"] = "left out: " + "; ".join(inventory.left_out)
    # SPDX demands a unique name for each document. It is a digest of the rest, so it must be added last.
    document["documentNamespace"] = _NAMESPACE + hashlib.sha256(json.dumps(document).encode()).hexdigest()
    return json.dumps(document, indent=1) + "\n"


def _image_element(name: str, spdx_id: str, **fields: Any) -> dict[str, Any]:
    """Return the SPDX package that represents an image. `fields` are added to its keys."""
    return {
        "name": name,
        "SPDXID": spdx_id,
        "downloadLocation": _UNKNOWN_VALUE,
        "filesAnalyzed": False,
        "primaryPackagePurpose": "CONTAINER",
        **fields,
    }


def _base_element(inventory: Inventory) -> dict[str, Any]:
    """Return the SPDX package that represents the base image, with its digest if that is known."""
    digest = inventory.base_digest
    if not digest:
        return _image_element(inventory.base, _BASE)
    checksums = [_sha256_element(digest.removeprefix("sha256:"))]
    return _image_element(inventory.base, _BASE, versionInfo=digest, checksums=checksums)


def _sha256_element(digest: str) -> dict[str, str]:
    """Return the SPDX element for a SHA-256 digest in hex."""
    return {"algorithm": "SHA256", "checksumValue": digest}


def _package_element(package: Package, inventory: Inventory) -> dict[str, Any]:
    """Return the SPDX element of a Debian or Python package, with its package URL (purl) for scanners."""
    purl = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": package_url(package, inventory),
    }
    # The folder is part of the id, because a Python package may be installed in several folders.
    spdx_id = _spdx_id(package.kind, package.name, package.version, package.architecture, package.folder)
    element: dict[str, Any] = {
        "name": package.name,
        "SPDXID": spdx_id,
        "versionInfo": package.version,
        "downloadLocation": package.url or _UNKNOWN_VALUE,
        "filesAnalyzed": False,
        "externalRefs": [purl],
    }
    if package.sha256:
        element["checksums"] = [_sha256_element(package.sha256)]
    if package.folder:
        element["comment"] = f"in {package.folder}"
    return element


def _file_element(file: BakedFile) -> dict[str, Any]:
    """Return the SPDX element of a file that imgkit put into the image."""
    return {
        "fileName": f".{file.path}",
        "SPDXID": _spdx_id("File", file.path),
        "checksums": [{"algorithm": "SHA1", "checksumValue": file.sha1}, _sha256_element(file.sha256)],
        "comment": "put there by imgkit",
    }


def _spdx_id(kind: str, *parts: str) -> str:
    """Return an id for an element of the document, such as ``SPDXRef-deb-1f...``.

    It contains a digest of `parts` and not their text, because versions have characters that SPDX does not
    allow in an id.
    """
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return f"SPDXRef-{kind}-{digest[:20]}"  # 80 bits are enough to keep all ids different


def _relationship(element_id: str, kind: str, related_id: str) -> dict[str, str]:
    """Return an SPDX relationship of the given kind between two elements of the document."""
    return {"spdxElementId": element_id, "relationshipType": kind, "relatedSpdxElement": related_id}


def package_url(package: Package, inventory: Inventory) -> str:
    """Return the package URL of `package`, by which scanners look up its vulnerabilities.

    For example, ``pkg:pypi/torch@2.3.0`` or
    ``pkg:deb/ubuntu/zlib1g@1:1.2.11?arch=amd64&distro=ubuntu-22.04``.
    """
    version = quote(package.version, safe=":")
    if package.kind == "pypi":
        # The specification asks for lower case and hyphens in names from PyPI.
        return f"pkg:pypi/{package.name.lower().replace('_', '-')}@{version}"
    # Without os-release, Debian is the best guess for a package of dpkg.
    distribution = inventory.distribution or "debian"
    url = f"pkg:deb/{distribution}/{quote(package.name, safe='')}@{version}"
    qualifiers = {}
    if package.architecture:
        qualifiers["arch"] = package.architecture
    if inventory.distribution and inventory.release:
        qualifiers["distro"] = f"{distribution}-{inventory.release}"
    if qualifiers:
        url += f"?{urlencode(qualifiers)}"
    return url
