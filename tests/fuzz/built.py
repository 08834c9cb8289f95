"""Hostile inputs that are made by code, since they are large or show their point better so."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import targets
from sample_image import digest
from tars import tar_of_files

from imgkit_builder.archive.tar_write import END, pax_header, ustar_header


def _index_of_itself() -> bytes:
    """An index that lists one entry many times, and that entry is an index that lists it again."""
    inner = json.dumps({"manifests": [{"digest": "sha256:" + "0" * 64}] * 50}).encode()
    entry = {"digest": f"sha256:{digest(inner)}"}
    index = json.dumps({"manifests": [entry] * 100}).encode()
    return tar_of_files({"index.json": index, f"blobs/sha256/{digest(inner)}": inner})


def _circle_of_links(count: int) -> bytes:
    heads = (
        ustar_header(name=b"%d" % number, kind=b"1", link=b"%d" % ((number + 1) % count))
        for number in range(count)
    )
    return b"".join(heads) + END


FILE = ustar_header(name=b"one", kind=b"0")
BUILT: tuple[tuple[str, str, Callable[[], bytes]], ...] = (
    ("tar", "a size of -1", lambda: pax_header({"size": b"-1"}) + FILE + END),
    ("tar", "headers without an end", lambda: pax_header({"comment": b"c" * 900}) * 3000),
    ("tar", "holes of 2**62 bytes", lambda: pax_header({"GNU.sparse.map": b"0,0", "GNU.sparse.size": b"%d" % (1 << 62)}) + FILE + END),
    ("layer-links", "a circle of hard links", lambda: _circle_of_links(3000)),
    ("layer-links", "folders 2,000 deep", lambda: pax_header({"path": b"d/" * 2000 + b"f"}) + FILE + END),
    ("archive-verify", "an index that names itself", _index_of_itself),
    ("archive-gzip", "20 files of 4 MiB in 80 kB", lambda: gzip.compress(tar_of_files({f"{number}.json": b"{" + b" " * ((4 << 20) - 1) for number in range(20)}))),
    ("archive-gzip", "a layer of 70 MB in 70 kB", lambda: gzip.compress(tar_of_files({"x": bytes(70 << 20)}))),
    ("gzip", "70 MB in 70 kB", lambda: gzip.compress(bytes(70 << 20))),
    ("json", "brackets 10**5 deep", lambda: b"[" * 100_000),
    ("json", "a million empty lists", lambda: b"[" + b"[]," * 1_000_000 + b"0]"),
    ("json", "5,000 digits", lambda: b"9" * 5000),
    ("image-configuration", "brackets 10**5 deep", lambda: b'{"a":' * 100_000),
    ("node-list", "a range of 10**9", lambda: b"a[1-1000000000]"),
    ("node-list", "names of 6 GB", lambda: b"x" * 100_000 + b"[1-65536]"),
    ("counts", "5,000 digits", lambda: b"9" * 5000),
    ("host-file", "20,000 hosts", lambda: b"\n".join(b"h%d" % number for number in range(20_000))),
    ("project", "brackets 10**5 deep", lambda: b"x = " + b"[" * 100_000),
    ("train-config", "brackets 10**5 deep", lambda: b"[" * 100_000),
    ("toml", "a key of 10**5 parts", lambda: b"a." * 100_000 + b"b = 1"),
    ("toml", "tables of 31 parts", lambda: b"".join(b"[%s%d]\n" % (b"a." * 30, number) for number in range(1000))),
    ("lock", "a schema of 5,000 hexadecimal digits", lambda: b"schema = 0x" + b"f" * 5000),
    ("lock", "brackets 10**5 deep", lambda: b"schema = " + b"[" * 100_000),
    ("lock-apt", "20,000 packages with MD5 sums", lambda: json.dumps({
        "uris": "".join(f"'http://x/p/{number}/a.deb' a_1_{number}.deb 1 MD5Sum:0\n" for number in range(20_000)),
        "records": "".join(f"Package: a\nFilename: p/{number}/a.deb\nSHA256: 0\n\n" for number in range(20_000)),
    }).encode()),
    ("lock-apt", "a size of 5,000 digits", lambda: json.dumps({"uris": f"'http://x/a' a_1_b.deb {'9' * 5000} SHA256:0", "records": ""}).encode()),
    ("lock-pip", "a URL that is none", lambda: b'{"install": [{"metadata": {"name": "a", "version": "1"}, "download_info": {"url": "http://[x"}}]}'),
    ("lock-failure", "a step that the recipe lacks", lambda: b'{"step": 9, "kind": "pip", "about": "", "output": ""}'),
    ("ignore", "twelve stars", lambda: b"*a" * 12 + b"*b"),
    ("ignore", "a pattern that ends in a backslash", lambda: b"a\\"),
    ("machine", "a digit that is none", lambda: json.dumps({**targets.TREE, "sys/class/infiniband/mlx5_0/ports/²/state": "x"}).encode()),
    ("machine", "a limit of ²", lambda: json.dumps({**targets.TREE, "proc/self/limits": "Max processes ² ² processes"}).encode()),
)  # fmt: skip
"""Target, what it is, and how it is made."""
