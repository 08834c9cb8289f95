"""The one list of what looks like a secret: names of variables, formats of tokens, names of files."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

_STRONG = re.compile(
    r"TOKEN(?!IZER|S(?:$|_))|SECRET|PASSW(?:OR)?D|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL|"
    r"(?:^|_)(?:PWD|JWT|COOKIE)$|(?<!BY)(?<!COM)(?<!SUR)PASS$"
)
"""Names of variables, in capital letters."""
_STRONG_OPTION = re.compile(
    r"(?:SECRET|PASSW(?:OR)?D|PASSPHRASE|(?:API|ACCESS|SECRET|PRIVATE)_?KEY|CREDENTIALS?)$|"
    r"(?:^|_)(?:PWD|JWT|COOKIE)$|^(?:PASS|(?:API|ACCESS|AUTH|BEARER|HF|HUB|GITHUB|GITLAB|WANDB|LOGIN|MY)?_?TOKEN)$"
)
"""Names of options and of settings in small letters: the last words of the name decide, since many other
options of a program have such a word in front, ``--token-dropout`` or ``--pad-token``.
"""
_WEAK = re.compile(r"(?:^|_)(?:KEY|AUTH|PAT|PASS|TOKEN)$")
"""Names that also mean other things: ``IMAGE_KEY=pixel_values``."""
_PLACE = re.compile(r"_(?:FILE|PATH|DIR|FOLDER|NAME)$")
"""Names of where a secret is, and not of the secret."""
_SWITCH = re.compile(r"--?(?:no|require|use|ask|show|hide|prompt)[-_]")
"""Beginnings of options that usually take no value: the next word is something else."""
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{16,}")
_HARMLESS = re.compile(r"|/.*|\$.*|<.*|\[.*\]|\*+|[\d.]+|true|false|yes|no|on|off|none|null", re.IGNORECASE)
"""Harmless values: nothing, a path, another variable, a word of a tokenizer, stars, a number, a switch."""

_VALUES = (
    (re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_\w{40,}"), "a GitHub token"),
    (re.compile(r"\bgl(?:pat|dt|rt|cbt)-[\w-]{20,}"), "a GitLab token"),
    (re.compile(r"\bhf_[A-Za-z0-9]{30,}"), "a Hugging Face token"),
    (re.compile(r"\bpypi-[\w-]{50,}"), "a PyPI token"),
    (re.compile(r"\bnpm_[A-Za-z0-9]{36}"), "an npm token"),
    (re.compile(r"\bdckr_(?:pat|oat)_[\w-]{20,}"), "a Docker token"),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{32,}"), "an API key"),
    (re.compile(r"\bnvapi-[\w-]{40,}"), "an NVIDIA API key"),
    (re.compile(r"\bwandb_v1_\w{40,}"), "a Weights & Biases key"),
    (re.compile(r"\bAIza[\w-]{35}"), "a Google API key"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "an AWS access key"),
    (re.compile(r"\bxox[abeoprs]-[\w-]{10,}"), "a Slack token"),
    (re.compile(r"\beyJ[\w-]{10,2000}\.eyJ[\w-]{10,2000}\.[\w-]+"), "a JSON web token"),
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----(?:.{0,20000}?-----END [A-Z ]*-----)?",
            re.DOTALL,
        ),
        "a private key",
    ),
    (
        re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://([^\s/:@]*:(?!\$)[^\s/]+)@", re.IGNORECASE),
        "a URL with a password",
    ),
    (re.compile(r"\bhttps?://([^\s/:$@]{16,})@", re.IGNORECASE), "a URL with a token"),
    (
        re.compile(
            r"\bauthorization\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+(?![$\"'<])([^\s\"']{8,})",
            re.IGNORECASE,
        ),
        "an authorization header",
    ),
    (
        re.compile(
            r"--(?:password|passwd|passphrase|token|auth-token|api-key|secret|secret-key)[= ][\"']?"
            r"(?![$\"'<>&|;/-])([^\s\"']{6,})",
            re.IGNORECASE,
        ),
        "an option with a secret",
    ),
    (
        re.compile(r"\bcurl\b[^|;&\n]{0,400}?\s(?:-u|--user)[ =]?[\"']?([^\s:\"'$]+:(?![$\"'])[^\s\"']+)"),
        "a password for curl",
    ),
)
"""Formats that their issuers publish, and the places of a password in a URL, a header and a command.

A group of a pattern is the part that is secret; the whole match is where there is none. Repetitions have an
upper bound wherever a long text of a stranger could otherwise cost quadratic time.
"""
_ASSIGNED = re.compile(
    r"""\b([A-Za-z_]\w{0,200})["']?(\s{0,20}[:=]\s{0,20})"""
    r"""(?=(?:"([^"\n]{0,200})|'([^'\n]{0,200})|([^\s"',;&|(){}\[\]]{1,200})))"""
)
"""A name and what separates it from its value, which is only looked at: ``run: TOKEN=x`` has two names."""
_ENDS = {3: '"\n', 4: "'\n", 5: " \t\r\n\"',;&|(){}[]"}
"""Group of `_ASSIGNED` -> the characters that end its value."""

_FILES = (
    *(".env", ".env.*", ".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".my.cnf"),
    *(".htpasswd", ".vault-token", ".s3cfg", ".boto", "kubeconfig", "*.kubeconfig"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *("*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore"),
    *(".ssh/", ".gnupg/", ".aws/", ".azure/", ".kube/", ".oci/"),
)
"""Names of files, in lower case, and of folders with a slash, that usually hold secrets."""
_BELOW = (
    ".docker/config.json",
    ".config/gcloud/",
    ".config/gh/",
    ".config/imgkit/",
    ".cache/huggingface/token",
    ".cache/huggingface/stored_tokens",
)
"""The same, where the folder above decides."""
_TEMPLATES = re.compile(r"\.env\.(?:example|sample|template|dist|defaults?)")
_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY|PuTTY-User-Key-File")


def in_name(name: str, value: str) -> bool:
    """Whether a variable or an option called `name` with this value is probably a secret."""
    capital = re.sub(r"[-.]", "_", name.lstrip("-")).upper()
    if _HARMLESS.fullmatch(value) or _PLACE.search(capital):
        return False
    strong = _STRONG if name.isupper() else _STRONG_OPTION
    return bool(strong.search(capital) or (_WEAK.search(capital) and _RANDOM.fullmatch(value)))


def in_value(value: str) -> str:
    """The kind of secret in `value`, in words; empty where there is none of a known kind."""
    known = next((words for pattern, words in _VALUES if pattern.search(value)), "")
    if known:
        return known
    for match in _ASSIGNED.finditer(value):
        name, between, *texts = match.groups(default="")
        is_json = between.strip() == ":" and value[match.end(1)] in "\"'"
        if (between == "=" or is_json) and in_name(name, "".join(texts)):
            return f"a secret called {name}"
    return ""


def in_arguments(arguments: Sequence[str]) -> str:
    """The first secret among the arguments of a command, without its value; empty where there is none."""
    for number, text in enumerate(arguments):
        if kind := in_value(text):
            return f"{kind} in argument {number + 1}"
        option, between, value = text.partition("=")
        if not between and not _SWITCH.match(option):
            value = next((after for after in arguments[number + 1 : number + 2] if after[:1] != "-"), "")
        if re.fullmatch(r"--?[A-Za-z][\w.-]*", option) and in_name(option, value):
            return f"a secret by the name of its option, {option}"
    return in_value(" ".join(arguments))  # curl's -u USER:PASSWORD is two arguments


def in_file_name(path: str) -> bool:
    """Whether the file at `path`, or with a final slash the folder, usually holds secrets."""
    lower = f"/{path.lower()}"
    name = lower[lower.rstrip("/").rindex("/") + 1 :]
    if _TEMPLATES.fullmatch(name):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _FILES) or any(
        lower.endswith(f"/{below}") for below in _BELOW
    )


def is_private_key(start: bytes) -> bool:
    """Whether the content of a file that begins with `start` holds a private key as text."""
    return bool(_PRIVATE.search(start))


def masked(text: str) -> str:
    """`text` with a star for each character of a secret, so that columns stay the same."""
    for pattern, _ in _VALUES:
        text = pattern.sub(_starred, text)
    characters, done = list(text), 0
    for match in _ASSIGNED.finditer(text):
        group = next(number for number in (3, 4, 5) if match[number] is not None)
        at = match.start(group)
        if at >= done and in_name(match[1], match[group]):
            while at < len(text) and text[at] not in _ENDS[group]:
                characters[at] = "*"
                at += 1
            done = at
    return "".join(characters)


def _starred(match: re.Match[str]) -> str:
    return _with_stars(match, 1 if match.re.groups else 0)


def _with_stars(match: re.Match[str], group: int) -> str:
    whole, start = match.group(), match.start()
    first, last = match.start(group) - start, match.end(group) - start
    # Line ends stay, so that positions in a text of several lines stay too.
    stars = "".join("\n" if character == "\n" else "*" for character in whole[first:last])
    return whole[:first] + stars + whole[last:]
