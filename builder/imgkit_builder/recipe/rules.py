"""Rules for the text of values, beyond their type: a table maps places in a recipe to rules.

A rule yields faults, each a sentence and a hint; it does not know its place. Rules check the tree, not built
values, so that one wrong value does not hide another.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from imgkit_builder.recipe import systems
from imgkit_builder.recipe.problems import KeyPath, choices

Fault = tuple[str, str]
Rule = Callable[[str], Iterator[Fault]]

PLATFORMS = ("linux/amd64", "linux/arm64")
JOB_FIELDS = ("account", "name", "qos", "time")
"""Fields of `Queue` that a job may have to state."""

TUNING = ("NCCL_", "FI_", "GLOO_", "UCX_", "OMP_")
"""Variables that a user must be able to change per run."""

_PLATFORM_ALIASES = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "x64": "amd64",
    "aarch64": "arm64",
    "arm64/v8": "arm64",
}
_OWN_LABELS = ("title", "version", "created", "revision", "base.name", "base.digest")

_NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_APT = re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9-]+)?(?:=[A-Za-z0-9.+:~-]+|/[a-z0-9.-]+)?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE_PATH = re.compile(r"/[^\s$\"'\\`*?\[\]]*")
_TIME = re.compile(r"(?:\d+-)?\d{1,3}:\d{2}(?::\d{2})?")
_PIP_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_BY_NAME = "name the package, and its index in `options`: [--index-url, URL]; or use `requirements`"
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: control, format, surrogates, separators of lines and paragraphs."""
_UNPROTECTED = ("would remove the protection of the base's torch", "use image.constraints")
_GIT_SOURCE = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9._, -]*\])?\s*@\s*)?git\+(?P<url>.*)", re.DOTALL
)
_PIP_FILES = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable")


def printable(text: str, *, several_lines: bool = False) -> Iterator[Fault]:
    """No line break, control or invisible character: a value is one line of a Dockerfile or a job script.

    Invisible ones, such as marks of the direction of writing, make a text look like another one. A shell
    command may have several lines.
    """
    if text.isprintable():
        return
    allowed = "\t\n" if several_lines else "\t"
    bad = next((one for one in text if one not in allowed and unicodedata.category(one) in _UNSEEN), "")
    if bad and bad in "\n\r\x85\u2028\u2029":
        hint = (
            "write >- instead of | or >"
            if text.strip().count("\n") == 0
            else "write it on one line, commands joined with &&"
        )
        yield "contains a line break", hint
    elif bad:
        kind = "control" if unicodedata.category(bad) == "Cc" else "invisible"
        yield f"contains the {kind} character U+{ord(bad):04X}", "delete it"


def recipe_name(text: str) -> Iterator[Fault]:
    """A recipe's name; images and .sif files get it too."""
    if not _NAME.fullmatch(text):
        better = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "recipe"
        yield f"the name {text!r} cannot become an image's name", f"rename the file to {better}.yaml"


def image_reference(text: str) -> Iterator[Fault]:
    """An image reference with a tag or digest."""
    try:
        reference = parse_reference(text)
    except BadReference as bad:
        yield bad.what, bad.hint
        return
    if not reference.tag and not reference.digest:
        yield (
            f"{text} has neither tag nor digest",
            f"write {text}:TAG; an image without a tag changes over time",
        )


def platform(text: str) -> Iterator[Fault]:
    """An architecture that imgkit builds for."""
    if text not in PLATFORMS:
        short = text.removeprefix("linux/")
        names = [name.removeprefix("linux/") for name in PLATFORMS]
        alias = _PLATFORM_ALIASES.get(short.lower())
        hint = f"allowed: {', '.join(names)}; did you mean {alias}?" if alias else choices(short, names)
        yield f"{text!r} is not supported", hint


def apt_package(text: str) -> Iterator[Fault]:
    """The name of a Debian package, optionally with a version."""
    if not _APT.fullmatch(text):
        hint = "write NAME or NAME=VERSION, one package per item"
        if text.startswith("-"):
            hint = "options are not allowed; imgkit sets --no-install-recommends itself"
        elif text.lower() != text and _APT.fullmatch(text.lower()):
            hint = f"package names are lower-case: {text.lower()}"
        yield f"{text!r} is not a Debian package", hint


def pip_package(text: str) -> Iterator[Fault]:
    """A PEP 508 requirement by name, or a commit of a git repository; options and paths belong elsewhere."""
    if text.startswith("-"):
        yield f"{text!r} is an option", "move it to `options` of this step, one word per item"
        return
    if (source := _GIT_SOURCE.match(text)) is not None:
        yield from _git_source(source["url"])
        return
    if re.match(r"(?:[a-z+]+://|git\+|\.{0,2}/)", text) or re.search(r"\.(?:whl|zip|tar\.gz)$", text):
        yield (
            f"{text!r} is a URL or a path",
            _BY_NAME,
        )
        return
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        yield f"{text!r} is not a pip requirement", "write NAME, NAME==VERSION or 'NAME>=1,<2'"
        return
    if requirement.url:
        yield f"{text!r} names a URL", _BY_NAME


def _git_source(url: str) -> Iterator[Fault]:
    """``https://HOST/PATH@COMMIT``; a branch or tag can name other code tomorrow."""
    place, _, fragment = url.partition("#")
    host, _, path = place.removeprefix("https://").partition("/")
    repository, _, commit = path.rpartition("@")
    if not place.startswith("https://") or re.search(r"\s", url):
        yield f"git+{url} is not a git repository by https", "write git+https://HOST/PATH@COMMIT"
    elif "@" in host:
        yield (
            "the URL of a git repository holds a user or a token, which would stay in the image",
            "leave it out, and let git read a secret file: secrets: [netrc] in this step",
        )
    elif not re.fullmatch(r"[0-9a-f]{40}", commit) or not repository:
        named = f"{commit!r} is" if repository else "the URL names"
        what = "not a whole commit" if repository else "no commit"
        address = place if not repository else place.rpartition("@")[0]
        yield (
            f"git+{place}: {named} {what}: a branch or tag can name other code tomorrow",
            f"write git+{address}@COMMIT with all 40 digits; git ls-remote {address} prints them",
        )
    elif fragment and not re.fullmatch(r"(?:(?:egg|subdirectory)=[A-Za-z0-9._/-]+&?)+", fragment):
        yield f"#{fragment} is not known to pip", "allowed: #subdirectory=FOLDER"


def pip_option(text: str) -> Iterator[Fault]:
    """One word of a pip command line that uses no file of the host."""
    word = text.partition("=")[0]
    if word in _PIP_FILES or re.match(r"-[rce].", text):
        where = "`image.constraints`" if word in ("-c", "--constraint") else "`requirements`"
        yield f"{text!r} names a file that is not in the image", f"use {where}"
    elif text.startswith("-") and re.search(r"\s", text):
        yield f"{text!r} is more than one word", f"write {', '.join(text.split())} as separate items"
    elif not text:
        yield "is empty", "remove it"


def pip_name(text: str) -> Iterator[Fault]:
    """A bare package name."""
    if not _PIP_NAME.fullmatch(text):
        yield f"{text!r} is not a package name", "write the name alone, without a version"


def image_env_name(text: str) -> Iterator[Fault]:
    """The name of a variable that may be stored in the image."""
    yield from env_name(text)
    if text.startswith(TUNING):
        yield (
            "tuning does not belong in the image: under apptainer an image's variable overrides the user's",
            f"move it to system.env: {{{text}: ...}}",
        )
    elif text == "PIP_CONSTRAINT":
        yield _UNPROTECTED


def pip_env_name(text: str) -> Iterator[Fault]:
    """The name of a variable of one pip step."""
    yield from env_name(text)
    if text == "PIP_CONSTRAINT":
        yield _UNPROTECTED


def env_value(text: str) -> Iterator[Fault]:
    """A variable's value, which no shell reads."""
    if found := re.search(r"\$\(\(|\$\(|`[^`]*`", text):
        shown = {"$((": "$((...))", "$(": "$(...)"}.get(found.group(), "`...`")
        yield (
            f"{shown} is not executed: the variable would hold this text as it is written",
            'write the value, such as "8"; or set the variable where a shell reads it, or in your program',
        )


_REFERENCE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")


def inherited(name: str, value: str) -> tuple[str, str] | None:
    """What a list such as ``/x/bin:$PATH`` has before and after the base's value of `name`.

    None where the value does not name itself.

    Raises
    ------
    ValueError : it does, but not as one whole element of a list with colons.
    """
    itself = (f"${name}", f"${{{name}}}")
    parts = value.split(":")
    at = [number for number, part in enumerate(parts) if part in itself]
    if (
        len(at) == 1
        and len(parts) > 1
        and name not in _references(":".join(parts[: at[0]] + parts[at[0] + 1 :]))
    ):
        return ":".join(parts[: at[0]]), ":".join(parts[at[0] + 1 :])
    if name in _references(value):
        raise ValueError(f"{value!r} does not name ${name} as one element of a list")
    return None


def _references(text: str) -> set[str]:
    return {match[1] or match[2] for match in _REFERENCE.finditer(text)}


def expanded(name: str, value: str, quote: Callable[[str], str]) -> str | None:
    """`value` for a shell or a Dockerfile, with the base's value where it names itself; else None.

    `quote` escapes a text for double quotes. A base without the variable gives no empty element, which
    would mean the current folder.
    """
    around = inherited(name, value)
    if around is None:
        return None
    before, after = map(quote, around)
    if not before:
        return f'"${{{name}:+${name}:}}{after}"'
    return f'"{before}${{{name}:+:${name}}}{f":{after}" if after else ""}"'


def env_name(text: str) -> Iterator[Fault]:
    """The name of a shell variable."""
    if not _ENV.fullmatch(text):
        yield (
            f"{text!r} is not a variable name",
            "allowed: letters, digits and _, but no digit at the beginning",
        )


def secret_name(text: str) -> Iterator[Fault]:
    """The name of a build secret, which is a file's name and one word of a builder's option."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text):
        yield f"{text!r} is not a name of a secret", "allowed: letters, digits and _ . -"


def secret_file(text: str) -> Iterator[Fault]:
    """A path that fits into the options of all builders."""
    if not text.strip() or "," in text:
        yield f"{text!r} is not a path that a builder takes", "choose a path without a comma"


def label_name(text: str) -> Iterator[Fault]:
    """The name of a label that imgkit does not write itself."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", text):
        yield f"{text!r} is not a label name", "allowed: letters, digits and . _ - /"
    elif text.startswith("imgkit."):
        yield "imgkit writes the labels that begin with imgkit.", "choose another prefix"
    elif text.removeprefix("org.opencontainers.image.") in _OWN_LABELS and text.startswith("org."):
        yield "imgkit writes this label", "remove it"


def image_path(text: str) -> Iterator[Fault]:
    """An absolute folder in the image."""
    if not text.startswith("/"):
        yield f"{text!r} is not absolute", f"write /{text}" if text else "write /workspace"
    elif not _IMAGE_PATH.fullmatch(text):
        yield f"{text!r} contains a blank, quote, variable or wildcard", "choose a plain path"
    elif ".." in text.split("/"):
        yield f"{text!r} contains ..", "write the whole path"


def copy_target(text: str) -> Iterator[Fault]:
    """An absolute folder in the image that a user may write to."""
    faults = list(image_path(text))
    yield from faults
    if not faults and re.match(r"/+(?:(?:proc|sys|dev|opt/imgkit)(?:/|$)|$)", text):
        yield f"{text} belongs to the system or to imgkit", "the default is /workspace"


def shell_command(text: str) -> Iterator[Fault]:
    """A command for the shell, in a form that the classic builder supports."""
    if not text.strip():
        yield "is empty", "remove it"
    elif text.lstrip().startswith("--"):
        yield "begins like an option of RUN (--mount and the like need BuildKit)", "write a shell command"
    elif text.rstrip().endswith("\\"):
        yield "ends with a backslash, which would join it with the next instruction", "remove it"


def scheduler(text: str) -> Iterator[Fault]:
    """A system that imgkit ships or that a plug-in adds."""
    if not systems.is_known(text):
        yield f"{text!r} is not known", choices(systems.meant(text), systems.words())


def walltime(text: str) -> Iterator[Fault]:
    """A duration as schedulers read it; empty is "not set"."""
    if text and not _TIME.fullmatch(text):
        yield f"{text!r} is not a duration", 'write "HH:MM:SS"'


def driver(text: str) -> Iterator[Fault]:
    """A version of NVIDIA's driver; empty means not known."""
    if text and not re.fullmatch(r"[0-9]{3,4}(?:\.[0-9]{1,3}){0,2}", text):
        yield f"{text!r} is not a version of NVIDIA's driver", 'write what nvidia-smi shows: "535.129.03"'


def job_field(text: str) -> Iterator[Fault]:
    """The name of a field of `Queue`."""
    if text not in JOB_FIELDS:
        yield f"{text!r} is not a field of a job", choices(text, JOB_FIELDS)


def bind(text: str) -> Iterator[Fault]:
    """``SRC[:DEST[:ro]]``."""
    parts = text.split(":")
    if len(parts) > 3 or not all(part.startswith("/") for part in parts[:2]) or "," in text:
        yield f"{text!r} is not a bind", "write /SRC, /SRC:/DEST or /SRC:/DEST:ro"
    elif len(parts) == 3 and parts[2] not in ("ro", "rw"):
        yield f"{parts[2]!r} is not a bind option", choices(parts[2], ("ro", "rw"))


def host_folder(text: str) -> Iterator[Fault]:
    """A folder on the nodes, for a bind and for LD_LIBRARY_PATH."""
    if not _IMAGE_PATH.fullmatch(text) or re.search("[:,]", text):
        yield (
            f"{text!r} is not a folder on the nodes",
            "write an absolute path without blanks, quotes and $ : ,",
        )


def word(text: str) -> Iterator[Fault]:
    """A program, module or host: one word."""
    if not text or re.search(r"\s", text):
        yield f"{text!r} is not one word", "write it without blanks"


def host(text: str) -> Iterator[Fault]:
    """``[USER@]HOST`` as ssh accepts it; empty means not set."""
    if text and not re.fullmatch(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*", text):
        yield f"{text!r} is not a host", "write HOST or USER@HOST; the folder belongs in `directory`"


def srun_option(text: str) -> Iterator[Fault]:
    """An option of srun that leaves the number of its tasks alone."""
    if not text.strip():
        yield "is empty", "remove it"
    elif re.match(r"--(?:nodes|ntasks|ntasks-per-node|kill-on-bad-exit|wait|no-kill)\b|-[nNKkW]", text):
        yield f"imgkit decides {text.partition('=')[0]} itself", "remove it; --nodes of a job sets its nodes"


def partition_name(text: str) -> Iterator[Fault]:
    """The name of one Slurm partition."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text):
        yield f"{text!r} is not the name of a partition", "write one name as sinfo prints it, without *"


def interface(text: str) -> Iterator[Fault]:
    """The whole name of a network interface, as ``ip link`` prints it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,14}", text):
        hint = "write one whole name as ip link prints it, such as ib0, without = ^ and commas"
        yield f"{text!r} is not the name of an interface", hint


def host_suffix(text: str) -> Iterator[Fault]:
    """What can follow the first part of a host name."""
    if not re.fullmatch(r"[A-Za-z0-9.-]*", text):
        yield f"{text!r} cannot end a host name", "allowed: letters, digits, - and ."


def not_empty(text: str) -> Iterator[Fault]:
    """Any text that is not empty."""
    if not text.strip():
        yield "is empty", "remove it"


ANY = "*"
"""Any key or index in a pattern."""

COMMANDS: tuple[tuple[str, ...], ...] = (("image", "run", ANY), ("image", "run", ANY, "command"))
"""Places of shell commands: the short form and the mapping."""

TEXT_RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("image", "base"), image_reference),
    (("image", "current_base"), image_reference),
    (("image", "platforms", ANY), platform),
    (("image", "secrets", ANY, "id"), secret_name),
    (("image", "secrets", ANY, "env"), env_name),
    (("image", "secrets", ANY, "file"), secret_file),
    (("image", "apt", ANY), apt_package),
    (("image", "pip", ANY, "packages", ANY), pip_package),
    (("image", "pip", ANY, "options", ANY), pip_option),
    (("image", "pip", ANY, "editable"), copy_target),
    (("image", "pip", ANY, "ignore", ANY), not_empty),
    (("image", "args", ANY), env_value),
    (("image", "uv", "extras", ANY), pip_name),
    (("image", "uv", "groups", ANY), pip_name),
    (("image", "constraints", "drop", ANY), pip_name),
    (("image", "copy", ANY, "target"), copy_target),
    (("image", "copy", ANY, "ignore", ANY), not_empty),
    *((place, shell_command) for place in COMMANDS),
    (("image", "workdir"), image_path),
    (("image", "env", ANY), env_value),
    (("image", "pip", ANY, "env", ANY), env_value),
    (("system", "env", ANY), env_value),
    (("system", "scheduler"), scheduler),
    (("system", "runtime", "command"), word),
    (("system", "runtime", "modules", ANY), word),
    (("system", "runtime", "options", ANY), not_empty),
    (("system", "runtime", "binds", ANY), bind),
    (("system", "runtime", "host_libs", ANY), host_folder),
    (("system", "runtime", "host_modules", ANY), word),
    (("system", "node", "driver"), driver),
    (("system", "queue", "time"), walltime),
    (("system", "queue", "required", ANY), job_field),
    (("system", "queue", "limits", ANY), walltime),
    (("system", "queue", "options", ANY), not_empty),
    (("system", "queue", "sif", ANY), not_empty),
    (("system", "queue", "srun", ANY), srun_option),
    (("system", "queue", "chunk", ANY), word),
    (("system", "partitions", ANY, "interfaces", ANY), interface),
    (("system", "fabric", "head_suffix"), host_suffix),
    (("system", "transfer", "host"), host),
)

KEY_RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("image", "env", ANY), image_env_name),
    (("image", "pip", ANY, "env", ANY), pip_env_name),
    (("image", "args", ANY), pip_env_name),
    (("image", "labels", ANY), label_name),
    (("system", "env", ANY), env_name),
    (("system", "partitions", ANY), partition_name),
)


def matches(path: KeyPath, pattern: tuple[str, ...]) -> bool:
    """Whether `path` is a place that `pattern` names."""
    return len(path) == len(pattern) and all(
        want in (ANY, part) for part, want in zip(path, pattern, strict=True)
    )


def of_text(path: KeyPath, text: str) -> list[Fault]:
    """Everything wrong with the text at `path`."""
    faults = list(printable(text, several_lines=any(matches(path, place) for place in COMMANDS)))
    rules = [rule for pattern, rule in TEXT_RULES if matches(path, pattern)]
    faults = faults or [fault for rule in rules for fault in rule(text)]
    return faults or list(_names_itself(path, text))


def is_variable(path: KeyPath) -> bool:
    """Whether `path` is a variable of the image or of its build."""
    places = (("image", "env", ANY), ("image", "args", ANY), ("image", "pip", ANY, "env", ANY))
    return any(matches(path, place) for place in places)


def _names_itself(path: KeyPath, text: str) -> Iterator[Fault]:
    """``PATH: /x:$PATH`` adds to the base's value; another text with ``$PATH`` would hold it literally."""
    if not is_variable(path):
        return
    name = str(path[-1])
    try:
        around = inherited(name, text)
    except ValueError:
        yield (
            f"imgkit cannot expand {text!r}",
            f"add to the base's value by whole elements: {name}: /FIRST:${name} or {name}: ${name}:/LAST",
        )
        return
    if around is not None and path[:2] == ("image", "args"):
        yield f"an argument has no earlier value: {text!r}", "write the value, or use image.env"


def of_key(path: KeyPath) -> list[Fault]:
    """Everything wrong with the key that `path` ends with."""
    name = str(path[-1])
    faults = list(printable(name))
    return faults or [fault for pattern, rule in KEY_RULES if matches(path, pattern) for fault in rule(name)]


MAX_NAME = 255
"""Characters of registry and repository together."""

_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_LABEL = r"(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])"
_DOMAIN = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[A-Fa-f0-9:]+\])(?::[0-9]+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}")
_HEX_DIGITS = {"sha256": 64, "sha384": 96, "sha512": 128}
_TRANSPORT = re.compile(r"(?:https?|docker|oci|oras|library|docker-archive|docker-daemon):(?://)?")


class BadReference(ValueError):
    """The reason why a text is not an image reference, and what to write instead."""

    def __init__(self, *, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReference:
    """``registry/repository:tag@digest``; missing parts are empty."""

    registry: str
    repository: str
    tag: str
    digest: str


def parse_reference(text: str) -> ImageReference:
    """Split an image reference into its parts.

    Raises
    ------
    BadReference : names the first problem.
    """
    if not text:
        raise BadReference(what="the image reference is empty", hint="write NAME:TAG")
    if re.search(r"\s", text):
        raise BadReference(what=f"{text!r} contains a blank", hint="an image reference is one word, NAME:TAG")
    if "$" in text:
        raise BadReference(
            what=f"{text} contains a variable", hint="recipes have no variables: write the whole name"
        )
    transport = _TRANSPORT.match(text)
    if transport and ("//" in transport.group() or text.startswith(("docker-", "oci:"))):
        raise BadReference(
            what=f"{transport.group()} is not part of an image reference",
            hint=f"write {text[transport.end() :]}",
        )
    name, _, digest = text.partition("@")
    if "@" in text:
        _check_digest(digest)
    # A colon after the last slash begins the tag; an earlier colon begins a registry's port.
    head, slash, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise BadReference(
            what=f"{tag!r} is not a tag" if tag else "the tag after the colon is empty",
            hint="a tag has up to 128 letters, digits, _ . -, and does not begin with . or -",
        )
    name = f"{head}{slash}{last}"
    first, _, rest = name.partition("/")
    has_registry = bool(rest) and (bool(re.search(r"[.:A-Z]", first)) or first == "localhost")
    registry, repository = (first, rest) if has_registry else ("", name)
    if registry and not _DOMAIN.fullmatch(registry):
        raise BadReference(what=f"{registry!r} is not a registry", hint="write HOST or HOST:PORT")
    for component in repository.split("/"):
        _check_component(component, repository)
    if len(name) > MAX_NAME:
        raise BadReference(
            what=f"the name has {len(name)} characters", hint=f"at most {MAX_NAME} are allowed"
        )
    return ImageReference(registry=registry, repository=repository, tag=tag, digest=digest)


def _check_component(component: str, repository: str) -> None:
    if _COMPONENT.fullmatch(component):
        return
    if not component:
        raise BadReference(what=f"{repository!r} has an empty part between slashes", hint="write NAME:TAG")
    if component != component.lower():
        raise BadReference(
            what=f"{component!r} has capital letters",
            hint=f"repository names are lower-case: {component.lower()}",
        )
    raise BadReference(
        what=f"{component!r} is not a repository name",
        hint="allowed: lower-case letters and digits, with . _ or - between them",
    )


def _check_digest(digest: str) -> None:
    algorithm, _, hexadecimal = digest.partition(":")
    wanted = _HEX_DIGITS.get(algorithm)
    if wanted and len(hexadecimal) != wanted:
        raise BadReference(
            what=f"the {algorithm} digest has {len(hexadecimal)} digits", hint=f"it needs {wanted}"
        )
    if not _DIGEST.fullmatch(digest):
        raise BadReference(what=f"{digest!r} is not a digest", hint="write sha256: and 64 hexadecimal digits")
