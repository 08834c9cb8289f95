"""Parse image configurations. A configuration is the JSON document whose digest is the image id (OCI)."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
"""The name of an architecture or an operating system, such as ``amd64``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The fields of an image configuration that imgkit uses."""

    image_id: str
    """``sha256:...``. By default it is the digest of `raw`."""
    raw: bytes
    """The bytes of the JSON document, from which the digest is computed."""
    os: str
    """``linux``. Empty if the configuration does not name the operating system."""
    arch: str
    """The architecture under its name in OCI, for example ``amd64``."""
    diff_ids: tuple[str, ...]
    """The digests of the uncompressed layers, ``sha256:...``, with the lowest layer first."""
    labels: Mapping[str, str]
    created: str
    """The time of the build in RFC 3339. Empty if the configuration has none."""
    env: tuple[tuple[str, str | None], ...] = ()
    """The names and values of ENV, in their order. The value is None if the text contains no ``=``."""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    workdir: str = ""

    @property
    def search_path(self) -> str:
        """The value of the variable PATH in the image. Empty if the image does not set it."""
        return dict(self.env).get("PATH") or ""


def parse_config(raw: bytes, *, where: str, image_id: str | None = None) -> ImageConfig:
    """Parse the JSON document `raw` of an image configuration.

    Parameters
    ----------
    where : the file or image, for the error message.
    image_id : the image id, if `raw` is not the original document. By default it is the digest of `raw`.

    Raises
    ------
    CheckFailed : `raw` is not an image configuration, or the image has no layers.
    """
    try:
        config = _read_config(raw, image_id or f"sha256:{hashlib.sha256(raw).hexdigest()}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckFailed(f"its image configuration cannot be read: {error!r}", where=where) from error
    if not config.diff_ids:
        raise CheckFailed(
            "the image has no layers (some releases of Docker 25 wrote such archives)",
            where=where,
            hint="save it again with another release of docker, or convert the image on the build host",
        )
    return config


def _read_config(raw: bytes, image_id: str) -> ImageConfig:
    """Return the fields of the JSON document `raw`, which may have any structure.

    If `raw` is not an image configuration, the error is a ValueError, KeyError, TypeError or AttributeError.
    """
    values = json_text.parse(raw)
    diff_ids = tuple(values["rootfs"]["diff_ids"] or ())
    if not all(_DIGEST.fullmatch(diff_id) for diff_id in diff_ids):
        raise ValueError("a layer digest is not a sha256")
    # These names are later written to other files, and the image may be of unknown origin.
    os = values.get("os") or ""
    arch = values["architecture"]
    if not _NAME.fullmatch(arch) or (os and not _NAME.fullmatch(os)):
        raise ValueError("its architecture or operating system is not one word")
    # Some tools write null for an empty value.
    settings = values.get("config") or {}
    labels = dict(settings.get("Labels") or {})
    return ImageConfig(
        image_id=image_id,
        raw=raw,
        os=os,
        arch=arch,
        diff_ids=diff_ids,
        labels={str(name): str(value) for name, value in labels.items()},
        created=str(values.get("created") or ""),
        env=tuple(_split_variable(variable) for variable in settings.get("Env") or ()),
        entrypoint=_texts(settings.get("Entrypoint")),
        cmd=_texts(settings.get("Cmd")),
        workdir=str(settings.get("WorkingDir") or ""),
    )


def _split_variable(text: str) -> tuple[str, str | None]:
    """Split ``NAME=VALUE`` into its name and value. If the text has no ``=``, the value is None."""
    name, equals, value = text.partition("=")
    if not equals:
        return name, None
    return name, value


def _texts(values: list[str] | None) -> tuple[str, ...]:
    """Return the items of a JSON list as text. For a key that is missing or null, return an empty tuple."""
    return tuple(str(value) for value in values or ())


def creation_time_s(created: str) -> int:
    """Return the creation time `created` of an image in seconds since 1970.

    For example, ``1970-01-02T00:00:00Z`` gives 86400. If `created` is empty or is not a time, return 0.
    """
    match = re.match(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)", created)
    if match is None:
        return 0
    try:
        when = datetime.datetime(*map(int, match.groups()), tzinfo=datetime.timezone.utc)  # type: ignore[misc,arg-type]
    except ValueError:
        return 0
    # Squashfs stores times as unsigned integers of 32 bits, so limit the time to what fits.
    return min(max(int(when.timestamp()), 0), (1 << 32) - 1)
