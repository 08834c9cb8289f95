"""Which files of a folder go into an image."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files

from imgkit_builder.recipe import sources
from imgkit_entrypoints import files
from imgkit_entrypoints.run import disk
from imgkit_recipes import FOLDER

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """``tree(".git/HEAD", "src/a.py", **{"x": "text"})``: files, empty or with a text."""

    def make(*names: str, **texts: str) -> Path:
        return write_files(tmp_path, {**dict.fromkeys(names, ""), **texts})

    return make


def listed_files(source: Path, *ignore: str) -> list[str]:
    """The files that count, without folders and lists of patterns."""
    entries = sources.list_source(source, ignore).entries
    return [entry.name for entry in entries if entry.entry.is_file() and not entry.name.endswith("ignore")]


def names(source: Path, *options: Any, **named: Any) -> list[str]:
    return [entry.name for entry in sources.list_source(source, *options, **named).entries]


def test_gitignore_counts_in_every_folder(tree):
    root = tree(
        "a.log",
        "src/a.log",
        "src/keep.log",
        "src/b.py",
        **{".gitignore": "*.log\n", "src/.gitignore": "!keep.log\n"},
    )
    assert listed_files(root) == ["src/b.py", "src/keep.log"]


def test_patterns_of_the_repository_count_below(tree):
    root = tree(
        ".git/HEAD",
        "one/src/a.py",
        "one/src/a.ckpt",
        "one/src/data/x",
        **{".gitignore": "*.ckpt\n/one/src/data/\n"},
    )
    assert listed_files(root / "one" / "src") == ["a.py"]


def test_patterns_above_the_repository_do_not(tree):
    root = tree("repo/.git/HEAD", "repo/src/a.py", "loose/b.py", **{".gitignore": "*.py\n"})
    assert listed_files(root / "repo" / "src") == ["a.py"]
    assert listed_files(root / "loose") == ["b.py"]


def test_ignored_folder_that_is_named_counts(tree):
    """The recipe names it on purpose: a build folder, for example."""
    root = tree(".git/HEAD", "build/lib.so", **{".gitignore": "build/\n"})
    assert listed_files(root / "build") == ["lib.so"]


def test_dockerignore_patterns_start_at_its_folder(tree):
    texts = {".dockerignore": "# comment\n*.csv\n**/*.bin\nsub/skip/\n!keep.csv\n"}
    root = tree("a.csv", "keep.csv", "sub/b.csv", "sub/c.bin", "sub/skip/d", **texts)
    assert listed_files(root) == ["keep.csv", "sub/b.csv"]


def test_everything_but_one_folder(tree):
    root = tree("a", "src/b", "src/sub/c", **{".dockerignore": "*\n!src\n"})
    assert listed_files(root) == ["src/b", "src/sub/c"]


def test_own_outputs_and_caches_stay_out(tree):
    root = tree(
        "mn5.sif",
        "mn5.tar.zst",
        "mn5.tar.zst.sha256",
        "mn5.tar.zst.manifest.json",
        "old/code-0a1b.sif",
        ".git/HEAD",
        "pkg/__pycache__/a.pyc",
        ".venv/pyvenv.cfg",
        ".mypy_cache/CACHEDIR.TAG",
        # Somebody's data:
        "data.tar",
        "data.tar.sha256",
        "run.manifest.json",
        "box.sif/bin/sh",
    )
    assert listed_files(root) == ["box.sif/bin/sh", "data.tar", "data.tar.sha256", "run.manifest.json"]
    assert "old" not in names(root)
    assert "old/code-0a1b.sif" in listed_files(root, "!*.sif")


def test_temporary_names_never_count(tree):
    part = files.temporary_name(Path("mn5.sif")).name
    root = tree(part, f"{files.TEMPORARY}sif.0a.1b/spool.tar", f"{files.TEMPORARY}lock.mn5.sif", ".mine.part")
    listed = [part, f"{files.TEMPORARY}sif.0a.1b/spool.tar", ".mine.part"]
    assert listed_files(root, "!*") == [".mine.part"]
    assert names(root, listed=listed) == [".mine.part"]


def test_jobs_name_their_temporary_files_alike():
    """A job that was killed, or still runs, leaves its secret and a half checkpoint beside the code."""
    templates = "".join(file.read_text() for file in (FOLDER / "templates/job").glob("*.j2"))
    run_names = re.findall(r'mktemp "\$dir/(\S+)"', templates)
    assert ".imgkit-secret.XXXXXXXXXX" in run_names
    for name in (*run_names, disk.WRITING, disk.LEAVING):
        assert name.startswith(files.TEMPORARY)


def test_recipe_brings_a_file_back(tree):
    root = tree("base.sif", "vocab.txt", "x.py", ".venv/pyvenv.cfg", **{".gitignore": "*.txt\n"})
    assert listed_files(root, "!*.sif", "!vocab.txt", "*.py") == ["base.sif", "vocab.txt"]


def test_names_that_stay_out_are_listed(tree):
    root = tree("a.log", "data/x", "b.py", "c.py", **{".gitignore": "*.log\ndata/\n"})
    assert sources.list_source(root, ["b.py"]).left_out == ("a.log", "data/")


def test_hidden_file_cannot_be_brought_back(tree):
    root = tree("token.txt", "a.py")
    (root / "link").symlink_to("token.txt")
    hidden = [(root / "token.txt").resolve()]
    assert names(root, ["!token.txt"], hidden=hidden) == ["a.py", "link"]


def test_list_of_patterns_that_is_a_fifo_is_none(tree):
    root = tree("a.py")
    os.mkfifo(root / ".gitignore")
    assert listed_files(root) == ["a.py"]


def test_list_behind_a_link_is_not_read(tree, tmp_path_factory):
    """A message quotes a pattern, and a stranger's link may lead to a file of this user."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("a*b*c*d*e*f\n")
    root = tree("a.py")
    (root / ".gitignore").symlink_to(outside / "secret")
    assert listed_files(root) == ["a.py"]


SECRETS = {
    ".env": "TOKEN=x",
    ".env.local": "TOKEN=x",
    "conf/.netrc": "machine x",
    ".ssh/config": "Host x",
    ".aws/credentials": "x",
    ".docker/config.json": "{}",
    "id_rsa": "x",
    "server.pem": "-----BEGIN RSA PRIVATE KEY-----\n",
    "both.pem": "-----BEGIN CERTIFICATE-----\nx\n-----BEGIN PRIVATE KEY-----\n",
    "raw.key": "0123",
    "deploy": "-----BEGIN OPENSSH PRIVATE KEY-----\n",
}
PUBLIC = {
    ".env.example": "TOKEN=",
    "ca.pem": "-----BEGIN CERTIFICATE-----\n",
    "id_map.json": "{}",
    "id_rsa.pub": "ssh-rsa x",
    "Makefile": "all:",
}


def test_files_that_hold_secrets_stay_out_and_are_named(tree):
    root = tree(**SECRETS, **PUBLIC)
    assert sorted(listed_files(root)) == sorted(PUBLIC)
    folders = {".ssh/config": ".ssh/", ".aws/credentials": ".aws/"}
    assert sorted(sources.list_source(root).secret) == sorted(folders.get(name, name) for name in SECRETS)


def test_only_its_name_brings_a_secret_back(tree):
    root = tree(**{"conf/.env": "x", ".gitignore": "conf/\n", ".dockerignore": "!conf/.env\n"})
    for patterns in ((), ("!conf/",), ("!*",), ("!**",), ("!conf", "!conf/*")):
        assert "conf/.env" not in listed_files(root, *patterns)
    assert "conf/.env" in listed_files(root, "!conf/", "!.env")
    assert "conf/.env" in listed_files(root, "!conf/", "!conf/.env*")


def test_ignored_secret_is_listed_once(tree):
    listing = sources.list_source(tree(**{".env": "x", ".gitignore": ".env\n"}))
    assert (listing.left_out, listing.secret) == ((".env",), ())
