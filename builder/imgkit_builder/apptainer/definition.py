"""Render the definition file that the runtime builds, and find the base image that it starts from.

The base is an archive, an OCI folder, a .sif or an image in a registry. The first step of the definition
inspects the base and writes the versions of its software into the image's manifest.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import stored
from imgkit_builder.base.progress import Reporter
from imgkit_builder.image import inside, render
from imgkit_builder.image.instructions import INSIDE, Additions, ContextFile, Step
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.oci.manifest import STANDIN_LABEL, BaseImage
from imgkit_builder.oci.platform import host_platform
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.sif import check, entries
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.convert import RUNTIME_DISK_SHARE
from imgkit_builder.sif.entries import Archive, OciFolder
from imgkit_builder.sif.workspace import check_space as require_space
from imgkit_entrypoints.errors import CheckFailed, UsageError

INSPECTION_PROGRAM = "imgkit/look.py"
LINKS_SCRIPT = "imgkit/links.sh"
"""Paths of two files in the folder of the build context. The first steps of the definition run them."""

RUNTIME = "/.singularity.d"
"""The folder in an image that contains the runtime's own files."""
# The scripts in this folder that set the environment variables of the base.
_ENVIRONMENT_SCRIPTS = ("10-docker2singularity.sh", "90-environment.sh", "91-environment.sh")

# The end of a program that runs in the base. The beginning comes from `inside.probe_argv`. It inspects the
# base, and stores the result in the variable `seen`.
_FILL_MANIFEST = """
path = "{manifest}"
with open(path, encoding="utf-8") as stream:
    manifest = json.load(stream)
probe = dict((name, seen[name]) for name in ("python", "torch", "cuda", "nccl"))
probe["pip_conflicts"], probe["skipped"] = seen["pip_conflicts"] or [], ""
manifest["base"]["probe"] = probe
if not manifest["base"]["env"]:
    # A .sif, or an image of a registry: only the runtime knows its variables, and has them in these files.
    script = "for file in {scripts}; do test ! -r $file || . $file; done; env -0"
    shell = subprocess.Popen(["env", "-i", "/bin/sh", "-c", script], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)
    pairs = [pair.split("=", 1) for pair in shell.communicate()[0].decode("utf-8", "replace").split("\\0")]
    manifest["base"]["env"] = dict(pair for pair in pairs if len(pair) == 2 and pair[0] not in {shell_sets})
with open(path, "w", encoding="utf-8") as stream:
    stream.write(json.dumps(manifest, indent=2, sort_keys=True) + "\\n")
"""


def make_inspection_program() -> str:
    """Return a Python program that writes the versions and variables of the base into the image's manifest.

    The first step of the definition runs it in the base.
    """
    inspect_base = inside.probe_argv()[-1]  # the program in the command "python3 -I -c PROGRAM"
    # This part reads the variable `seen`, in which the first part stores what it has found out.
    fill_manifest = _FILL_MANIFEST.format(
        manifest=f"{INSIDE}/manifest.json",
        scripts=" ".join(f"{RUNTIME}/env/{name}" for name in _ENVIRONMENT_SCRIPTS),
        # Variables that the shell itself sets when it runs these scripts. They do not belong to the base.
        shell_sets=("OLDPWD", "PWD", "SHLVL", "_"),
    )
    return inspect_base + fill_manifest


def make_links_script(links: Mapping[str, str]) -> str:
    """Return a shell script that creates the symbolic links of the build context inside the image.

    The context's folder does not contain these links, because the runtime follows links when it copies files
    into the image.
    """
    script_lines = ["set -e"]
    for name, link_target in links.items():
        script_lines.append(shlex.join(("ln", "-s", "--", link_target, f"{INSIDE}/{name}")))
    return "\n".join(script_lines) + "\n"


def render_definition(recipe: Recipe, base: DefinitionBase, labels: Mapping[str, str]) -> str:
    """Return the definition that builds `recipe` on the given base.

    `labels` are added to the recipe's own labels. Two steps of imgkit run before the steps of the recipe.

    Raises
    ------
    UsageError : a definition cannot express a value of the recipe.
    """
    program = ContextFile(context_path=INSPECTION_PROGRAM, path=f"{INSIDE}/look.py")
    links_script = ContextFile(context_path=LINKS_SCRIPT, path=f"{INSIDE}/links.sh")
    steps = _make_own_steps(program.path, links_script.path)
    # A line in the section %labels has the form NAME VALUE, so a value must not contain line breaks.
    one_line_labels = {key: " ".join(value.split()) for key, value in labels.items()}
    return render.render_build_definition(
        recipe,
        Additions(files=(program, links_script), steps=steps, labels=one_line_labels),
        base=base.image.name,
        platform=base.image.platform,
        bootstrap=base.bootstrap,
        source=base.location,
    )


def _make_own_steps(program: str, links_script: str) -> tuple[Step, Step]:
    """Return the two steps with which imgkit begins every definition.

    The first runs `program`, which adds facts about the base to the image's manifest. The second runs
    `links_script`, which creates the symbolic links of copied folders, and then removes both files from the
    image. Both parameters are paths in the image.
    """
    # The image also works without the facts, so a failure must not end the build ("|| :").
    run_program = f"if command -v python3 > /dev/null; then python3 -I -B {program} || :; fi"
    create_links = f"sh {links_script}\nrm {program} {links_script}"
    return (
        Step(origin="imgkit: inspect the base", command=run_program),
        Step(origin="imgkit: the links of copied folders", command=create_links),
    )


REGISTRY = "registry"
"""The value of ``--base-from`` for a base in a registry. Every other value is a path."""
LAYOUT_NAME, SIF_NAME = "base", "base.sif"
"""The name of the base in the folder in which the runtime builds: an OCI folder or a .sif."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionBase:
    """The base image of a build, and where its files are."""

    source: Archive | OciFolder | Path | None
    """An archive, an OCI folder or the path of a .sif.

    None means that the runtime pulls the image from its registry.
    """
    image: BaseImage
    """What is known about the image.

    For a compressed archive, this is only its name until the archive has been read.
    """

    @property
    def bootstrap(self) -> str:
        """The value of ``Bootstrap:`` in the definition for this kind of base."""
        if self.source is None:
            return "docker"
        if isinstance(self.source, Path):
            return "localimage"
        return "oci"

    @property
    def location(self) -> str:
        """The value of ``From:`` in the definition: the name of the image, or of its file or folder."""
        return {"docker": self.image.name, "localimage": SIF_NAME, "oci": LAYOUT_NAME}[self.bootstrap]


def find_base(recipe: Recipe, *, name: str | None, base_from: str | None, report: Reporter) -> DefinitionBase:
    """Return the base of a build. If it is a file or folder on this machine, its image id is read.

    Parameters
    ----------
    name : the name of the base, or None for the base that the recipe names.
    base_from : the path of an archive, an OCI folder or a .sif, or ``registry``. None means ``registry``.

    Raises
    ------
    UsageError : there is no such file, or it is not an image.
    CheckFailed : the image is damaged, or is for another platform than this machine's.
    """
    name = name or recipe.image.base
    if base_from is None or base_from == REGISTRY:
        # A tag may name another image tomorrow. Only a digest identifies the image.
        digest = name if "@sha256:" in name else ""
        image = BaseImage(name=name, digest=digest, platform=host_platform())
        return DefinitionBase(source=None, image=image)
    base = _read_base(base_from)
    _refuse_platform(base)
    if base.image.id and base.image.name != name:
        report.note(f"the base is {base.image.name}, but the recipe names {name}")
    return base


def _read_base(base_from: str) -> DefinitionBase:
    """Return the base at the path `base_from`, or raise UsageError if there is no image at this path."""
    path = Path(base_from).expanduser()
    if sif_image.is_sif(path):
        return _read_sif(path)
    if (path / "oci-layout").is_file():
        selected = stored.open_image(path).selected
        image = _describe_base(selected.config, selected.names, path)
        return DefinitionBase(source=OciFolder(path=path.absolute()), image=image)
    if path.is_file():
        return _read_archive(path)
    message = "there is no such base"
    if path.exists():
        message = "a folder without oci-layout is not an image"
    raise UsageError(
        message,
        where=f"--base-from {base_from}",
        hint="an archive (imgkit save, docker save), an OCI folder, a .sif, or the word registry",
    )


def identify_base(archive: Archive, config: ImageConfig, names: tuple[str, ...]) -> DefinitionBase:
    """Describe the base in `archive` by the configuration and the names that were read from it.

    Raises
    ------
    CheckFailed : the base is for another platform than this machine's.
    """
    base = DefinitionBase(source=archive, image=_describe_base(config, names, archive.path))
    _refuse_platform(base)
    return base


def check_space(base: DefinitionBase, target: Path, temporary: Path) -> None:
    """Check that there is enough disk space, before the build begins.

    A base in a registry is not checked, because its size is unknown.

    Raises
    ------
    CheckFailed : there is too little space on the disk of `target` or of `temporary`.
    """
    if base.source is None:  # a base in a registry
        return
    if isinstance(base.source, Path):  # a .sif, which is a compressed file
        image_bytes = int(base.source.stat().st_size * entries.UNPACKED_FACTOR)
        # A .sif has no layers, so the runtime unpacks its files only once.
        temporary_bytes = image_bytes
    else:  # an archive or an OCI folder
        image_bytes = base.source.size_bytes
        # The disk also has two copies of the layers: the OCI folder of imgkit, and the runtime's own copy.
        temporary_bytes = int(image_bytes * RUNTIME_DISK_SHARE)
    require_space(image_bytes, temporary_bytes, target, temporary)


def _read_archive(path: Path) -> DefinitionBase:
    """Return the base in the archive `path`."""
    archive = Archive(path=path.absolute())
    config = entries.peek_config(archive)
    if config is None:
        # The archive is compressed or damaged. `identify_base` is called later, when the whole archive has
        # been read.
        return DefinitionBase(source=archive, image=BaseImage(name=path.name, platform=host_platform()))
    return identify_base(archive, config, stored.open_image(path).selected.names)


def _describe_base(config: ImageConfig, names: tuple[str, ...], path: Path) -> BaseImage:
    """Return a description of the base with the configuration `config` and the tags `names`.

    If there is no tag, the name of the archive or folder `path` is used.
    """
    return BaseImage(
        name=names[0] if names else path.name,
        id=config.image_id,
        platform=f"{config.os or 'linux'}/{config.arch}",
        # A stand-in is a small base without NVIDIA's software, for tests.
        standin=STANDIN_LABEL in config.labels,
        env={name: value or "" for name, value in config.env},
    )


def _read_sif(path: Path) -> DefinitionBase:
    """Return the base in the .sif `path`.

    If imgkit made the file, the base gets the name that is in its record, otherwise the name of the file.
    """
    sif = sif_image.read(path)
    recorded_name = sif.record.source if sif.record else ""
    image_id, _ = sif_image.identify(path, sif)
    image = BaseImage(
        name=recorded_name or path.name,
        id=image_id,
        platform=f"linux/{sif.arch}",
        standin=STANDIN_LABEL in (check.read_labels(sif) or {}),
    )
    return DefinitionBase(source=path.absolute(), image=image)


def _refuse_platform(base: DefinitionBase) -> None:
    """Raise CheckFailed if the base is for another platform than this machine's."""
    platform, host = base.image.platform, host_platform()
    if platform != host:
        raise CheckFailed(
            f"the base is for {platform}, and a definition builds for {host}, this machine's platform",
            where=base.image.name,
            hint=f"build on a machine of that kind, or with Docker: imgkit build --platform {platform}",
        )
