"""Convert the engine's exceptions, error events and broken connections to errors with a hint for the user."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from imgkit_builder.base.progress import Reporter
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError
from imgkit_entrypoints.terminal import strip_styles

# The patterns are in lower case, because messages of Docker, Podman, containerd and registries are converted
# to lower case before the search.
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
# These patterns are also searched in the output of build steps, so none may be common in other output.
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
"""Pattern of a known problem in the output of an engine or a build step -> what to do. The first match
counts."""


def find_hint(text: str) -> str | None:
    """Return what to do about a known problem that `text` mentions, or None if there is no such problem."""
    # The patterns are written in lower case.
    lower = text.lower()
    for pattern, hint in _HINTS:
        if re.search(pattern, lower):
            return hint
    return None


def explain_message(message: str, *, doing: str, name: str = "") -> ImgkitError:
    """Return the error for a `message` of the engine, with a hint for the user.

    Parameters
    ----------
    message : the text of an error response, or of an error event in a stream.
    doing : the operation, such as ``pull nvcr.io/x:1``.
    name : the name of the image, for the hint.
    """
    plain_message = strip_styles(message).strip()
    lower_message = plain_message.lower()
    # The kind of error can only be derived from the text, because engines and registries send no code for it.
    # The first match counts.
    if "invalid reference format" in lower_message:
        return UsageError(
            f"{doing}: {plain_message}", hint="an image name looks like registry:5000/group/name:tag"
        )
    if _LOCALLY_MISSING.search(lower_message):
        return no_image_error(name or plain_message)
    if _UNKNOWN_IMAGE.search(lower_message):
        return UsageError(
            f"{doing}: the registry has no such image: {plain_message}",
            hint=f"check name and tag: docker manifest inspect {name}; if the image is private: docker login",
        )
    if _DENIED.search(lower_message):
        login = f"docker login {registry_of(name)}".rstrip()
        return ToolFailed(f"{doing}: access denied: {plain_message}", hint=login)
    return ToolFailed(f"{doing}: {plain_message}", hint=find_hint(lower_message))


def no_image_error(name: str) -> UsageError:
    """Return the error for an image that is not on the engine."""
    return UsageError(
        f"the engine has no image {name!r}",
        hint="list its images: docker images; build one: imgkit build RECIPE (see imgkit list); "
        f"pull it: docker pull {name}",
    )


def registry_of(name: str) -> str:
    """Return the registry of an image name: ``nvcr.io`` for ``nvcr.io/nvidia/pytorch:1``.

    For a name without a registry, which means Docker Hub, the result is empty.
    """
    first, slash, _ = name.partition("/")
    is_host = "." in first or ":" in first or first == "localhost"
    if not slash or not is_host:
        return ""
    return first


@contextlib.contextmanager
def translate_errors(doing: str, *, name: str = "") -> Iterator[None]:
    """Convert every exception of the SDK in the block to an ImgkitError with a hint.

    `doing` is the operation, such as ``pull nvcr.io/x:1``. `name` is the name of the image.
    """
    import docker.errors
    import requests.exceptions
    import urllib3.exceptions

    # The order of the clauses matters: an APIError is also a RequestException, which is also an OSError.
    try:
        yield
    except ImgkitError:
        raise
    except docker.errors.APIError as error:
        raise explain_message(str(error.explanation or error), doing=doing, name=name) from error
    except KeyError as error:
        message = _read_podman_message(error)
        if message is None:
            raise
        raise explain_message(message, doing=doing, name=name) from error
    # The SDK does not convert exceptions of requests. If the connection stalls, the exception is a Timeout,
    # or a ConnectionError with "timed out" in its text.
    except requests.exceptions.RequestException as error:
        if isinstance(error, requests.exceptions.Timeout) or "timed out" in str(error).lower():
            raise ToolFailed(
                f"{doing}: the engine accepted the request and did not answer in time",
                hint=f"it hangs or its disk is very busy (docker ps, iostat); {RESTART_HINT}",
            ) from error
        raise connection_lost_error(doing, error) from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        # A ValueError means an incomplete JSON event or HTTP chunk header, because the engine died while
        # sending it.
        raise connection_lost_error(doing, error) from error
    except docker.errors.DockerException as error:
        raise explain_message(str(error), doing=doing, name=name) from error


def _read_podman_message(error: KeyError) -> str | None:
    """Return the message of the error response that led to a KeyError in the SDK, or None if there is none.

    The SDK expects the key "message" in an error response. If a push fails, Podman 5 sends "error" instead.
    """
    # The response is in the exception that was being handled when the KeyError occurred.
    response = getattr(error.__context__, "response", None)
    if response is None:
        return None
    return str(response.json().get("error") or response.text)


def connection_lost_error(doing: str, error: object) -> ToolFailed:
    """Return the error for a connection to the engine that broke during an operation."""
    return ToolFailed(f"{doing}: the connection to the engine was lost: {error}", hint=RESTART_HINT)


Event = dict[str, Any]
"""A JSON event of the engine, as decoded by the SDK. Only modules of this package use it."""


def refuse_error_events(events: Iterable[Event], *, doing: str, name: str) -> Iterator[Event]:
    """Yield `events`, and raise an exception at an event that reports an error.

    The SDK does not raise an exception for such an event. It yields the event like any other.

    Raises
    ------
    ToolFailed, UsageError : an event reports an error, or the connection broke.
    """
    with translate_errors(doing, name=name):
        for event in events:
            message = event_error(event)
            if message:
                raise explain_message(message, doing=doing, name=name)
            yield event


def event_error(event: Event) -> str:
    """Return the error message in `event`, or an empty text if the event reports no error."""
    message = event.get("error")
    detail = event.get("errorDetail")
    if not message and isinstance(detail, dict):
        message = detail.get("message")
    return str(message or "")


class LayerProgress:
    """Adds up the transferred bytes of all layers of a push or pull, and reports the sum."""

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._sent_bytes: dict[str, int] = {}
        """The bytes sent so far, by the id of the layer."""
        self._total_bytes: dict[str, int] = {}
        """The size of each layer, by its id."""

    def add_event(self, event: Event) -> None:
        """Count the bytes that `event` reports, and report the sum over all layers.

        Only transferred bytes count. Events about layers that are being extracted are ignored.
        """
        detail = event.get("progressDetail") or {}
        layer = str(event.get("id", ""))
        status = str(event.get("status", ""))
        if not detail:
            # The event only reports a state, such as "Pull complete".
            state = f"{layer}: {status}" if layer else status
            if state:
                self._report.line(state)
            return
        if status not in ("Downloading", "Pushing") or "current" not in detail:
            return
        sent_bytes = int(detail["current"])
        # The engine may send more bytes than announced. Increase the total, so that the progress never
        # exceeds 100 %.
        total_bytes = max(int(detail.get("total") or 0), sent_bytes)
        self._sent_bytes[layer] = sent_bytes
        self._total_bytes[layer] = total_bytes
        self._report.advance(sum(self._sent_bytes.values()), sum(self._total_bytes.values()))
