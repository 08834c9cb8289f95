"""Run one command as root of a new user namespace that has the same users as the machine.

Root starts this module with ``python -I -S -c SOURCE ARGV...``. It needs only the standard library.

In a container or virtual machine of a CI, root often lacks some capabilities (single privileges of root).
Apptainer requires all of them before it runs a step of a definition, and fails. Inside a new user namespace,
root has all capabilities. Every user and group keeps its number there, so files keep their owners.
"""

import ctypes
import os
import sys

CLONE_NEWUSER = 0x10000000
ALL_USERS = "0 0 2147483648"
"""A line of uid_map: the ids from 0 on inside are the ids from 0 on outside, for 2^31 ids.

These are half of all ids. If all ids were mapped, Apptainer would assume that it is not in a user namespace.
"""


def main() -> None:
    """Enter a new user namespace, and replace this process by the command in `sys.argv`.

    Only a process outside the namespace may map more than one user into it. So a child, which stays outside,
    maps the users when the namespace exists. The command starts when the child has ended.
    """
    read_end, write_end = os.pipe()
    pid = os.getpid()
    if os.fork() == 0:
        os.read(read_end, 1)  # wait for a byte that says that the namespace exists
        map_users(pid)
        os._exit(0)
    # `os.unshare` exists only from Python 3.12 on.
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER) != 0:
        sys.exit("imgkit: the kernel refuses root a user namespace")
    os.write(write_end, b".")
    _, status = os.wait()
    if status != 0:
        sys.exit("imgkit: the kernel does not map users into a user namespace")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - an argv list, no shell


def map_users(pid: int) -> None:
    """Give every user and group of the machine the same number in the user namespace of the process `pid`."""
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", "w") as stream:  # noqa: PTH123 - pathlib costs 10 ms of start-up
            stream.write(ALL_USERS)


if __name__ == "__main__":
    main()
