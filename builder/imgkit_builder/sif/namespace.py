"""Run one command as root of a new user namespace with the same users: the source of ``python -c``.

``python -I -S -c SOURCE ARGV...``, started by root; standard library only. In a container or a virtual
machine of a CI, root often lacks a capability. Apptainer asks for all of them before it runs a step of a
definition, and fails. Inside a new user namespace nothing is missing. Every user and group keeps its number
there, so that files keep their owners.
"""

import ctypes
import os
import sys

CLONE_NEWUSER = 0x10000000
ALL_USERS = "0 0 2147483648"
"""A line of uid_map: ids from 0 on are ids from 0 on outside, 2^31 of them.

That is half of all. Apptainer takes a map of all of them for the map of the machine itself.
"""


def main() -> None:
    """Enter the namespace and become the command."""
    read_end, write_end = os.pipe()
    pid = os.getpid()
    if os.fork() == 0:
        # Only a process outside may map more than one user. It waits until the namespace is there.
        os.read(read_end, 1)
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as stream:  # noqa: PTH123 - as in supervisor.py
                stream.write(ALL_USERS)
        os._exit(0)
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER) != 0:
        sys.exit("imgkit: the kernel refuses root a user namespace")
    os.write(write_end, b".")
    _, status = os.wait()
    if status != 0:
        sys.exit("imgkit: the kernel does not map users into a user namespace")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - an argv list, no shell


if __name__ == "__main__":
    main()
