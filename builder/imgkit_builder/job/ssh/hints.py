"""The next step after ssh could not log in. Standard library only."""

from __future__ import annotations

import shlex

SECOND_FACTOR = "Permission denied (keyboard-interactive)"
"""What ssh says where the key was accepted, and only the answer to a question is missing or wrong."""


def after(said: str, host: str) -> str:
    """The command that helps where ssh to `host` has ended with the message `said`."""
    name = shlex.quote(host)
    if "IDENTIFICATION HAS CHANGED" in said:
        bare = shlex.quote(host.rpartition("@")[2])
        return (
            "its key is not the one that this machine knows: ask the site whether it has changed, and only "
            f"then: ssh-keygen -R {bare}"
        )
    if "Host key verification failed" in said:
        return f"ssh {name} true, and check the key that it shows before you accept it"
    if SECOND_FACTOR in said:
        return f"the key is right, the answer was not: ssh {name} true"
    if "Permission denied" in said:
        return f"ssh-keygen -t ed25519 (once), then ssh-copy-id {name}"
    if "resolve hostname" in said:
        return f"correct the name, or add a Host block for {name} to ~/.ssh/config"
    return f"ssh -v {name} true"
