"""Read the headers of an image's layers, and compare every layer with its digest, in one pass.

Threads compute digests, and unpack what is compressed into a spool if there is room for one. The headers are
read close behind them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from imgkit_builder.archive import read
from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.layer_spool import Spool
from imgkit_builder.archive.stored import Digest, Region, StoredImage, StoredLayer
from imgkit_builder.archive.tarstream import TarStream
from imgkit_entrypoints.errors import CheckFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A layer whose digest is being computed."""

    layer: StoredLayer
    """Where its headers can be read."""
    sha256: Callable[[], str]
    """Waits for its digest."""
    digest: Digest | None = None
    """Not None: who reads the headers computes it."""


def scan(
    image: StoredImage,
    take: Callable[[TarStream], None],
    *,
    threads: int = 1,
    unpack_limit_bytes: int | None = None,
    spool: Spool | None = None,
) -> StoredImage:
    """Give the headers of each layer to `take`, the lowest first, and compare its bytes with its digest.

    The result is the image to read next: its layers are plain, in `spool`, or the same without one.

    Raises
    ------
    CheckFailed : a layer differs from the configuration, or is damaged.
    NoRoom : the plain layers do not fit in `spool`.
    """
    allowance = Allowance(image.stored_bytes, image.where, unpack_limit_bytes)
    pool = ThreadPoolExecutor(threads)
    try:
        begun = _begin(image.layers, pool, allowance, spool)
        for number, one in enumerate(begun, 1):
            try:
                with one.layer.open(bodies=False, digest=one.digest) as stream:
                    take(stream)
                    if one.digest:
                        stream.drain()
            except CheckFailed:
                # A layer with other bytes than it should have explains every other fault in it.
                _compare(image, begun[: number if one.digest is None else number - 1])
                raise
        _compare(image, begun)
    finally:
        if spool:
            spool.stop()
        pool.shutdown(cancel_futures=True)
    return dataclasses.replace(image, layers=tuple(one.layer for one in begun))


def _begin(
    layers: Sequence[StoredLayer], pool: ThreadPoolExecutor, allowance: Allowance, spool: Spool | None
) -> list[_Begun]:
    plain: dict[Region, Callable[[], str]] = {}
    begun: list[_Begun] = []
    for layer in layers:
        if layer.compress == "none":
            region, known = layer.region, layer.stored_sha256
            assert isinstance(region, Region)  # noqa: S101 - for the type checker: nothing is spooled so far
            if region not in plain:  # equal layers are one file
                plain[region] = functools.partial(str, known) if known else pool.submit(region.sha256).result
            begun.append(_Begun(layer=layer, sha256=plain[region]))
        elif spool:
            file = spool.file()
            filling = pool.submit(spool.fill, file, layer.plain(), allowance)
            unpacked = dataclasses.replace(layer, region=file, compress="none")
            begun.append(_Begun(layer=unpacked, sha256=filling.result))
        else:
            digest = Digest(allowance)
            begun.append(_Begun(layer=layer, sha256=digest.hexdigest, digest=digest))
    return begun


def _compare(image: StoredImage, begun: Sequence[_Begun]) -> None:
    for number, one in enumerate(begun, 1):
        found, wanted = one.sha256(), one.layer.diff_id.removeprefix("sha256:")
        if found != wanted:
            raise CheckFailed(
                f"layer {number} of {len(image.layers)} is damaged: its sha256 is {found}, "
                f"should be {wanted}",
                where=image.where,
                hint=read.AGAIN,
            )
