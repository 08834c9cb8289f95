"""Makes the values of a recipe from its tree, and reports everything that is wrong with them at once.

Rules about one value belong to its field in `model`, and pydantic applies them. Here are the words for its
mistakes, rules about several values, and warnings. `named_files` looks at the files that a recipe names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from imgkit_builder.recipe import named_files, rules, systems
from imgkit_builder.recipe.model import Document
from imgkit_builder.recipe.problems import ANY, Collector, KeyPath, allowed_hint, key_text, nearest_name
from imgkit_builder.recipe.validation import Mistake, allowed_keys, key_paths, validate
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, YamlNode, describe_kind, to_data
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.system import SystemFacts


def check(tree: Table, problems: Collector, *, is_complete: bool) -> Document | None:
    """Return the values of `tree`, and report its problems to `problems`. After a problem the result is None.

    If `tree` is not complete, a parent could not be read. The parent may state the keys that are missing
    here.
    """
    # Paths of values with a problem. Later rules skip them: one mistake gives one message.
    faulty = _report_empty_values(tree, problems)
    document, mistakes = validate(Document, to_data(tree))
    for mistake in mistakes:
        may_be_inherited = mistake.kind == "missing" and not is_complete
        if mistake.path not in faulty and not may_be_inherited:
            _report(mistake, tree, problems)
        if mistake.is_value:
            _, path = tree.deepest(mistake.path)
            faulty.add(path)
    for path, node in tree.walk():
        if isinstance(node, Scalar) and node.type == "text" and path not in faulty:
            _check_text(path, node, problems)
    for rule in (_check_secrets, _check_pip_steps, _check_platforms, _check_runtime, _check_scheduler):
        rule(tree, problems)
    named_files.check(tree, problems, faulty)
    return document


def _report_empty_values(tree: Table, problems: Collector) -> set[KeyPath]:
    """Report keys without a value, or with YAML's ``null`` or ``~``, and return their paths."""
    paths = set()
    for path, node in tree.walk():
        if not isinstance(node, Scalar) or node.type != "nothing":
            continue
        paths.add(path)
        message = "has no value"
        hint = "give it one or remove the key"
        if node.text:
            message = f"{node.text} is read as no value"
            hint = f'quote it if it is text: "{node.text}"'
        problems.error(node.position, path, message, hint)
    return paths


# ---- the words for mistakes

_ALIASES = {
    "apptainer": "singularity",
    "enroot": "pyxis",
    "k8s": "kubernetes",
    "podman": "docker",
    "ib": "infiniband",
    "rdma": "roce",
    "cxi": "slingshot",
    "ethernet": "tcp",
}
"""Other names for allowed values."""
_KEEPS_ENTRYPOINT = (
    "an image keeps the start program of its base; a job names its command: imgkit run RECIPE -- COMMAND"
)
_ONE_STAGE = "a recipe has one stage"
_SECOND_IMAGE = "build what is compiled in an image of its own, and copy its files, or compile it in `run`"
_DOCKERFILE_KEYS: Mapping[str, tuple[str, str]] = {
    "entrypoint": (
        _KEEPS_ENTRYPOINT,
        "set up the environment in `env`, or in a script that the command starts",
    ),
    "cmd": (_KEEPS_ENTRYPOINT, "remove it"),
    "stages": (_ONE_STAGE, _SECOND_IMAGE),
    "from": (_ONE_STAGE, f"the image to start from is `base`; {_SECOND_IMAGE}"),
    "user": ("the steps run as root, and containers have the base's user", "remove it"),
    "expose": ("jobs use the node's own network: no port needs to be opened", "remove it"),
    "volumes": ("folders are mounted when a job starts", "system.runtime.binds, or --bind of the job"),
}
"""Keys of `image` for what a Dockerfile can do and a recipe cannot: the reason, and the way that works."""
_UNSUPPORTED_RUNTIMES: Mapping[str, str] = {
    "shifter": "it has not been tried with one",
    "edf": "it does not write the file of srun --environment",
    "sarus": "it does not write the file of srun --edf",
}
"""Container runtimes of clusters that no recipe can name, and why."""
_RUNTIME_HINT = (
    "singularity, pyxis, or docker with command: podman, where the site has them; or a job without a "
    "container: imgkit run --runtime host"
)
_FORMS: Mapping[str, tuple[str, str]] = {
    "text": ("text", ""),
    "an integer": ("an integer", "write plain decimal digits, without quotes"),
    "a list": ("a list", "write - ITEM lines, or [ITEM, ITEM]"),
    "names": ("a mapping", "write NAME: VALUE lines below it"),
    "a mapping": ("a mapping", "write `key: value` lines below it"),
}
"""Form that a key expects (`Mistake.expected`) -> its name in YAML, and how to write it."""


def _report(mistake: Mistake, tree: Table, problems: Collector) -> None:
    """Report a mistake that pydantic found in the terms of the file: its text, and what YAML makes of it."""
    node, path = tree.deepest(mistake.path)
    if mistake.kind == "missing":
        hint = f"add `{mistake.path[-1]}: ...`"
        if len(mistake.path) < 3:
            hint = "a recipe needs at least `image: {base: NAME:TAG}`"
        problems.error(node.position, mistake.path, mistake.message, hint)
    elif mistake.is_key:
        _report_key(mistake, tree, problems)
    elif mistake.kind == "rule":
        problems.error(node.position, path, mistake.message, mistake.hint)
    else:
        message, hint = _describe_wrong_value(node, mistake)
        problems.error(node.position, path, message, hint)


def _report_key(mistake: Mistake, tree: Table, problems: Collector) -> None:
    """Report a key that is unknown, or that breaks a rule for names."""
    *parents, name = mistake.path
    table, _ = tree.deepest(tuple(parents))
    position = table.position
    if isinstance(table, Table):
        position = table.keys[str(name)]
    message, hint = mistake.message, mistake.hint
    if mistake.kind == "unknown":
        message, hint = _describe_unknown_key(mistake.path)
    problems.error(position, mistake.path, message, hint)


def _describe_unknown_key(path: KeyPath) -> tuple[str, str]:
    """Return the message and the hint for a key that no field has."""
    name = str(path[-1])
    parents = path[:-1]
    # Who knows Dockerfiles looks for their instructions: the reason helps more than the nearest key.
    if parents == ("image",) and name.lower() in _DOCKERFILE_KEYS:
        return _DOCKERFILE_KEYS[name.lower()]
    allowed = allowed_keys(path, Document)
    # No field of the model: `extends` is resolved before the check.
    if parents in ((), ("system",)):
        allowed.append("extends")
    hint = allowed_hint(name, allowed)
    # A near name at the right level says more than the same name elsewhere.
    if not nearest_name(name, allowed):
        # A key of this name at another level: somebody wrote `pip` beside `image`.
        for keys in key_paths(Document):
            if keys[-1] == name:
                return "unknown key", f"{hint}; did you mean {key_text(keys)}?"
    return "unknown key", hint


def _describe_wrong_value(node: YamlNode, mistake: Mistake) -> tuple[str, str]:
    """Return the message and the hint for a value of a wrong type, or one that is not among those allowed."""
    is_choice = mistake.kind == "choice"
    if isinstance(node, Scalar) and node.type == "text" and is_choice:
        return _describe_wrong_choice(node, mistake)
    if isinstance(node, Scalar) and node.type != "text":
        if is_choice or mistake.expected == "text":
            message = f"must be text, but YAML reads {node.text} as {_describe_reading(node)}"
            return message, f'quote it: "{node.text}"'
        if mistake.expected == "an integer" and node.type == "integer":
            return f"YAML reads {node.text} as {_describe_reading(node)}", "write plain decimal digits"
        if mistake.expected == "an integer":
            return f"must be an integer, not {describe_kind(node)}", ""
    if is_choice:
        return f"must be text, not {describe_kind(node)}", allowed_hint("", mistake.choices)
    form, hint = _FORMS[mistake.expected]
    return f"must be {form}, not {describe_kind(node)}", hint


def _describe_wrong_choice(node: Scalar, mistake: Mistake) -> tuple[str, str]:
    name = node.text.lower()
    if mistake.path[-1] == "kind" and name in _UNSUPPORTED_RUNTIMES:
        reason = _UNSUPPORTED_RUNTIMES[name]
        return f"imgkit does not start containers by {node.text}: {reason}", _RUNTIME_HINT
    return f"{node.text!r} is not known", allowed_hint(_ALIASES.get(name, node.text), mistake.choices)


def _describe_reading(node: Scalar) -> str:
    """Return what YAML reads: ``the number 24.1`` for 24.10. Only the type if the value equals the text."""
    import yaml

    try:
        value = yaml.safe_load(node.text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return describe_kind(node)
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    if text == node.text or node.type == "date":
        return describe_kind(node)
    return f"the {node.type} {text}"


# ---- texts that are allowed and deserve a look

_PUBLIC_HINT = "anybody who can pull the image can read it; pass it when the job starts"


def _check_text(path: KeyPath, node: Scalar, problems: Collector) -> None:
    """Report a variable that cannot be expanded, and warn of secrets and of ``$`` without a meaning."""
    name = str(path[-1])
    parents = path[:-1]
    # ("image", "args", "VERSION"), ("image", "env", "PATH"), ("image", "pip", 0, "env", "CC")
    is_argument = parents == ("image", "args")
    is_variable = is_argument or (parents[:1] == ("image",) and parents[-1] == "env")
    if is_variable:
        problem = next(rules.variable_value(name, node.text, has_earlier_value=not is_argument), None)
        if problem is not None:
            problems.error(node.position, path, *problem)
            return
    has_name = is_variable or parents in (("image", "labels"), ("system", "env"))
    _warn_of_secret(path, node, problems, has_name=has_name)
    # `/x:$PATH` is expanded; any other $ would stand in the value as it is.
    has_reference = re.search(r"\$\{?[A-Za-z_]", node.text)
    if is_variable and has_reference and rules.split_inherited(name, node.text) is None:
        problems.warn(node.position, path, "variables are not expanded: the $ stays", "write the whole value")


def _warn_of_secret(path: KeyPath, node: Scalar, problems: Collector, *, has_name: bool) -> None:
    """Warn if a value looks like a secret, or if it `has_name`, such as a variable's, and that looks so."""
    secret = secret_patterns.in_value(node.text)
    if secret:
        is_step = path[:2] in (("image", "pip"), ("image", "run"))
        hint = named_files.IN_HISTORY if is_step else _PUBLIC_HINT
        problems.warn(node.position, path, f"this looks like {secret}", hint)
    elif has_name and secret_patterns.in_name(str(path[-1]), node.text):
        problems.warn(node.position, path, "this looks like a secret", _PUBLIC_HINT)


# ---- rules about several values


def _select_tables(tree: Table, *pattern: str) -> Iterator[tuple[KeyPath, Table]]:
    """Yield each mapping whose path fits `pattern`. A value of another kind has been reported already."""
    for path, node in tree.select(*pattern):
        if isinstance(node, Table):
            yield path, node


def _check_secrets(tree: Table, problems: Collector) -> None:
    """Report declarations without exactly one source or without a step, and names without a declaration."""
    declared = _check_declared_secrets(tree, problems)
    used = set()
    # Steps of a parent may use a secret that the child declares: both are in the merged tree.
    for key in ("pip", "run"):
        for path, node in tree.select_texts("image", key, ANY, "secrets", ANY):
            used.add(node.text)
            if node.text not in declared:
                hint = "declare it below image.secrets"
                if declared:
                    hint = allowed_hint(node.text, declared)
                problems.error(node.position, path, f"there is no secret {node.text!r}", hint)
    for name, (node, path) in declared.items():
        if name not in used:
            hint = f"add secrets: [{name}] to a step of pip or run"
            problems.warn(node.position, path, f"no step uses the secret {name}", hint)


def _check_declared_secrets(tree: Table, problems: Collector) -> dict[str, tuple[Scalar, KeyPath]]:
    """Report secrets that are declared twice or not from exactly one source.

    Return the node of each secret's name, and the path of its declaration.
    """
    declared: dict[str, tuple[Scalar, KeyPath]] = {}
    for path, secret in _select_tables(tree, "image", "secrets", ANY):
        name = secret.entries.get("id")
        if isinstance(name, Scalar) and name.text in declared:
            problems.error(name.position, (*path, "id"), f"{name.text} is declared twice", "keep one of them")
        elif isinstance(name, Scalar):
            declared[name.text] = name, path
        sources = {"env", "file"} & secret.entries.keys()
        if len(sources) != 1:
            present = "both" if sources else "neither"
            message = f"needs exactly one of env, file; it has {present}"
            hint = "env: NAME is a variable of this machine, file: PATH a file"
            problems.error(secret.position, path, message, hint)
    return declared


_PIP_SOURCES = ("packages", "requirements", "project")
_PROJECT_KEYS = {
    "editable": "other packages have no folder of their own",
    "ignore": "nothing else of this step is a folder",
}
"""Keys of a pip step that need a project, and the reason."""


def _check_pip_steps(tree: Table, problems: Collector) -> None:
    """Report pip steps that do not install exactly one thing, and lists of options that begin with none."""
    for path, step in _select_tables(tree, "image", "pip", ANY):
        _check_pip_step(path, step, problems)
    for path, option in tree.select("image", "pip", ANY, "options", ANY):
        index = path[-1]
        # Later items may be values of the options before them.
        if index == 0 and isinstance(option, Scalar) and re.match("[^-]", option.text):
            message = f"{option.text!r} is not an option"
            hint = "options begin with -; packages go to `packages`"
            problems.error(option.position, path, message, hint)


def _check_pip_step(path: KeyPath, step: Table, problems: Collector) -> None:
    """Report a step that does not install exactly one thing, and keys that do not fit it."""
    sources = [key for key in _PIP_SOURCES if key in step.entries]
    if len(sources) != 1:
        present = " and ".join(sources) or "none of them"
        message = f"needs exactly one of {', '.join(_PIP_SOURCES)}; it has {present}"
        hint = "write a step for each" if sources else "add packages: [NAME]"
        problems.error(step.position, path, message, hint)
    for key, reason in _PROJECT_KEYS.items():
        if key in step.entries and "project" not in step.entries:
            message = f"is for a project: {reason}"
            problems.error(step.keys[key], (*path, key), message, "add project: FOLDER, or remove it")
    packages = step.entries.get("packages")
    if isinstance(packages, Items) and not packages.items:
        problems.error(packages.position, (*path, "packages"), "is empty", "remove the step")


def _check_platforms(tree: Table, problems: Collector) -> None:
    """Report an empty list of platforms, and a platform that is listed twice: ``[arm64, linux/arm64]``."""
    for path, node in tree.select("image", "platform"):
        if isinstance(node, Items) and not node.items:
            problems.error(node.position, path, "is empty", "allowed: amd64, arm64")
        platforms = set()
        for index, item in node.children():
            if not isinstance(item, Scalar) or not item.text:
                continue
            name = item.text.removeprefix("linux/")
            if name in platforms:
                message = f"linux/{name} is listed twice"
                problems.error(item.position, (*path, index), message, "keep one of them")
            platforms.add(name)


def _check_runtime(tree: Table, problems: Collector) -> None:
    """Report a kind of runtime that the default command, singularity, cannot start."""
    command_examples = {"docker": "docker", "kubernetes": "runai"}
    for path, runtime in _select_tables(tree, "system", "runtime"):
        kind = runtime.entries.get("kind")
        if not isinstance(kind, Scalar) or "command" in runtime.entries:
            continue
        example = command_examples.get(kind.text)
        if example is not None:
            message = f"kind {kind.text} needs `command`: its default, singularity, is of another kind"
            problems.error(kind.position, (*path, "kind"), message, f"for example command: {example}")


def _check_scheduler(tree: Table, problems: Collector) -> None:
    """Report a scheduler that is neither shipped nor a plug-in's."""
    for path, node in tree.select_texts("system", "scheduler"):
        if not systems.is_scheduler(node.text):
            hint = allowed_hint(systems.resolve_alias(node.text), systems.scheduler_names())
            problems.error(node.position, path, f"{node.text!r} is not known", hint)


def check_system(facts: SystemFacts, tree: Table, problems: Collector) -> None:
    """Report what the recipe's scheduler cannot work with, and warn of runtimes that it cannot start."""
    registration = systems.find_registration(facts.scheduler)
    runtime = facts.runtime
    if runtime.kind not in registration.runtimes:
        path: KeyPath = ("system", "runtime", "kind")
        message = f"{facts.scheduler} does not start programs by {runtime.kind}: imgkit run refuses it"
        problems.warn(tree.position_of(path), path, message, allowed_hint("", registration.runtimes))
    elif runtime.kind == "docker" and registration.by_podman and not systems.is_podman(runtime.command):
        path = ("system", "runtime", "command")
        message = f"{facts.scheduler} starts containers by podman alone: imgkit run refuses {runtime.command}"
        problems.warn(tree.position_of(path), path, message, "command: podman, or podman-hpc")
    for fault in registration.faults(facts):
        path = ("system", *fault.path)
        problems.error(tree.position_of(path), path, fault.what, fault.hint)
