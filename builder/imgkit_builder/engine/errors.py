"""Turn the engine's exceptions, in-band events and broken connections into errors with a hint."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from imgkit_builder.base.progress import Reporter
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError
from imgkit_entrypoints.terminal import unstyled

_UNKNOWN_IMAGE = re.compile(
    r"manifest unknown|manifest for|repository does not exist|not found: does not exist"
)
_LOCALLY_MISSING = re.compile(r"does not exist locally|reference does not exist|no such image")
_DENIED = re.compile(r"unauthorized|authentication required|no basic auth|denied:")

ONE_PLATFORM_HINT = (
    "this engine uses only its own platform of a multi-platform image: name the other one by its digest, "
    "NAME@sha256:... (docker manifest inspect NAME lists them), or use Docker 28.1 or later"
)
RESTART_HINT = (
    "find the reason: journalctl -u docker -n 50 (or the engine's own log); start it: sudo systemctl start "
    "docker; then run the same command again"
)
# A step's own output is searched as well as the engine's messages, so each text must be rare in other output.
_HINTS = (
    (
        r"no space left on device",
        "the engine's disk is full; see: docker system df; free space: docker image prune, "
        "docker builder prune; its folder: docker info -f '{{.DockerRootDir}}'",
    ),
    (
        r"no module named pip|\bpython3: (?:command )?not found",
        "the base has no pip, and imgkit needs it: add apt: [python3-pip] to the recipe's image",
    ),
    (
        r"certificate_verify_failed",
        "the step does not trust a certificate, often a proxy's: add the certificate of your "
        "site's own authority to the recipe's image: ca: [FILE.crt]",
    ),
    (
        r"exec format error",
        "the program is for another architecture, and there is no emulator: "
        "sudo apt-get install qemu-user-static binfmt-support",
    ),
    (r"(?s)content digest.*not found|not found.*content digest", ONE_PLATFORM_HINT),
    (r"x509", "the engine does not trust the registry: copy its CA to /etc/docker/certs.d/HOST/ca.crt"),
    (r"toomanyrequests", "the registry limits anonymous pulls: docker login, or wait"),
    (
        r"server gave http response to https client",
        'list a registry without TLS in "insecure-registries" of /etc/docker/daemon.json',
    ),
    (
        r"dial tcp|no such host|connection refused|connection reset|i/o timeout|network is unreachable"
        r"|no route to host|tls handshake timeout|client\.timeout exceeded|request canceled while waiting",
        "the engine cannot reach the registry: check its network and proxy (docker info), "
        "and try the registry: curl -I https://REGISTRY/v2/",
    ),
)
"""Known problems in the output of an engine or a step, the first match counts, and what helps."""


def hint_for(text: str) -> str | None:
    """Return the fix for a known problem that `text` mentions; None for an unknown problem."""
    lower = text.lower()
    for pattern, hint in _HINTS:
        if re.search(pattern, lower):
            return hint
    return None


def explain(message: str, *, doing: str, name: str = "") -> ImgkitError:
    """Return the typed error for `message`, which the engine sent.

    Parameters
    ----------
    message : text of an in-band event or an error response.
    doing : the operation, for example ``pull nvcr.io/x:1``.
    name : the image's name, for the hint.
    """
    text = unstyled(message).strip()
    lower = text.lower()
    # Registries and engines word the same refusal in many ways, and send no code that tells them apart.
    if "invalid reference format" in lower:
        return UsageError(f"{doing}: {text}", hint="an image name looks like registry:5000/group/name:tag")
    if _LOCALLY_MISSING.search(lower):
        return no_image(name or text)
    if _UNKNOWN_IMAGE.search(lower):
        return UsageError(
            f"{doing}: the registry has no such image: {text}",
            hint=f"check name and tag: docker manifest inspect {name}; if the image is private: docker login",
        )
    if _DENIED.search(lower):
        login = f"docker login {registry_of(name)}".rstrip()
        return ToolFailed(f"{doing}: access denied: {text}", hint=login)
    return ToolFailed(f"{doing}: {text}", hint=hint_for(lower))


def no_image(name: str) -> UsageError:
    """Return the error for an image that the engine does not have."""
    return UsageError(
        f"the engine has no image {name!r}",
        hint="list its images: docker images; build one: imgkit build RECIPE (see imgkit list); "
        f"pull it: docker pull {name}",
    )


def registry_of(name: str) -> str:
    """Return ``nvcr.io`` of ``nvcr.io/nvidia/pytorch:1``; empty for Docker Hub's short names."""
    first, slash, _ = name.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


@contextlib.contextmanager
def translated(doing: str, *, name: str = "") -> Iterator[None]:
    """Turn every exception of the SDK while `doing` into an ImgkitError."""
    import docker.errors
    import requests.exceptions
    import urllib3.exceptions

    try:
        yield
    except ImgkitError:
        raise
    except docker.errors.APIError as error:
        raise explain(str(error.explanation or error), doing=doing, name=name) from error
    except KeyError as error:
        # The SDK looks for "message" in an answer that is an error. Podman 5 has "error" where a push fails.
        answer = getattr(error.__context__, "response", None)
        if answer is None:
            raise
        message = answer.json().get("error") or answer.text
        raise explain(str(message), doing=doing, name=name) from error
    # ReadTimeout is not a DockerException; when a socket stalls, requests wraps it in ConnectionError.
    except requests.exceptions.RequestException as error:
        if isinstance(error, requests.exceptions.Timeout) or "timed out" in str(error).lower():
            raise ToolFailed(
                f"{doing}: the engine accepted the request and did not answer in time",
                hint=f"it hangs or its disk is very busy (docker ps, iostat); {RESTART_HINT}",
            ) from error
        raise broken(doing, error) from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        # ValueError: half a JSON event, or half an HTTP chunk header, when the engine dies while sending.
        raise broken(doing, error) from error
    except docker.errors.DockerException as error:
        raise explain(str(error), doing=doing, name=name) from error


def broken(doing: str, error: object) -> ToolFailed:
    """Return the error for a connection that broke during an operation."""
    return ToolFailed(f"{doing}: the connection to the engine was lost: {error}", hint=RESTART_HINT)


Event = dict[str, Any]
"""One decoded JSON event; never leaves this package."""


def checked(events: Iterable[Event], *, doing: str, name: str = "") -> Iterator[Event]:
    """Yield `events`, and raise those that report an error; the SDK yields them like any other.

    Raises
    ------
    ToolFailed, UsageError : the engine reported an error in band, or the connection broke.
    """
    with translated(doing, name=name):
        for event in events:
            message = error_of(event)
            if message:
                raise explain(message, doing=doing, name=name)
            yield event


def error_of(event: Event) -> str:
    """Return the error message inside `event`; empty where there is none."""
    detail = event.get("errorDetail")
    return str(event.get("error") or (detail.get("message") if isinstance(detail, dict) else "") or "")


class LayerProgress:
    """Bytes of a push or pull over all of its layers."""

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._layers: dict[str, tuple[int, int]] = {}

    def take(self, event: Event) -> None:
        """Count `event` and report the sum; extraction does not count as a transfer."""
        detail = event.get("progressDetail") or {}
        layer, status = str(event.get("id", "")), str(event.get("status", ""))
        if not detail and (layer or status):
            self._report.line(f"{layer}: {status}" if layer else status)
        if status in ("Downloading", "Pushing") and "current" in detail:
            # While compressing, the engine may send more than it announced.
            current = int(detail["current"])
            self._layers[layer] = (current, max(int(detail.get("total") or 0), current))
            sent, total = map(sum, zip(*self._layers.values(), strict=True))
            self._report.advance(sent, total)
