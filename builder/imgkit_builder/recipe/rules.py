"""Rules for the texts in a recipe, and a parser for image references.

A rule is a generator that yields what is wrong with a value, each fault with a hint. For a valid value, it
yields nothing. `model` lists the rules of each key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from imgkit_builder.recipe.problems import allowed_hint
from imgkit_entrypoints.rules import IMAGE_PATH, Fault, Unfit, bind_mount, printable_text, site_variables

__all__ = ["Fault", "bind_mount", "printable_text"]

PLATFORMS = {"amd64": "linux/amd64", "arm64": "linux/arm64"}
"""The platforms that imgkit builds for: the short name that a recipe may use -> the full name."""
_PLATFORM_ALIASES = {
    **dict.fromkeys(("x86_64", "x86-64", "x64"), "amd64"),
    **dict.fromkeys(("aarch64", "arm64/v8"), "arm64"),
}
TUNING_PREFIXES = ("NCCL_", "FI_", "GLOO_", "UCX_", "OMP_")
"""Prefixes of variables that tune a run. A user must be able to change these for each run."""
_IMGKIT_LABELS = ("title", "version", "created", "revision", "base.name", "base.digest")
"""Labels below ``org.opencontainers.image.`` that imgkit writes itself."""

# "git", "libc6:arm64", "git=1:2.39.2-1", "git/bookworm-backports"
_APT_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9-]+)?(?:=[A-Za-z0-9.+:~-]+|/[a-z0-9.-]+)?")
_BY_NAME_HINT = "name the package, and its index in `options`: [--index-url, URL]; or use `requirements`"
# "git+https://host/group/project@COMMIT" or "name @ git+https://host/group/project@COMMIT"
_GIT_SOURCE = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[A-Za-z0-9._, -]*\])?\s*@\s*)?git\+(?P<url>.*)", re.DOTALL
)
# "https://host/x", "git+ssh://host/x", "./x", "/x"
_URL_OR_PATH = re.compile(r"(?:[a-z+]+://|git\+|\.{0,2}/)")
_ARCHIVE_SUFFIX = re.compile(r"\.(?:whl|zip|tar\.gz)$")
# The part of the URL after "#": "egg=NAME&subdirectory=FOLDER"
_GIT_FRAGMENT = re.compile(r"(?:(?:egg|subdirectory)=[A-Za-z0-9._/-]+&?)+")
_PIP_FILE_OPTIONS = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable")
# pip also accepts a short option joined with its value: "-rfile" means "-r file".
_JOINED_FILE_OPTION = re.compile(r"-[rce].")


def find_recipe_name_faults(text: str) -> Iterator[Fault]:
    """Yield what is wrong with a recipe's name. Images and .sif files are named after it."""
    if not re.fullmatch(r"[a-z0-9]+(?:[._-][a-z0-9]+)*", text):
        better = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "recipe"
        yield f"the name {text!r} cannot become an image's name", f"rename the file to {better}.yaml"


def find_description_faults(text: str) -> Iterator[Fault]:
    """Yield what is wrong with one line of text. It may end in a line break, as a block of YAML does."""
    yield from printable_text(text.rstrip("\n"))


def find_reference_faults(text: str, *, needs_tag: bool = True) -> Iterator[Fault]:
    """Yield a fault if an image reference has neither a tag nor a digest, and `needs_tag` is true.

    A name alone may refer to another image tomorrow. ``nvcr.io/nvidia/pytorch:24.03-py3`` has a tag.

    Raises
    ------
    Unfit : the text is not an image reference. `Rule.apply` raises this error for a fault, too.
    """
    reference = parse_reference(text)
    if needs_tag and not reference.tag and not reference.digest:
        hint = f"write {text}:TAG; an image without a tag changes over time"
        yield f"{text} has neither tag nor digest", hint


def find_platform_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless imgkit can build for the platform `text`, such as ``linux/arm64``.

    The caller must have replaced a short name, such as ``arm64``, by the full one.
    """
    if text in PLATFORMS.values():
        return
    short_name = text.removeprefix("linux/")
    hint = allowed_hint(short_name, PLATFORMS)
    # Another common name, such as x86_64, is not similar enough to the right one for that hint.
    meant_platform = _PLATFORM_ALIASES.get(short_name.lower())
    if meant_platform is not None:
        hint = f"allowed: {', '.join(PLATFORMS)}; did you mean {meant_platform}?"
    yield f"{text!r} is not supported", hint


def find_apt_package_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless `text` is the name of a Debian package, which may include a version."""
    if _APT_PACKAGE.fullmatch(text):
        return
    hint = "write NAME or NAME=VERSION, one package per item"
    if text.startswith("-"):
        hint = "options are not allowed; imgkit sets --no-install-recommends itself"
    elif text.lower() != text and _APT_PACKAGE.fullmatch(text.lower()):
        hint = f"package names are lower-case: {text.lower()}"
    yield f"{text!r} is not a Debian package", hint


def find_pip_package_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless `text` is a PEP 508 requirement with a name, or a commit of a git repository."""
    if text.startswith("-"):
        yield f"{text!r} is an option", "move it to `options` of this step, one word per item"
        return
    git_source = _GIT_SOURCE.match(text)
    if git_source is not None:
        yield from _find_git_url_faults(git_source["url"])
        return
    # pip accepts URLs and paths, but the parser of PEP 508 would call them invalid without saying why.
    if _URL_OR_PATH.match(text) or _ARCHIVE_SUFFIX.search(text):
        yield f"{text!r} is a URL or a path", _BY_NAME_HINT
        return
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        yield f"{text!r} is not a pip requirement", "write NAME, NAME==VERSION or 'NAME>=1,<2'"
        return
    if requirement.url:
        yield f"{text!r} names a URL", _BY_NAME_HINT


def _find_git_url_faults(url: str) -> Iterator[Fault]:
    """Yield a fault unless `url` is ``https://HOST/PATH@COMMIT``, without a user or a token.

    A branch or tag is refused, because it may refer to other code tomorrow. `url` has no ``git+`` in front,
    as it has in a requirement.
    """
    if not url.startswith("https://") or re.search(r"\s", url):
        yield f"git+{url} is not a git repository by https", "write git+https://HOST/PATH@COMMIT"
        return
    address, _, fragment = url.partition("#")
    host_and_user, _, path = address.removeprefix("https://").partition("/")
    # The last "@" of the path precedes the commit.
    repository, _, commit = path.rpartition("@")
    if "@" in host_and_user:
        yield (
            "the URL of a git repository holds a user or a token, which would stay in the image",
            "leave it out, and let git read a secret file: secrets: [netrc] in this step",
        )
    elif not repository:
        yield _incomplete_commit_fault(address, address, "the URL names no commit")
    elif not re.fullmatch(r"[0-9a-f]{40}", commit):
        clone_url = address.removesuffix(f"@{commit}")
        yield _incomplete_commit_fault(address, clone_url, f"{commit!r} is not a whole commit")
    elif fragment and not _GIT_FRAGMENT.fullmatch(fragment):
        yield f"#{fragment} is not known to pip", "allowed: #subdirectory=FOLDER"


def _incomplete_commit_fault(address: str, clone_url: str, problem: str) -> Fault:
    """Return the fault for a git URL without a full commit. `clone_url` is the URL without the ref."""
    return (
        f"git+{address}: {problem}: a branch or tag can name other code tomorrow",
        f"write git+{clone_url}@COMMIT with all 40 digits; git ls-remote {clone_url} prints them",
    )


def find_pip_option_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless `text` is one word of a pip command line: an option, or a value of an option.

    Options that refer to a file are refused, because the file would be missing in the image.
    """
    option, _, _ = text.partition("=")
    if option in _PIP_FILE_OPTIONS or _JOINED_FILE_OPTION.match(text):
        key = "`image.constraints`" if option in ("-c", "--constraint") else "`requirements`"
        yield f"{text!r} names a file that is not in the image", f"use {key}"
    elif text.startswith("-") and re.search(r"\s", text):
        yield f"{text!r} is more than one word", f"write {', '.join(text.split())} as separate items"
    elif not text:
        yield "is empty", "remove it"


def find_pip_name_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless `text` is the name of a Python package without a version."""
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        yield f"{text!r} is not a package name", "write the name alone, without a version"


def find_image_env_faults(text: str) -> Iterator[Fault]:
    """Yield a fault if `text` is the name of a variable that must not be set in an image.

    Such variables tune a run, for example ``NCCL_DEBUG``. With Apptainer, a variable of the image overrides
    the user's variable.
    """
    if text.startswith(TUNING_PREFIXES):
        yield (
            "tuning does not belong in the image: under apptainer an image's variable overrides the user's",
            f"move it to system.env: {{{text}: ...}}",
        )
    yield from find_build_env_faults(text)


def find_build_env_faults(text: str) -> Iterator[Fault]:
    """Yield a fault if `text` is the name of a variable that must not be set while an image is built.

    ``PIP_CONSTRAINT`` would replace the constraints that protect the base's torch.
    """
    if text == "PIP_CONSTRAINT":
        yield "would remove the protection of the base's torch", "use image.constraints"


def find_secret_file_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless the path `text` can be passed to every builder as an option.

    Builders separate the parts of such an option by commas.
    """
    if not text.strip() or "," in text:
        yield f"{text!r} is not a path that a builder takes", "choose a path without a comma"


def find_label_name_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless `text` is the name of a label that imgkit does not write itself."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", text):
        yield f"{text!r} is not a label name", "allowed: letters, digits and . _ - /"
    elif text.startswith("imgkit."):
        yield "imgkit writes the labels that begin with imgkit.", "choose another prefix"
    elif text.removeprefix("org.opencontainers.image.") in _IMGKIT_LABELS and text.startswith("org."):
        yield "imgkit writes this label", "remove it"


def find_image_path_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless `text` is the absolute path of a folder in the image."""
    character_faults = list(printable_text(text))  # line breaks and invisible characters
    if character_faults:
        yield from character_faults
    elif not text.startswith("/"):
        yield f"{text!r} is not absolute", f"write /{text or 'workspace'}"
    elif not IMAGE_PATH.fullmatch(text):
        yield f"{text!r} contains a blank, quote, variable or wildcard", "choose a plain path"
    elif ".." in text.split("/"):
        yield f"{text!r} contains ..", "write the whole path"


def find_copy_target_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless `text` is the path of a folder in the image to which a recipe may copy files."""
    yield from find_image_path_faults(text)
    # In these folders, a mount would hide the copy, or the copy would replace imgkit's own files.
    if re.match(r"/+(?:(?:proc|sys|dev|opt/imgkit)(?:/|$)|$)", text):
        yield f"{text} belongs to the system or to imgkit", "the default is /workspace"


def find_shell_command_faults(text: str) -> Iterator[Fault]:
    """Yield a fault unless every builder can run the shell command `text` as ``RUN COMMAND``.

    The command may have several lines. Docker's classic builder does not support options of RUN.
    """
    # YAML's "|" ends a text with a line break, which is no part of the command.
    yield from printable_text(text.rstrip("\n"), several_lines=True)
    if not text.strip():
        yield "is empty", "remove it"
    elif text.lstrip().startswith("--"):
        yield "begins like an option of RUN (--mount and the like need BuildKit)", "write a shell command"
    elif text.rstrip().endswith("\\"):
        yield "ends with a backslash, which would join it with the next instruction", "remove it"


def find_variable_fault(name: str, value: str, *, has_earlier_value: bool) -> Fault | None:
    """Return what is wrong with a variable's `value` that refers to the variable itself, or None.

    For example, ``PATH: /x:$PATH`` adds to the value that the base image sets. A reference that is only part
    of a list element, such as ``/x$PATH``, cannot be expanded. If `has_earlier_value` is false, there is no
    value to add to, so any reference is a fault.
    """
    try:
        parts = split_inherited(name, value)
    except ValueError:
        return (
            f"imgkit cannot expand {value!r}",
            f"add to the base's value by whole elements: {name}: /FIRST:${name} or {name}: ${name}:/LAST",
        )
    if parts is None or has_earlier_value:
        return None
    return f"an argument has no earlier value: {value!r}", "write the value, or use image.env"


def split_inherited(name: str, value: str) -> tuple[str, str] | None:
    """Split the `value` of the variable `name` at its reference to the value that the base image sets.

    For ``/x/bin:$PATH``, return ``/x/bin`` and an empty text: the parts before and after the reference. If
    the value does not refer to the variable, return None.

    Raises
    ------
    ValueError : the value refers to the variable, but not as exactly one element of a list separated by
        colons.
    """
    # The reference must be a whole element of the list, because "/x$PATH" would join two folders.
    elements = value.split(":")
    references = (f"${name}", f"${{{name}}}")
    positions = [index for index, element in enumerate(elements) if element in references]
    if not positions and name not in site_variables(value):
        return None
    other_elements = [element for element in elements if element not in references]
    is_named_once = len(positions) == 1 and name not in site_variables(*other_elements)
    if not is_named_once or not other_elements:
        raise ValueError(f"{value!r} does not name ${name} as one element of a list")
    (position,) = positions
    return ":".join(elements[:position]), ":".join(elements[position + 1 :])


def quote_inherited(name: str, value: str, quote: Callable[[str], str]) -> str | None:
    """Quote a value that refers to its own variable, for a shell or a Dockerfile.

    For example, ``/x:$PATH`` becomes ``"/x${PATH:+:$PATH}"``. The form ``:+`` adds the colon only if the base
    image sets the variable. Otherwise an empty element would remain, which means the current folder in PATH.
    If the value does not refer to the variable, return None.

    Parameters
    ----------
    quote : a function that escapes a text for double quotes.
    """
    parts = split_inherited(name, value)
    if parts is None:
        return None
    before, after = map(quote, parts)
    # The colon belongs to the reference, so that it disappears together with an unset variable.
    if not before:
        return f'"${{{name}:+${name}:}}{after}"'  # "${PATH:+$PATH:}/x"
    reference_with_colon = f"${{{name}:+:${name}}}"
    if not after:
        return f'"{before}{reference_with_colon}"'  # "/x${PATH:+:$PATH}"
    return f'"{before}{reference_with_colon}:{after}"'  # "/x${PATH:+:$PATH}:/y"


MAX_NAME = 255
"""The largest number of characters in the registry and the repository together."""

# These patterns follow the grammar of github.com/distribution/reference.
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_LABEL = r"(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])"
_DOMAIN = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[A-Fa-f0-9:]+\])(?::[0-9]+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_TAG_HINT = "a tag has up to 128 letters, digits, _ . -, and does not begin with . or -"
_DIGEST = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,}")
_HEX_DIGITS = {"sha256": 64, "sha384": 96, "sha512": 128}
_TRANSPORT = re.compile(r"(?:https?|docker|oci|oras|library|docker-archive|docker-daemon):(?://)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReference:
    """The parts of ``registry/repository:tag@digest``. Missing parts are empty."""

    registry: str
    repository: str
    tag: str
    digest: str


def parse_reference(text: str) -> ImageReference:
    """Split an image reference into its parts.

    For example, ``nvcr.io/nvidia/pytorch:24.03-py3`` consists of a registry, a repository and a tag.

    Raises
    ------
    Unfit : the text is not an image reference. The error describes the first problem.
    """
    _refuse_foreign_syntax(text)
    name_and_tag, _, digest = text.partition("@")
    if "@" in text:
        _check_digest(digest)
    # A colon after the last slash begins the tag. An earlier colon begins the port of the registry.
    folder, slash, base_name_and_tag = name_and_tag.rpartition("/")
    base_name, colon, tag = base_name_and_tag.partition(":")
    if colon and not tag:
        raise Unfit("the tag after the colon is empty", _TAG_HINT)
    if colon and not _TAG.fullmatch(tag):
        raise Unfit(f"{tag!r} is not a tag", _TAG_HINT)
    registry, repository = _split_registry(f"{folder}{slash}{base_name}")
    return ImageReference(registry=registry, repository=repository, tag=tag, digest=digest)


def _split_registry(name: str) -> tuple[str, str]:
    """Split the name of an image, without its tag, into the registry and the repository.

    For example, ``nvcr.io/nvidia/pytorch`` is split into ``nvcr.io`` and ``nvidia/pytorch``. The registry of
    ``nvidia/cuda`` is empty, which means Docker Hub.

    Raises
    ------
    Unfit : the registry or the repository is not valid, or the name is too long.
    """
    registry, _, repository = name.partition("/")
    # Like Docker, treat the first part as a registry if it contains a dot, a colon or a capital letter, or is
    # "localhost". Otherwise it belongs to the repository.
    if not repository or not (registry == "localhost" or re.search(r"[.:A-Z]", registry)):
        registry = ""
        repository = name
    if registry and not _DOMAIN.fullmatch(registry):
        raise Unfit(f"{registry!r} is not a registry", "write HOST or HOST:PORT")
    for component in repository.split("/"):
        _check_component(component, repository)
    if len(name) > MAX_NAME:
        raise Unfit(f"the name has {len(name)} characters", f"at most {MAX_NAME} are allowed")
    return registry, repository


def _refuse_foreign_syntax(text: str) -> None:
    """Raise Unfit for syntax that other programs accept, but that an image reference does not have.

    Examples are variables, white space and transports such as the ``docker://`` of skopeo.
    """
    if not text:
        raise Unfit("the image reference is empty", "write NAME:TAG")
    if re.search(r"\s", text):
        raise Unfit(f"{text!r} contains a blank", "an image reference is one word, NAME:TAG")
    if "$" in text:
        raise Unfit(f"{text} contains a variable", "recipes have no variables: write the whole name")
    match = _TRANSPORT.match(text)
    # A colon alone is not enough: in docker:5000/x, docker is a registry.
    if match and ("//" in match[0] or text.startswith(("docker-", "oci:"))):
        raise Unfit(f"{match[0]} is not part of an image reference", f"write {text[match.end() :]}")


def _check_component(component: str, repository: str) -> None:
    """Raise Unfit if `component` is not valid. It is a part of `repository` between two slashes."""
    if _COMPONENT.fullmatch(component):
        return
    if not component:
        raise Unfit(f"{repository!r} has an empty part between slashes", "write NAME:TAG")
    if component != component.lower():
        raise Unfit(
            f"{component!r} has capital letters", f"repository names are lower-case: {component.lower()}"
        )
    hint = "allowed: lower-case letters and digits, with . _ or - between them"
    raise Unfit(f"{component!r} is not a repository name", hint)


def _check_digest(digest: str) -> None:
    """Raise Unfit if `digest` is not valid, such as a sha256 with too few digits."""
    algorithm, _, hexadecimal = digest.partition(":")
    expected = _HEX_DIGITS.get(algorithm)
    if expected and len(hexadecimal) != expected:
        raise Unfit(f"the {algorithm} digest has {len(hexadecimal)} digits", f"it needs {expected}")
    if not _DIGEST.fullmatch(digest):
        raise Unfit(f"{digest!r} is not a digest", "write sha256: and 64 hexadecimal digits")
