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
_LOCATION = re.compile(r"_(?:FILE|PATH|DIR|FOLDER|NAME)$")
"""Names of where a secret is, and not of the secret."""
_SWITCH = re.compile(r"--?(?:no|require|use|ask|show|hide|prompt)[-_]")
"""Beginnings of options that usually take no value: the next word is something else."""
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{16,}")
_HARMLESS = re.compile(r"|/.*|\$.*|<.*|\[.*\]|\*+|[\d.]+|true|false|yes|no|on|off|none|null", re.IGNORECASE)
"""Harmless values: nothing, a path, another variable, a word of a tokenizer, stars, a number, a switch."""

_VALUES = {
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_\w{40,}",
    "a GitLab token": r"\bgl(?:pat|dt|rt|cbt)-[\w-]{20,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "a PyPI token": r"\bpypi-[\w-]{50,}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{36}",
    "a Docker token": r"\bdckr_(?:pat|oat)_[\w-]{20,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{32,}",
    "an NVIDIA API key": r"\bnvapi-[\w-]{40,}",
    "a Weights & Biases key": r"\bwandb_v1_\w{40,}",
    "a Google API key": r"\bAIza[\w-]{35}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Slack token": r"\bxox[abeoprs]-[\w-]{10,}",
    "a JSON web token": r"\beyJ[\w-]{10,2000}\.eyJ[\w-]{10,2000}\.[\w-]+",
    "a private key": r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----(?:.{0,20000}?-----END [A-Z ]*-----)?",
    "a URL with a password": r"(?i)\b[a-z][a-z0-9+.-]{0,20}://([^\s/:@]*:(?!\$)[^\s/]+)@",
    "a URL with a token": r"(?i)\bhttps?://([^\s/:$@]{16,})@",
    "an authorization header": r"(?i)\bauthorization\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+"
    r"(?![$\"'<])([^\s\"']{8,})",
    "an option with a secret": r"(?i)--(?:password|passwd|passphrase|token|auth-token|api-key|secret|"
    r"secret-key)[= ][\"']?(?![$\"'<>&|;/-])([^\s\"']{6,})",
    "a password for curl": r"\bcurl\b[^|;&\n]{0,400}?\s(?:-u|--user)[ =]?[\"']?"
    r"([^\s:\"'$]+:(?![$\"'])[^\s\"']+)",
}
"""Formats that their issuers publish, and positions of a password in a URL, a header and a command.

A group of a pattern is the part that is secret; the whole match is where there is none. Repetitions have an
upper bound wherever a long text of a stranger could otherwise cost quadratic time.
"""
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _VALUES.items()}
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
    *("/.docker/config.json", "/.config/gcloud/", "/.config/gh/", "/.config/imgkit/"),
    *("/.cache/huggingface/token", "/.cache/huggingface/stored_tokens"),
)
"""The same, where the folder above decides."""
_TEMPLATES = re.compile(r"\.env\.(?:example|sample|template|dist|defaults?)")
_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY|PuTTY-User-Key-File")


def in_name(name: str, value: str) -> bool:
    """Return whether a variable or an option called `name` with this value is probably a secret."""
    capital = re.sub(r"[-.]", "_", name.lstrip("-")).upper()
    if _HARMLESS.fullmatch(value) or _LOCATION.search(capital):
        return False
    strong = _STRONG if name.isupper() else _STRONG_OPTION
    return bool(strong.search(capital) or (_WEAK.search(capital) and _RANDOM.fullmatch(value)))


def in_value(value: str) -> str:
    """Return the kind of secret in `value`, in words; empty where there is none of a known kind."""
    for kind, pattern in _PATTERNS.items():
        if pattern.search(value):
            return kind
    for match in _ASSIGNED.finditer(value):
        name, between, *texts = match.groups(default="")
        is_json = between.strip() == ":" and value[match.end(1)] in "\"'"
        if (between == "=" or is_json) and in_name(name, "".join(texts)):
            return f"a secret called {name}"
    return ""


def in_arguments(arguments: Sequence[str]) -> str:
    """Return the first secret among the arguments of a command, without its value; empty without one."""
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
    """Return whether the file at `path`, or with a final slash the folder, usually holds secrets."""
    lower = f"/{path.lower()}"
    name = lower[lower.rstrip("/").rindex("/") + 1 :]
    if _TEMPLATES.fullmatch(name):
        return False
    return lower.endswith(_BELOW) or any(fnmatch.fnmatchcase(name, pattern) for pattern in _FILES)


def is_private_key(start: bytes) -> bool:
    """Return whether the content of a file that begins with `start` holds a private key as text."""
    return bool(_PRIVATE.search(start))


def mask_secrets(text: str) -> str:
    """Return `text` with a star for each character of a secret, so that columns stay the same."""
    for pattern in _PATTERNS.values():
        text = pattern.sub(_mask_match, text)
    characters, end = list(text), 0
    for match in _ASSIGNED.finditer(text):
        group = next(number for number in _ENDS if match[number] is not None)
        position = match.start(group)
        if position >= end and in_name(match[1], match[group]):
            while position < len(text) and text[position] not in _ENDS[group]:
                characters[position] = "*"
                position += 1
            end = position
    return "".join(characters)


def _mask_match(match: re.Match[str]) -> str:
    group, start = 1 if match.re.groups else 0, match.start()
    first, last = match.start(group) - start, match.end(group) - start
    # Line ends stay, so that positions in a text of several lines stay too.
    return match[0][:first] + re.sub(r"[^\n]", "*", match[group]) + match[0][last:]
