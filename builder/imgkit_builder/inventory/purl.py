"""Package URLs, by which scanners find a package in their databases (github.com/package-url/purl-spec)."""

from __future__ import annotations

from urllib.parse import quote

from imgkit_builder.inventory.packages import Inventory, Package


def purl(package: Package, inventory: Inventory) -> str:
    """The package URL of `package` in the image of `inventory`."""
    version = quote(package.version, safe=":")
    if package.kind == "pypi":
        return f"pkg:pypi/{package.name.lower().replace('_', '-')}@{version}"
    distribution = inventory.distribution or "debian"
    qualifiers = f"arch={package.architecture}" if package.architecture else ""
    if inventory.distribution and inventory.release:
        qualifiers += f"&distro={quote(f'{inventory.distribution}-{inventory.release}', safe='')}"
    end = f"?{qualifiers.lstrip('&')}" if qualifiers else ""
    return f"pkg:deb/{distribution}/{quote(package.name, safe='')}@{version}{end}"
