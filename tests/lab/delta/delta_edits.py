"""Edit the trees /t/0, /t/1, ... at random, the same way for the same words: one layer of an image.

``python3 -I delta_edits.py CHOICE COUNT TREES``: `COUNT` edits of each, chosen by `CHOICE`. Runs inside an
image.
"""

import contextlib
import os
import random
import shutil
import sys

NAMES = [b"a", b"b", b"d", "ü mlaut".encode(), b"-dash", b"new\nline", b"raw\xff", b"x" * 120, b" -> "]
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")


def main() -> None:
    """Edit."""
    for tree in range(int(sys.argv[3])):
        choice = random.Random(f"{sys.argv[1]} {tree}")
        os.makedirs(f"/t/{tree}", exist_ok=True)
        os.chdir(f"/t/{tree}")
        for number in range(int(sys.argv[2])):
            edit = choice.choice(EDITS)
            # A folder that is not there, a name that is taken: no edit.
            with contextlib.suppress(OSError):
                edit(choice, path(choice), b"%d %s" % (number, sys.argv[1].encode()))


def path(choice: random.Random) -> bytes:
    """Somewhere in the tree, at most four deep; often the same places again."""
    return b"/".join([b".", *choice.choices(NAMES[:4], k=choice.randint(0, 2)), choice.choice(NAMES)])


def clear(place: bytes) -> None:
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)


def write(choice: random.Random, place: bytes, text: bytes) -> None:
    clear(place)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(place, "wb") as stream:
        stream.write(text * choice.choice([0, 1, 7, 30_000]))


def append(choice: random.Random, place: bytes, text: bytes) -> None:
    if os.path.isfile(place):  # opening a fifo would wait for its reader
        with open(place, "ab") as stream:
            stream.write(text)


def folder(choice: random.Random, place: bytes, text: bytes) -> None:
    if not os.path.isdir(place) or os.path.islink(place):
        clear(place)
        os.makedirs(place)
    for name in choice.sample(NAMES, 3):
        if not os.path.lexists(os.path.join(place, name)):
            with open(os.path.join(place, name), "wb") as stream:
                stream.write(text + name)


def replace_folder(choice: random.Random, place: bytes, text: bytes) -> None:
    parent = os.path.dirname(place)
    if parent != b".":
        clear(parent)
    folder(choice, parent, text)


def delete(choice: random.Random, place: bytes, text: bytes) -> None:
    clear(place)


def symlink(choice: random.Random, place: bytes, text: bytes) -> None:
    clear(place)
    os.symlink(choice.choice([b"/t/0/a", b"../b", b"nowhere", b"/" + b"y" * 150, "./ü".encode()]), place)


def hard_link(choice: random.Random, place: bytes, text: bytes) -> None:
    other = path(choice)
    if os.path.isfile(other) and not os.path.islink(other) and other != place:
        clear(place)
        os.link(other, place)


def change_mode(choice: random.Random, place: bytes, text: bytes) -> None:
    os.chmod(place, choice.choice([0o600, 0o644, 0o755, 0o1777, 0o4755, 0o2711, 0o700]))


def change_owner(choice: random.Random, place: bytes, text: bytes) -> None:
    os.chown(place, choice.choice([0, 1234, 3_000_000]), choice.choice([0, 4321]), follow_symlinks=False)


def rename(choice: random.Random, place: bytes, text: bytes) -> None:
    shutil.move(os.fsdecode(place), os.fsdecode(path(choice)))


def special(choice: random.Random, place: bytes, text: bytes) -> None:
    clear(place)
    os.mkfifo(place)


def capability(choice: random.Random, place: bytes, text: bytes) -> None:
    if os.path.isfile(place):
        os.setxattr(place, "security.capability", CAPABILITY)


def old_time(choice: random.Random, place: bytes, text: bytes) -> None:
    os.utime(place, (1, 946_684_799))


EDITS = [
    *(write, write, folder, folder, append, replace_folder, replace_folder, delete, delete),
    *(symlink, hard_link, hard_link, change_mode, change_owner, rename, special, capability, old_time),
]

if __name__ == "__main__":
    main()
