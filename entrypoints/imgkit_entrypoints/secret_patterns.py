"""Recognize secrets by the names of variables and options, by the formats of tokens, and by file names.

No other module has such lists. Names that programs for machine learning use for other things, such as
``--pad-token``, are not recognized as secrets.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

_SECRET_VARIABLE_NAME = re.compile(
    r"TOKEN(?!IZER|S(?:$|_))|SECRET|PASSW(?:OR)?D|PASSPHRASE|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL|"
    r"(?:^|_)(?:PWD|JWT|COOKIE)$|(?<!BY)(?<!COM)(?<!SUR)PASS$"
)
"""Names of variables, in capital letters, that contain secrets: ``HF_TOKEN``, ``DB_PASSWORD``, ``SSH_PASS``.

Names such as ``TOKENIZER``, ``BYPASS`` and ``COMPASS`` do not match.
"""
_SECRET_OPTION_NAME = re.compile(
    r"(?:SECRET|PASSW(?:OR)?D|PASSPHRASE|(?:API|ACCESS|SECRET|PRIVATE)_?KEY|CREDENTIALS?)$|"
    r"(?:^|_)(?:PWD|JWT|COOKIE)$|^(?:PASS|(?:API|ACCESS|AUTH|BEARER|HF|HUB|GITHUB|GITLAB|WANDB|LOGIN|MY)?_?TOKEN)$"
)
"""Names of options, and of settings in lower case, that contain secrets: ``--hf-token``, ``api_key``.

Only the end of a name is compared, because many other options begin with such a word (``--token-dropout``).
Names with another meaning (``--pad-token``) do not match either.
"""
_MAYBE_SECRET_NAME = re.compile(r"(?:^|_)(?:KEY|AUTH|PAT|PASS|TOKEN)$")
"""Names that contain a secret only if the value looks random, unlike in ``IMAGE_KEY=pixel_values``."""
_LOCATION_NAME_ENDING = re.compile(r"_(?:FILE|PATH|DIR|FOLDER|NAME)$")
"""Ends of names whose value is the place of a secret, such as ``PASSWORD_FILE``."""
_SWITCH = re.compile(r"--?(?:no|require|use|ask|show|hide|prompt)[-_]")
"""Beginnings of options that usually have no value, such as ``--use-token``."""
# At least 16 characters without white space, with a digit and a letter.
_RANDOM_VALUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{16,}")
_HARMLESS_VALUE = re.compile(
    r"|/.*|\$.*|<.*|\[.*\]|\*+|[\d.]+|true|false|yes|no|on|off|none|null", re.IGNORECASE
)
"""Values that are no secrets: nothing, ``/path``, ``$NAME``, ``<pad>``, ``[PAD]``, ``***``, ``1.5``, yes."""

# Patterns of secrets by the name of their kind in messages.
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
    # The header is enough to recognize a key. If the end of the key follows, the whole key is masked.
    "a private key": r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----(?:.{0,20000}?-----END [A-Z ]*-----)?",
    # The following secrets are recognized by their position. A value that begins with $ is a variable and not
    # a secret.
    "a URL with a password": r"(?i)\b[a-z][a-z0-9+.-]{0,20}://([^\s/:@]*:(?!\$)[^\s/]+)@",
    "a URL with a token": r"(?i)\bhttps?://([^\s/:$@]{16,})@",
    "an authorization header": r"(?i)\bauthorization\s*[:=]\s*[\"']?(?:bearer|basic|token)\s+"
    r"(?![$\"'<])([^\s\"']{8,})",
    "an option with a secret": r"(?i)--(?:password|passwd|passphrase|token|auth-token|api-key|secret|"
    r"secret-key)[= ][\"']?(?![$\"'<>&|;/-])([^\s\"']{6,})",
    "a password for curl": r"\bcurl\b[^|;&\n]{0,400}?\s(?:-u|--user)[ =]?[\"']?"
    r"([^\s:\"'$]+:(?![$\"'])[^\s\"']+)",
}
"""Formats of tokens as their issuers publish them, and places of passwords in URLs, headers and commands.

The group of a pattern is the secret part. If there is no group, the whole match is secret. Repetitions have
an upper bound wherever a long text could otherwise cost quadratic time.
"""
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _VALUES.items()}
_ASSIGNMENT = re.compile(
    r"""\b(?P<name>[A-Za-z_]\w{0,200})(?P<quote>["']?)(?P<separator>\s{0,20}[:=]\s{0,20})"""
    r"""(?="(?P<double>[^"\n]{0,200})|'(?P<single>[^'\n]{0,200})|(?P<bare>[^\s"',;&|(){}\[\]]{1,200}))"""
)
"""A name, a separator, and a value in double, single or no quotes: ``TOKEN=x``, ``"token": "x"``.

The value is matched by a lookahead, so that the next match may begin inside it: ``run: TOKEN=x`` has two
names.
"""
_VALUE_ENDS = {"double": '"\n', "single": "'\n", "bare": " \t\r\n\"',;&|(){}[]"}
"""Characters that end a value, by the group of `_ASSIGNMENT` that has matched the value."""

_SECRET_FILE_NAMES = (
    *(".env", ".env.*", ".netrc", "_netrc", ".git-credentials", ".pypirc", ".npmrc", ".pgpass", ".my.cnf"),
    *(".htpasswd", ".vault-token", ".s3cfg", ".boto", "kubeconfig", "*.kubeconfig"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *("*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore"),
    *(".ssh/", ".gnupg/", ".aws/", ".azure/", ".kube/", ".oci/"),
)
"""Names of files, and names of folders with a slash, that usually contain secrets, in lower case."""
_SECRET_PATH_ENDINGS = (
    *("/.docker/config.json", "/.config/gcloud/", "/.config/gh/", "/.config/imgkit/"),
    *("/.cache/huggingface/token", "/.cache/huggingface/stored_tokens"),
)
"""Files and folders that contain secrets only in a certain folder, such as ``config.json`` in ``.docker``."""
# Files such as .env.example, which show the names of variables and are meant to be published.
_TEMPLATE_NAME = re.compile(r"\.env\.(?:example|sample|template|dist|defaults?)")
_PRIVATE = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY|PuTTY-User-Key-File")


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable or an option with this name and value is probably a secret.

    A name in capital letters is treated as a variable, and any other name as an option or a setting. For
    example, ``HF_TOKEN`` with the value ``hf_x`` is a secret. ``PASSWORD_FILE`` is not a secret, and neither
    is a value such as ``$TOKEN``.
    """
    # "--hf-token" -> "HF_TOKEN"
    variable_name = re.sub(r"[-.]", "_", name.lstrip("-")).upper()
    if _HARMLESS_VALUE.fullmatch(value) or _LOCATION_NAME_ENDING.search(variable_name):
        return False
    # Fewer names of options mean a secret, because many programs have options such as --token-dropout.
    secret_name = _SECRET_VARIABLE_NAME if name.isupper() else _SECRET_OPTION_NAME
    if secret_name.search(variable_name):
        return True
    # A name such as KEY is not enough: the value must also look random.
    return bool(_MAYBE_SECRET_NAME.search(variable_name) and _RANDOM_VALUE.fullmatch(value))


def find_secret(text: str) -> str:
    """Return which kind of secret a text contains, such as ``a GitHub token``, or "" if it contains none."""
    for kind, pattern in _PATTERNS.items():
        if pattern.search(text):
            return kind
    for match in _ASSIGNMENT.finditer(text):  # NAME=VALUE or NAME: VALUE
        # "NAME: VALUE" occurs in many texts. So a colon is only accepted in JSON, with quotes around the
        # name.
        is_json = match["separator"].strip() == ":" and match["quote"] != ""
        is_assignment = match["separator"] == "=" or is_json
        if is_assignment and is_secret(match["name"], match[_find_value_group(match)]):
            return f"a secret called {match['name']}"
    return ""


def _find_value_group(match: re.Match[str]) -> str:
    """Return the group of an `_ASSIGNMENT` that has matched the value: ``double``, ``single`` or ``bare``.

    It tells whether the value is in double quotes, in single quotes or not in quotes.
    """
    return next(group for group in _VALUE_ENDS if match[group] is not None)


def find_secret_argument(arguments: Sequence[str]) -> str:
    """Return a description of the first secret in the arguments of a command, or "" if there is none.

    The description does not contain the secret. An example is ``a GitHub token in argument 3``.
    """
    for number, argument in enumerate(arguments, start=1):
        kind = find_secret(argument)
        if kind:
            return f"{kind} in argument {number}"
        option, equals, value = argument.partition("=")  # "--token=VALUE"
        if not re.fullmatch(r"--?[A-Za-z][\w.-]*", option):  # it is no option
            continue
        # A switch, such as --no-token, has no value, so the next argument does not belong to it.
        if not equals and not _SWITCH.match(option) and number < len(arguments):
            # "--token VALUE": the value is the next argument, unless that is an option itself.
            next_argument = arguments[number]
            value = "" if next_argument.startswith("-") else next_argument
        if is_secret(option, value):
            return f"a secret by the name of its option, {option}"
    return find_secret(" ".join(arguments))  # curl's -u USER:PASSWORD is two arguments


def is_secret_file(path: str) -> bool:
    """Return whether the file or folder at `path` usually contains secrets, according to its name.

    Examples are ``id_rsa``, ``server.pem``, ``.docker/config.json`` and the folder ``.ssh/``. The path of a
    folder must end with a slash. A template such as ``.env.example`` contains no secrets.
    """
    lower_path = f"/{path.lower()}"
    # The name of a folder keeps the slash at its end: "/home/me/.ssh/" -> ".ssh/".
    name_start = lower_path.rstrip("/").rindex("/") + 1
    name = lower_path[name_start:]
    if _TEMPLATE_NAME.fullmatch(name):
        return False
    has_secret_name = any(fnmatch.fnmatchcase(name, pattern) for pattern in _SECRET_FILE_NAMES)
    return has_secret_name or lower_path.endswith(_SECRET_PATH_ENDINGS)


def is_private_key(start: bytes) -> bool:
    """Return whether the first bytes of a file contain the header of a private key (PEM or PuTTY)."""
    return bool(_PRIVATE.search(start))


def mask_secrets(text: str) -> str:
    """Return `text` with a star in place of each character of a secret.

    The length stays the same, so that positions in messages remain correct.
    """
    # First mask secrets that have a known form, such as a GitHub token. Then mask the values of variables and
    # options whose names mean a secret.
    for pattern in _PATTERNS.values():
        text = pattern.sub(_mask_match, text)
    characters = list(text)
    # The position at which the last masked value ends. A match that begins before it is inside of that value.
    masked_end = 0
    for match in _ASSIGNMENT.finditer(text):  # NAME=VALUE or NAME: VALUE
        value_group = _find_value_group(match)
        position = match.start(value_group)
        if position >= masked_end and is_secret(match["name"], match[value_group]):
            # The match contains at most 200 characters of the value, but the value may be longer.
            while position < len(text) and text[position] not in _VALUE_ENDS[value_group]:
                characters[position] = "*"
                position += 1
            masked_end = position
    return "".join(characters)


def _mask_match(match: re.Match[str]) -> str:
    """Return the text of a match with stars in place of its group.

    If the pattern has no group, the whole match is replaced.
    """
    group = 1 if match.re.groups else 0
    before = match.string[match.start() : match.start(group)]
    after = match.string[match.end(group) : match.end()]
    # Line ends are kept, so that positions in a text of several lines remain correct.
    return before + re.sub(r"[^\n]", "*", match[group]) + after
