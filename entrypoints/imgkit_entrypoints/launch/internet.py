"""Settings and notes about internet services that a program is likely to call, on nodes without internet.

Compute nodes of most clusters cannot reach the internet. A program that calls the Hugging Face hub then fails
after minutes of attempts, and one that logs to Weights & Biases waits at its start.
"""

from __future__ import annotations

import socket
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ATTEMPT_S = 1.0
"""Longest time in seconds to look up a name and connect. On a node with internet, it takes much less."""
# If one of these variables is set, the files of the Hugging Face hub are not in ~/.cache/huggingface.
_HUB_CACHES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")
# Variables that name a site's proxy. Only the program's library can tell whether the proxy works, so imgkit
# tries no connection if one of them is set.
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service on the internet, and the variables of the library that calls it."""

    package: str
    """The Python package that calls the service."""
    url_variable: str
    """Variable by which the user sets another address of the service."""
    default_url: str
    offline_variables: Mapping[str, tuple[str, ...]]
    """Variables that keep the library offline, and the values that do so, in lower case."""
    used_variables: tuple[str, ...] = ()
    """Variables that users set only for programs that call the service."""

    def is_used(self, env: Mapping[str, str], has_package: Callable[[str], bool]) -> bool:
        """Return whether a program in the environment `env` is likely to call the service.

        If a variable keeps the library offline, return False. Otherwise, return True if one of the service's
        variables is set, or if the program's Python has the service's package.
        """
        # These come first: a program that is offline does not call the service, whatever else is set.
        for name, offline_values in self.offline_variables.items():
            if env.get(name, "").lower() in offline_values:
                return False
        if any(env.get(name) for name in (*self.used_variables, self.url_variable)):
            return True
        return has_package(self.package)

    def url(self, env: Mapping[str, str]) -> str:
        """Return the address of the service that the user has set, or else the default."""
        return env.get(self.url_variable) or self.default_url


HUB = Service(
    package="huggingface_hub",
    url_variable="HF_ENDPOINT",
    default_url="https://huggingface.co",
    offline_variables={"HF_HUB_OFFLINE": ("1", "on", "yes", "true")},
    used_variables=("HF_TOKEN",),
)
WANDB = Service(
    package="wandb",
    url_variable="WANDB_BASE_URL",
    default_url="https://api.wandb.ai",
    offline_variables={"WANDB_MODE": ("offline", "disabled", "dryrun")},
    used_variables=("WANDB_API_KEY", "WANDB_PROJECT"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSettings:
    """Variables and messages about internet services that the program is likely to call."""

    env: Mapping[str, str]
    """Variables that the workers get in addition, such as ``WANDB_MODE=offline``."""
    notes: tuple[str, ...]
    """Lines for the user about services that this node cannot reach, or that fill the home directory."""


def offline_settings(
    env: Mapping[str, str],
    *,
    has_package: Callable[[str], bool],
    can_connect: Callable[[str], bool],
    is_shared: Callable[[str], bool],
) -> OfflineSettings:
    """Return variables and notes about the internet services that a program is likely to call.

    For example, if the program uses Weights & Biases and this node cannot reach it, the workers get
    ``WANDB_MODE=offline``, and a note tells the user.

    Parameters
    ----------
    env : the environment of the program.
    has_package : returns whether the program's Python has a package.
    can_connect : returns whether this node can connect to the service at a URL.
    is_shared : returns whether a folder is on a file system that several nodes mount.
    """
    # With a proxy, no connection is tried, and all services are assumed to be reachable.
    has_proxy = any(env.get(name) for name in _PROXIES)

    def can_reach(url: str) -> bool:
        return has_proxy or can_connect(url)

    variables: dict[str, str] = {}
    notes = []
    if HUB.is_used(env, has_package):
        hub_note = _describe_hub_problem(env, can_reach, is_shared)
        if hub_note:
            notes.append(hub_note)
    if WANDB.is_used(env, has_package):
        variables = _choose_wandb_variables(env, can_reach)
        if "WANDB_MODE" in variables:
            url = WANDB.url(env)
            notes.append(f"this node cannot reach {url}: WANDB_MODE=offline; later: wandb sync")
    return OfflineSettings(env=variables, notes=tuple(notes))


def _describe_hub_problem(
    env: Mapping[str, str], can_reach: Callable[[str], bool], is_shared: Callable[[str], bool]
) -> str:
    """Return a note about the Hugging Face hub for a program that calls it, or "" if there is no problem.

    The hub may be out of reach, or its files may fill a home directory that nodes share.
    """
    url = HUB.url(env)
    if not can_reach(url):
        return (
            f"this node cannot reach {url}: let imgkit run send what the program loads, "
            'data = ["hf://NAME"] in imgkit.toml; or fill HF_HOME on a login node, with HF_HUB_OFFLINE=1'
        )
    home = env.get("HOME", "")
    has_own_cache = any(env.get(name) for name in _HUB_CACHES)
    if not home or has_own_cache or not is_shared(home):
        return ""
    return (
        f"models are saved in {home}/.cache/huggingface, where your home's quota counts; for another "
        "folder: --env HF_HOME=/FOLDER"
    )


def _choose_wandb_variables(env: Mapping[str, str], can_reach: Callable[[str], bool]) -> dict[str, str]:
    """Return the variables for a program that uses Weights & Biases, without those that the user has set.

    WANDB_MODE is in the result if this node cannot reach the service.
    """
    variables = {}
    run_folder = env.get("IMGKIT_RUN_DIR")
    # By default, wandb writes into the job's folder, or into /tmp of the node if that folder cannot be
    # written.
    if run_folder and not env.get("WANDB_DIR"):
        variables["WANDB_DIR"] = run_folder
    if not env.get("WANDB_MODE") and not can_reach(WANDB.url(env)):
        variables["WANDB_MODE"] = "offline"
    return variables


def can_connect(url: str) -> bool:
    """Return whether the host of `url` accepts a connection within `ATTEMPT_S` seconds.

    Nothing is sent. An accepted connection is enough to show that there is a route to the internet.
    """
    address = urllib.parse.urlsplit(url)
    default_port = 80 if address.scheme == "http" else 443
    try:
        port = address.port or default_port
    except ValueError:  # the program's library reports a wrong port
        return False
    if not address.hostname:
        return False
    has_connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((address.hostname, port), timeout=ATTEMPT_S).close()
        except (OSError, UnicodeError):  # UnicodeError: a name that IDNA cannot encode
            return
        has_connected.set()

    # The look-up of a name has no time limit, so it runs in a thread that may outlive this function.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(ATTEMPT_S)  # a connection that is made after this time does not count
    return has_connected.is_set()
