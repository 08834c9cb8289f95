"""Makes the values of a recipe from its tree, and reports everything that is wrong with them at once.

Rules about one value belong to its field in `model`, and pydantic applies them. Here are the words for its
mistakes, rules about several values, and warnings. `named_files` looks at the files that a recipe names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from imgkit_builder.recipe import named_files, rules, systems
from imgkit_builder.recipe.model import Document
from imgkit_builder.recipe.problems import ANY, Collector, KeyPath, choices, key_text, nearest
from imgkit_builder.recipe.validation import Mistake, allowed_keys, key_paths, validate
from imgkit_builder.recipe.yaml_tree import Items, Scalar, Table, YamlNode, kind, plain
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.system import SystemFacts


def check(tree: Table, problems: Collector, *, is_complete: bool) -> Document | None:
    """Return the values of `tree`; None after a problem, which goes to `problems`.

    If not `is_complete`, a parent could not be read: it may state the keys that are missing here.
    """
    faulty = {path for path, node in tree.walk() if isinstance(node, Scalar) and node.type == "nothing"}
    for path in faulty:
        _report_nothing(path, tree, problems)
    document, mistakes = validate(Document, plain(tree))
    # A value that YAML reads as none has been reported in its own words, and other rules skip faulty values.
    for mistake in mistakes:
        path = tree.deepest(mistake.path)[1]
        if mistake.path not in faulty and (is_complete or mistake.kind != "missing"):
            _report(mistake, tree, problems)
        if mistake.kind not in ("missing", "unknown") and not mistake.is_key:
            faulty.add(path)
    for path, node in tree.walk():
        if isinstance(node, Scalar) and node.type == "text" and path not in faulty:
            _check_text(path, node, problems)
    for rule in (_check_secrets, _check_pip_steps, _check_platforms, _check_runtime, _check_scheduler):
        rule(tree, problems)
    named_files.check(tree, problems, faulty)
    return document


def _report_nothing(path: KeyPath, tree: Table, problems: Collector) -> None:
    node, _ = tree.deepest(path)
    text = node.text if isinstance(node, Scalar) else ""
    message = f"{text} is read as no value" if text else "has no value"
    hint = f'quote it if it is text: "{text}"' if text else "give it one or remove the key"
    problems.error(node.position, path, message, hint)


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
_START = "an image keeps the start program of its base; a job names its command: imgkit run RECIPE -- COMMAND"
_STAGES = "a recipe has one stage"
_SECOND_IMAGE = "build what is compiled in an image of its own, and copy its files, or compile it in `run`"
_OF_DOCKERFILES: Mapping[str, tuple[str, str]] = {
    "entrypoint": (_START, "set up the environment in `env`, or in a script that the command starts"),
    "cmd": (_START, "remove it"),
    "stages": (_STAGES, _SECOND_IMAGE),
    "from": (_STAGES, f"the image to start from is `base`; {_SECOND_IMAGE}"),
    "user": ("the steps run as root, and containers have the base's user", "remove it"),
    "expose": ("jobs use the node's own network: no port needs to be opened", "remove it"),
    "volumes": ("folders are mounted when a job starts", "system.runtime.binds, or --bind of the job"),
}
"""Keys of `image` for what a Dockerfile can do and a recipe cannot: the reason, and the way that works."""
_OTHER_RUNTIMES: Mapping[str, str] = {
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
"""Form that a key expects -> its name in YAML, and how to write it."""


def _report(mistake: Mistake, tree: Table, problems: Collector) -> None:
    """Report one mistake with the words of the file."""
    node, path = tree.deepest(mistake.path)
    if mistake.kind == "missing":
        smallest = "a recipe needs at least `image: {base: NAME:TAG}`"
        hint = smallest if len(mistake.path) < 3 else f"add `{mistake.path[-1]}: ...`"
        problems.error(node.position, mistake.path, mistake.message, hint)
    elif mistake.is_key:
        table, _ = tree.deepest(mistake.path[:-1])
        message, hint = mistake.message, mistake.hint
        if mistake.kind == "unknown":
            message, hint = _unknown_key(mistake.path)
        position = table.keys[str(mistake.path[-1])] if isinstance(table, Table) else table.position
        problems.error(position, mistake.path, message, hint)
    elif mistake.kind == "rule":
        problems.error(node.position, path, mistake.message, mistake.hint)
    else:
        problems.error(node.position, path, *_wrong_value(node, mistake))


def _unknown_key(path: KeyPath) -> tuple[str, str]:
    name = str(path[-1])
    # Who knows Dockerfiles looks for their instructions: the reason helps more than the nearest key.
    if path[:-1] == ("image",) and name.lower() in _OF_DOCKERFILES:
        return _OF_DOCKERFILES[name.lower()]
    allowed = allowed_keys(path, Document)
    # No field of the model: `extends` is resolved before the check.
    if path[:-1] in ((), ("system",)):
        allowed.append("extends")
    hint = choices(name, allowed)
    elsewhere = next((keys for keys in key_paths(Document) if keys[-1] == name), None)
    if elsewhere and not nearest(name, allowed):
        hint += f"; did you mean {key_text(elsewhere)}?"
    return "unknown key", hint


def _wrong_value(node: YamlNode, mistake: Mistake) -> tuple[str, str]:
    """Return the message and the hint for a value of a wrong type, or another one than those allowed."""
    expects_text = mistake.kind == "choice" or mistake.expected == "text"
    if isinstance(node, Scalar) and node.type == "text" and mistake.kind == "choice":
        if mistake.path[-1] == "kind" and (reason := _OTHER_RUNTIMES.get(node.text.lower())):
            return f"imgkit does not start containers by {node.text}: {reason}", _RUNTIME_HINT
        name = _ALIASES.get(node.text.lower(), node.text)
        return f"{node.text!r} is not known", choices(name, mistake.choices)
    if isinstance(node, Scalar) and node.type != "text" and expects_text:
        return f"must be text, but YAML reads {node.text} as {_reading(node)}", f'quote it: "{node.text}"'
    if isinstance(node, Scalar) and node.type != "text" and mistake.expected == "an integer":
        if node.type == "integer":
            return f"YAML reads {node.text} as {_reading(node)}", "write plain decimal digits"
        return f"must be an integer, not {kind(node)}", ""
    if mistake.kind == "choice":
        return f"must be text, not {kind(node)}", choices("", mistake.choices)
    form, hint = _FORMS[mistake.expected]
    return f"must be {form}, not {kind(node)}", hint


def _reading(node: Scalar) -> str:
    """Return ``the number 24.1`` for 24.10; only the type where the value equals the text."""
    import yaml

    try:
        value = yaml.safe_load(node.text)
    except (yaml.YAMLError, ValueError, OverflowError):
        return kind(node)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return kind(node) if text == node.text or node.type == "date" else f"the {node.type} {text}"


# ---- texts that are allowed and deserve a look

_EXPOSED = "anybody who can pull the image can read it; pass it when the job starts"


def _check_text(path: KeyPath, node: Scalar, problems: Collector) -> None:
    """Report a variable that cannot be expanded, and warn of secrets and of ``$`` without a meaning."""
    name = str(path[-1])
    is_variable = path[0] == "image" and len(path) > 2 and path[-2] in ("env", "args")
    has_name = is_variable or path[:-1] in (("image", "labels"), ("system", "env"))
    if is_variable:
        for message, hint in rules.variable(name, node.text, has_earlier_value=path[1] != "args"):
            problems.error(node.position, path, message, hint)
            return
    if secret := secret_patterns.in_value(node.text):
        hint = named_files.IN_HISTORY if path[:2] in (("image", "pip"), ("image", "run")) else _EXPOSED
        problems.warn(node.position, path, f"this looks like {secret}", hint)
    elif has_name and secret_patterns.in_name(name, node.text):
        problems.warn(node.position, path, "this looks like a secret", _EXPOSED)
    # `/x:$PATH` is expanded; any other $ would stand in the value as it is.
    adds_to_base = is_variable and rules.inherited(name, node.text) is not None
    if is_variable and not adds_to_base and re.search(r"\$\{?[A-Za-z_]", node.text):
        problems.warn(node.position, path, "variables are not expanded: the $ stays", "write the whole value")


# ---- rules about several values


def _tables(tree: Table, *pattern: str) -> Iterator[tuple[KeyPath, Table]]:
    for path, node in tree.select(*pattern):
        if isinstance(node, Table):
            yield path, node


def _check_secrets(tree: Table, problems: Collector) -> None:
    """Report declarations without exactly one source or without a step, and names without a declaration."""
    declared: dict[str, tuple[Scalar, KeyPath]] = {}
    for path, secret in _tables(tree, "image", "secrets", ANY):
        name = secret.entries.get("id")
        if isinstance(name, Scalar) and name.text in declared:
            problems.error(name.position, (*path, "id"), f"{name.text} is declared twice", "keep one of them")
        elif isinstance(name, Scalar):
            declared[name.text] = name, path
        sources = [key for key in ("env", "file") if key in secret.entries]
        if len(sources) != 1:
            message = f"needs exactly one of env, file; it has {'both' if sources else 'neither'}"
            hint = "env: NAME is a variable of this machine, file: PATH a file"
            problems.error(secret.position, path, message, hint)
    # Steps of a parent may use a secret that the child declares: both are in the merged tree.
    used = set()
    for step in ("pip", "run"):
        for path, name in tree.select("image", step, ANY, "secrets", ANY):
            if isinstance(name, Scalar) and name.type == "text":
                used.add(name.text)
                if name.text not in declared:
                    hint = choices(name.text, declared) if declared else "declare it below image.secrets"
                    problems.error(name.position, path, f"there is no secret {name.text!r}", hint)
    for text, (name, path) in declared.items():
        if text not in used:
            hint = f"add secrets: [{text}] to a step of pip or run"
            problems.warn(name.position, path, f"no step uses the secret {text}", hint)


def _check_pip_steps(tree: Table, problems: Collector) -> None:
    sources = ("packages", "requirements", "project")
    for path, step in _tables(tree, "image", "pip", ANY):
        present = [key for key in sources if key in step.entries]
        if len(present) != 1:
            message = (
                f"needs exactly one of {', '.join(sources)}; it has {' and '.join(present) or 'none of them'}"
            )
            hint = "write a step for each" if present else "add packages: [NAME]"
            problems.error(step.position, path, message, hint)
        for key, reason in (
            ("editable", "other packages have no folder of their own"),
            ("ignore", "nothing else of this step is a folder"),
        ):
            if key in step.entries and "project" not in step.entries:
                message = f"is for a project: {reason}"
                problems.error(step.keys[key], (*path, key), message, "add project: FOLDER, or remove it")
        packages = step.entries.get("packages")
        if isinstance(packages, Items) and not packages.items:
            problems.error(packages.position, (*path, "packages"), "is empty", "remove the step")
        _, option = next(iter(step.entries.get("options", step).children()), (0, None))
        if "options" in step.entries and isinstance(option, Scalar) and re.match("[^-]", option.text):
            message = f"{option.text!r} is not an option"
            hint = "options begin with -; packages go to `packages`"
            problems.error(option.position, (*path, "options", 0), message, hint)


def _check_platforms(tree: Table, problems: Collector) -> None:
    path: KeyPath = ("image", "platform")
    for _, node in tree.select("image", "platform"):
        if isinstance(node, Items) and not node.items:
            problems.error(node.position, path, "is empty", "allowed: amd64, arm64")
        platforms: set[str] = set()
        for index, item in node.children():
            name = item.text.removeprefix("linux/") if isinstance(item, Scalar) else ""
            if name in platforms:
                message = f"linux/{name} is listed twice"
                problems.error(item.position, (*path, index), message, "keep one of them")
            platforms |= {name} - {""}


def _check_runtime(tree: Table, problems: Collector) -> None:
    # The default command is singularity, which starts no container of these kinds.
    examples = {"docker": "docker", "kubernetes": "runai"}
    for path, runtime in _tables(tree, "system", "runtime"):
        name = runtime.entries.get("kind")
        if isinstance(name, Scalar) and name.text in examples and "command" not in runtime.entries:
            message = f"kind {name.text} needs `command`: its default, singularity, is of another kind"
            hint = f"for example command: {examples[name.text]}"
            problems.error(name.position, (*path, "kind"), message, hint)


def _check_scheduler(tree: Table, problems: Collector) -> None:
    for path, node in tree.select("system", "scheduler"):
        if isinstance(node, Scalar) and node.type == "text" and not systems.is_known(node.text):
            hint = choices(systems.with_alias(node.text), systems.names())
            problems.error(node.position, path, f"{node.text!r} is not known", hint)


def check_system(facts: SystemFacts, tree: Table, problems: Collector) -> None:
    """Apply what the recipe's own scheduler knows about its section."""
    scheduler, runtime = systems.registration(facts.scheduler), facts.runtime
    if runtime.kind not in scheduler.runtimes:
        path: KeyPath = ("system", "runtime", "kind")
        message = f"{facts.scheduler} does not start programs by {runtime.kind}: imgkit run refuses it"
        problems.warn(tree.deepest(path)[0].position, path, message, choices("", scheduler.runtimes))
    elif runtime.kind == "docker" and scheduler.by_podman and not systems.is_podman(runtime.command):
        path = ("system", "runtime", "command")
        message = f"{facts.scheduler} starts containers by podman alone: imgkit run refuses {runtime.command}"
        problems.warn(tree.deepest(path)[0].position, path, message, "command: podman, or podman-hpc")
    for fault in scheduler.faults(facts):
        path = ("system", *fault.path)
        problems.error(tree.deepest(path)[0].position, path, fault.what, fault.hint)
