"""Where paths of a merged image lead, inside it and on the host."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence

import pytest
from tars import TarMember, tar_of_links

from imgkit_builder.archive.layers import LayerTree
from imgkit_builder.archive.tar_read import CHARACTER, DIRECTORY, FIFO, REGULAR, SYMLINK, TarStream
from imgkit_entrypoints.errors import CheckFailed

FILE, DIR, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
Layer = Sequence[TarMember]


def tree_of(*layers: Layer) -> LayerTree:
    """Return the tree of layers of members: name, type, target of a link."""
    tree = LayerTree("image:1")
    for layer in layers:
        tree.add_layer(TarStream(iter([tar_of_links(layer)]), name="layer"))
    return tree


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("etc", DIRECTORY),
        ("etc/hosts", FIFO),
        ("x/hosts", FIFO),
        ("to_hosts", FIFO),
        ("dev/null", CHARACTER),
        ("absolute/file", REGULAR),
        ("hard", REGULAR),
        ("absolute/file/below", None),
        ("broken", None),
        ("none/hosts", None),
    ],
)
def test_type_of_what_a_path_opens(path, kind):
    layer: Layer = [
        ("etc/hosts", tarfile.FIFOTYPE, ""),
        ("x", LINK, "etc"),
        ("to_hosts", LINK, "x/hosts"),
        ("dev/null", tarfile.CHRTYPE, ""),
        ("usr/file", FILE, ""),
        ("absolute", LINK, "/usr"),
        ("hard", HARD, "usr/file"),
        ("broken", LINK, "none/at/all"),
    ]
    assert tree_of(layer).find_file_type(path) == kind


def test_type_behind_a_circle_of_links_refused():
    with pytest.raises(CheckFailed, match="leads to itself"):
        tree_of([("a", LINK, "b"), ("b", LINK, "a")]).find_file_type("a/x")


@pytest.mark.parametrize(
    "layer",
    [
        [("a", HARD, "none")],
        [("a", FILE, ""), ("a", HARD, "a")],
        [("d/f", FILE, ""), ("d", HARD, "d/f")],
        [("a", FILE, ""), ("b", HARD, "../a")],
    ],
    ids=["to nothing", "to itself", "in place of its target's folder", "out of the image"],
)
def test_hard_link_without_a_file_is_refused(layer):
    with pytest.raises(CheckFailed, match=r"a hard link to .*, where there is no file before it"):
        tree_of(layer)


def test_special_files_below_a_path():
    tree = tree_of(
        [("m/", DIR, ""), ("m/b/run", tarfile.FIFOTYPE, ""), ("m/b/file", FILE, ""), ("m/a", LINK, "/x")],
        [("m/c", LINK, "y"), ("m/a", FILE, ""), ("n", LINK, "m")],
    )
    assert list(tree.special_files("m")) == [("m/b/run", FIFO, ""), ("m/c", SYMLINK, "y")]
    assert list(tree.special_files("n")) == [("n", SYMLINK, "m")]
    assert list(tree.special_files("m/b/file")) == list(tree.special_files("none")) == []
