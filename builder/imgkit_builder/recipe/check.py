"""Convert the tree of a recipe to its values, and report everything that is wrong with them at once.

A rule about a single value belongs to its field in `model`, and pydantic applies it. This module has the
messages for mistakes that pydantic finds, the rules about several values, and the warnings. `named_files`
checks the files that a recipe names.
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
    """Return the values of a recipe, or None if pydantic cannot make them from `tree`.

    Parameters
    ----------
    tree : the recipe, merged with the recipes that it extends.
    problems : receives everything that is wrong with the recipe.
    is_complete : False if a parent recipe could not be read. A missing key is then no problem, because the
        parent may set it.
    """
    # The paths of values with a problem. Later checks skip them, so that one mistake causes only one message.
    faulty = _report_empty_values(tree, problems)
    document, mistakes = validate(Document, to_data(tree))
    for mistake in mistakes:
        may_be_inherited = mistake.kind == "missing" and not is_complete
        if mistake.path not in faulty and not may_be_inherited:
            _report(mistake, tree, problems)
        if mistake.is_value:  # and not about a key, which may be missing or unknown
            # If a short form stands for a list, as in `platform: arm64`, the item of that list is not in the
            # tree, and the nearest path is that of the short form.
            _, nearest_path = tree.deepest(mistake.path)
            faulty.add(nearest_path)
    for path, node in tree.walk():
        if isinstance(node, Scalar) and node.type == "text" and path not in faulty:
            _check_text(path, node, problems)
    # These rules concern several keys at once. They read `tree`, so they also run if there is no document.
    for check_rule in (_check_secrets, _check_pip_steps, _check_platforms, _check_runtime, _check_scheduler):
        check_rule(tree, problems)
    named_files.check(tree, problems, faulty)
    return document


def _report_empty_values(tree: Table, problems: Collector) -> set[KeyPath]:
    """Report keys without a value, or with ``null`` or ``~``, which YAML reads as no value.

    Return their paths. The caller does not report them again when pydantic refuses their values.
    """
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


# ---- messages about the mistakes that pydantic finds

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
"""Common names for a value -> the name that a recipe must use."""
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
"""Key of `image` for a Dockerfile feature that recipes lack -> the reason, and what to do instead."""
_UNSUPPORTED_RUNTIMES: Mapping[str, str] = {
    "shifter": "it has not been tried with one",
    "edf": "it does not write the file of srun --environment",
    "sarus": "it does not write the file of srun --edf",
}
"""Container runtime that a recipe cannot use -> the reason."""
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
"""Form that a key expects (`Mistake.expected`) -> its name for messages, and how to write it in YAML."""


def _report(mistake: Mistake, tree: Table, problems: Collector) -> None:
    """Report a mistake that pydantic found, at its line and in words for the author of the recipe.

    pydantic sees only the data. The message also needs the original text and how YAML reads it. For example,
    the unquoted ``24.10`` is the number 24.1.
    """
    # The value itself, or the nearest one above it: a missing key and the list of a short form are not in the
    # file.
    node, nearest_path = tree.deepest(mistake.path)
    if mistake.kind == "missing":
        # The position is that of the mapping without the key, and the message names the key.
        hint = f"add `{mistake.path[-1]}: ...`"
        if len(mistake.path) < 3:
            # The key is near the top: a whole section such as `image` is missing, or its base.
            hint = "a recipe needs at least `image: {base: NAME:TAG}`"
        problems.error(node.position, mistake.path, mistake.message, hint)
    elif mistake.is_key:
        _report_key(mistake, tree, problems)
    elif mistake.kind == "rule":
        problems.error(node.position, nearest_path, mistake.message, mistake.hint)
    else:
        message, hint = _describe_wrong_value(node, mistake)
        problems.error(node.position, nearest_path, message, hint)


def _report_key(mistake: Mistake, tree: Table, problems: Collector) -> None:
    """Report a key that is unknown, or whose name breaks a rule."""
    *parents, name = mistake.path
    # The mapping that contains the key. If that mapping comes from a short form, it is not in the file, and
    # the nearest value above it takes its place.
    parent_node, _ = tree.deepest(tuple(parents))
    position = parent_node.position
    if isinstance(parent_node, Table):
        position = parent_node.keys[str(name)]
    message, hint = mistake.message, mistake.hint
    if mistake.kind == "unknown":
        message, hint = _describe_unknown_key(mistake.path)
    problems.error(position, mistake.path, message, hint)


def _describe_unknown_key(path: KeyPath) -> tuple[str, str]:
    """Return the message and the hint for the unknown key at `path`.

    The hint lists the allowed keys, and suggests the one that was probably meant.
    """
    name = str(path[-1])
    parents = path[:-1]
    # A user who knows Dockerfiles may write `entrypoint`, for example. The reason helps more than a similar
    # key.
    if parents == ("image",) and name.lower() in _DOCKERFILE_KEYS:
        return _DOCKERFILE_KEYS[name.lower()]
    allowed = allowed_keys(path, Document)
    # `extends` is allowed in these two sections, too. The model has no field for it, because it is resolved
    # before the check.
    if parents in ((), ("system",)):
        allowed.append("extends")
    hint = allowed_hint(name, allowed)
    # If no allowed key is similar, look for a key of this name elsewhere in the model. For example, `pip` may
    # have been written beside `image` instead of below it.
    if not nearest_name(name, allowed):
        for keys in key_paths(Document):
            if keys[-1] == name:
                return "unknown key", f"{hint}; did you mean {key_text(keys)}?"
    return "unknown key", hint


def _describe_wrong_value(node: YamlNode, mistake: Mistake) -> tuple[str, str]:
    """Return the message and the hint for a value that has a wrong type or is not allowed."""
    if isinstance(node, Scalar) and node.type != "text":  # YAML reads a number or a date, for example
        if mistake.kind == "choice" or mistake.expected == "text":
            return _describe_unquoted_text(node)
        if mistake.expected == "an integer":
            return _describe_wrong_integer(node)
    if mistake.kind == "choice":
        return _describe_wrong_choice(node, mistake)
    form, hint = _FORMS[mistake.expected]
    return f"must be {form}, not {describe_kind(node)}", hint


def _describe_unquoted_text(node: Scalar) -> tuple[str, str]:
    """Return the message and the hint for a text without quotes that YAML reads as another type.

    For example, ``24.10`` becomes the number 24.1.
    """
    message = f"must be text, but YAML reads {node.text} as {_describe_reading(node)}"
    return message, f'quote it: "{node.text}"'


def _describe_wrong_integer(node: Scalar) -> tuple[str, str]:
    """Return the message and the hint for a scalar that is not text and cannot be used as an integer."""
    # An integer that is not written in plain decimal digits, such as 0644, which YAML reads as 420.
    if node.type == "integer":
        return f"YAML reads {node.text} as {_describe_reading(node)}", "write plain decimal digits"
    return f"must be an integer, not {describe_kind(node)}", ""


def _describe_wrong_choice(node: YamlNode, mistake: Mistake) -> tuple[str, str]:
    """Return the message and the hint for a text, list or mapping that is not one of the allowed values.

    For a container runtime that imgkit does not support, the message gives the reason.
    """
    if not isinstance(node, Scalar):
        return f"must be text, not {describe_kind(node)}", allowed_hint("", mistake.choices)
    name = node.text.lower()
    if mistake.path[-1] == "kind" and name in _UNSUPPORTED_RUNTIMES:
        reason = _UNSUPPORTED_RUNTIMES[name]
        return f"imgkit does not start containers by {node.text}: {reason}", _RUNTIME_HINT
    return f"{node.text!r} is not known", allowed_hint(_ALIASES.get(name, node.text), mistake.choices)


def _describe_reading(node: Scalar) -> str:
    """Return how YAML reads the text of `node`: ``24.10`` -> ``the number 24.1``.

    If the value has the same text, return only its type: ``24.1`` -> ``a number``.
    """
    import yaml

    try:
        read_value = yaml.safe_load(node.text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return describe_kind(node)
    value_text = str(read_value)
    if isinstance(read_value, bool):
        value_text = value_text.lower()  # YAML writes true, and Python True
    # A date looks the same to the author, whatever form Python gives it.
    if value_text == node.text or node.type == "date":
        return describe_kind(node)
    return f"the {node.type} {value_text}"


# ---- warnings about texts

_PUBLIC_HINT = "anybody who can pull the image can read it; pass it when the job starts"


def _check_text(path: KeyPath, node: Scalar, problems: Collector) -> None:
    """Check a text in a recipe: warn if it looks like a secret, and check the use of ``$`` in a variable.

    Anybody who can pull the image can read its texts, hence the warning about secrets. In ``PATH: /x:$PATH``,
    the reference is replaced by the value that the base sets. Other references are not expanded, so they
    cause an error or a warning.
    """
    *parents, _ = path
    # For example: ("image", "args", "VERSION"), ("image", "env", "PATH"), ("image", "pip", 0, "env", "CC")
    is_argument = parents == ["image", "args"]
    is_variable = parents[:1] == ["image"] and parents[-1] == "env"
    if is_argument or is_variable:
        _check_variable(path, node, problems, is_argument=is_argument)
    else:
        is_key_chosen = parents in (["image", "labels"], ["system", "env"])
        _warn_of_secret(path, node, problems, is_key_chosen=is_key_chosen)


def _check_variable(path: KeyPath, node: Scalar, problems: Collector, *, is_argument: bool) -> None:
    """Check the value of a variable of the image, or of an argument of the build (``image.args``).

    The last key of `path` is the name of the variable. Report a reference to the variable itself that imgkit
    cannot expand. Otherwise warn if the value looks like a secret, or has a reference to another variable.
    """
    name = str(path[-1])
    # A variable may extend the value that the base image sets. An argument has no earlier value.
    fault = rules.find_variable_fault(name, node.text, has_earlier_value=not is_argument)
    if fault is not None:
        problems.error(node.position, path, *fault)
        return
    _warn_of_secret(path, node, problems, is_key_chosen=True)
    # Only a reference to the variable itself is expanded. Any other `$NAME` stays in the value as text.
    has_reference = re.search(r"\$\{?[A-Za-z_]", node.text)
    is_expanded = rules.split_inherited(name, node.text) is not None
    if has_reference and not is_expanded:
        problems.warn(node.position, path, "variables are not expanded: the $ stays", "write the whole value")


def _warn_of_secret(path: KeyPath, node: Scalar, problems: Collector, *, is_key_chosen: bool) -> None:
    """Warn if the text of `node` looks like a secret, or if its key does, such as ``API_TOKEN``.

    Parameters
    ----------
    is_key_chosen : whether the author has chosen the last key of `path`, as the name of a variable or label.
        Only such a key is checked.
    """
    secret = secret_patterns.find_secret(node.text)
    if secret:
        # A build step can use a secret without storing it, so its hint says how.
        is_in_step = path[:2] in (("image", "pip"), ("image", "run"))
        hint = named_files.IN_HISTORY if is_in_step else _PUBLIC_HINT
        problems.warn(node.position, path, f"this looks like {secret}", hint)
    elif is_key_chosen and secret_patterns.is_secret(str(path[-1]), node.text):
        problems.warn(node.position, path, "this looks like a secret", _PUBLIC_HINT)


# ---- rules about several values


def _select_tables(tree: Table, *pattern: str) -> Iterator[tuple[KeyPath, Table]]:
    """Yield the path and node of each mapping whose path matches `pattern`. `ANY` matches any key or index.

    A value that should be a mapping but is not is skipped, because it has been reported already.
    """
    for path, node in tree.select(*pattern):
        if isinstance(node, Table):
            yield path, node


def _check_secrets(tree: Table, problems: Collector) -> None:
    """Check that the declared secrets match the secrets that the steps use.

    A step that uses an undeclared secret is an error. A secret that no step uses causes a warning.
    """
    declared = _check_declared_secrets(tree, problems)
    # `tree` is merged, so a step of a parent recipe may use a secret that the child declares.
    uses = [
        *tree.select_texts("image", "pip", ANY, "secrets", ANY),
        *tree.select_texts("image", "run", ANY, "secrets", ANY),
    ]
    for path, node in uses:
        if node.text not in declared:
            hint = allowed_hint(node.text, declared) if declared else "declare it below image.secrets"
            problems.error(node.position, path, f"there is no secret {node.text!r}", hint)
    used_names = {node.text for _, node in uses}
    for name, (node, path) in declared.items():
        if name not in used_names:
            hint = f"add secrets: [{name}] to a step of pip or run"
            problems.warn(node.position, path, f"no step uses the secret {name}", hint)


def _check_declared_secrets(tree: Table, problems: Collector) -> dict[str, tuple[Scalar, KeyPath]]:
    """Report secrets that are declared twice, or that do not have exactly one of ``env`` and ``file``.

    Returns
    -------
    A mapping from the name of each secret to the node of that name and the path of the declaration.
    """
    declared: dict[str, tuple[Scalar, KeyPath]] = {}
    for path, secret in _select_tables(tree, "image", "secrets", ANY):
        name_node = secret.entries.get("id")
        if isinstance(name_node, Scalar):
            if name_node.text in declared:
                message = f"{name_node.text} is declared twice"
                problems.error(name_node.position, (*path, "id"), message, "keep one of them")
            declared.setdefault(name_node.text, (name_node, path))
        has_env = "env" in secret.entries
        has_file = "file" in secret.entries
        if has_env == has_file:
            message = f"needs exactly one of env, file; it has {'both' if has_env else 'neither'}"
            hint = "env: NAME is a variable of this machine, file: PATH a file"
            problems.error(secret.position, path, message, hint)
    return declared


_PIP_SOURCES = ("packages", "requirements", "project")
_PROJECT_KEYS = {
    "editable": "other packages have no folder of their own",
    "ignore": "nothing else of this step is a folder",
}
"""Key of a pip step that is allowed only with ``project`` -> the reason."""


def _check_pip_steps(tree: Table, problems: Collector) -> None:
    """Report faulty pip steps, and lists of pip options whose first item is not an option.

    Such an item is often a package, for example ``numpy``.
    """
    for path, step in _select_tables(tree, "image", "pip", ANY):
        _check_pip_step(path, step, problems)
    for path, option in tree.select("image", "pip", ANY, "options", ANY):
        # Later items may be values of the options before them.
        is_first = path[-1] == 0
        if is_first and isinstance(option, Scalar) and re.match("[^-]", option.text):
            message = f"{option.text!r} is not an option"
            hint = "options begin with -; packages go to `packages`"
            problems.error(option.position, path, message, hint)


def _check_pip_step(path: KeyPath, step: Table, problems: Collector) -> None:
    """Report a pip step that does not have exactly one of ``packages``, ``requirements`` and ``project``.

    Also report an empty list of packages, and keys that are allowed only in a step with a project.
    """
    sources = [key for key in _PIP_SOURCES if key in step.entries]
    if len(sources) != 1:
        given_sources = " and ".join(sources) or "none of them"
        hint = "write a step for each" if sources else "add packages: [NAME]"
        message = f"needs exactly one of {', '.join(_PIP_SOURCES)}; it has {given_sources}"
        problems.error(step.position, path, message, hint)
    for key, reason in _PROJECT_KEYS.items():
        if key in step.entries and "project" not in step.entries:
            message = f"is for a project: {reason}"
            problems.error(step.keys[key], (*path, key), message, "add project: FOLDER, or remove it")
    packages = step.entries.get("packages")
    # An empty list passes the check above, because the key is set.
    if isinstance(packages, Items) and not packages.items:
        problems.error(packages.position, (*path, "packages"), "is empty", "remove the step")


def _check_platforms(tree: Table, problems: Collector) -> None:
    """Report an empty list of platforms, and a platform that is listed twice.

    ``[arm64, linux/arm64]`` has one platform twice, because both names mean the same.
    """
    for path, node in tree.select("image", "platform"):
        if isinstance(node, Items) and not node.items:
            problems.error(node.position, path, "is empty", "allowed: amd64, arm64")
        listed_names = set()
        for index, item in node.children():
            if not isinstance(item, Scalar):
                continue
            # `arm64` and `linux/arm64` are the same platform.
            short_name = item.text.removeprefix("linux/")
            if short_name and short_name in listed_names:
                message = f"linux/{short_name} is listed twice"
                problems.error(item.position, (*path, index), message, "keep one of them")
            listed_names.add(short_name)


def _check_runtime(tree: Table, problems: Collector) -> None:
    """Report ``kind: docker`` or ``kind: kubernetes`` without a ``command``.

    The default of ``command`` is singularity, which does not fit these kinds.
    """
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
    """Report a scheduler that neither imgkit nor a plug-in provides."""
    for path, node in tree.select_texts("system", "scheduler"):
        fault = systems.find_scheduler_fault(node.text)
        if fault is not None:
            problems.error(node.position, path, *fault)


def check_system(facts: SystemFacts, tree: Table, problems: Collector) -> None:
    """Check the system of a recipe with the rules of its scheduler, which may come from a plug-in.

    A value that the scheduler cannot use is an error. A container runtime that it cannot start is only a
    warning, because the image can still be built.
    """
    # The caller has checked that the scheduler exists, so the lookup cannot fail with a KeyError.
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
    for fault in registration.find_faults(facts):
        path = ("system", *fault.path)
        problems.error(tree.position_of(path), path, fault.what, fault.hint)
