"""What an engine says about itself, told apart: Docker or Podman, and how it stores images."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imgkit_builder.engine.contexts import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about one engine."""

    endpoint: Endpoint
    product: str
    """``Docker`` or ``Podman``."""
    version: str
    api: str
    arch: str
    """``amd64``, ``arm64``."""
    store: str
    """``overlay2``: a graph driver; ``containerd (overlayfs)``: containerd's store with its snapshotter."""
    root: str
    """The folder that the engine keeps images in."""

    @property
    def is_podman(self) -> bool:
        """Whether this is Podman behind Docker's API."""
        return self.product == "Podman"

    @property
    def is_here(self) -> bool:
        """Whether its containers run on this machine's kernel."""
        return self.endpoint.host.startswith("unix://") and sys.platform == "linux"


def engine_facts(endpoint: Endpoint, *, version: Mapping[str, Any], info: Mapping[str, Any]) -> EngineFacts:
    """Facts from the answers to ``/version`` and ``/info``."""
    names = [str(part.get("Name") or "") for part in version.get("Components") or ()]
    driver = str(info.get("Driver") or "unknown")
    return EngineFacts(
        endpoint=endpoint,
        product="Podman" if "Podman Engine" in names else "Docker",
        version=str(version["Version"]),
        api=str(version["ApiVersion"]),
        arch=str(version["Arch"]),
        store=f"containerd ({driver})" if has_containerd_store(info) else driver,
        root=str(info.get("DockerRootDir") or ""),
    )


def has_containerd_store(info: Mapping[str, Any]) -> bool:
    """Whether the answer to ``/info`` tells of containerd's store; its driver is then a snapshotter."""
    status = dict(pair for pair in info.get("DriverStatus") or () if len(pair) == 2)
    return str(status.get("driver-type") or "").startswith("io.containerd.snapshotter")
