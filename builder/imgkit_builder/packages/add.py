"""Make a squashfs with packages beside a .sif.

pip runs in the image, as the user who calls imgkit, and installs into a folder of this machine. The folder
becomes a squashfs, with a record of the packages at its end. Jobs mount the squashfs into the image; the .sif
itself does not change.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from imgkit_builder.base import files, process
from imgkit_builder.base.flags import option_field
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.oci.platform import arch_of, host_arch
from imgkit_builder.packages import failures, record
from imgkit_builder.packages.record import AddedPackage, PackagesRecord
from imgkit_builder.recipe.requirements import PROTECTED
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif import mksquashfs, runtime, squash
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints import __version__, json_text, secret_patterns
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

INSIDE = "/run/imgkit/add"
"""Path in the container of the folder with ``inside.py``, its order and its answer."""
PROGRAM = "inside.py"
CERTIFICATES = f"{INSIDE}.pem"
"""Path in the container of this machine's certificates, if a variable names some. ``inside.py`` uses them."""
PASSED = (
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"),
)
"""Variables of this machine that pip in the image gets. The others do not fit an image, for example paths."""
# Variables that name a file of certificates, in the order in which they are asked.
_CERTIFICATES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
# Files and folders of a project that are not part of its source: version control, environments, earlier
# builds, runs and images.
_NOT_COPIED = (".git", ".venv", "venv", "__pycache__", "build", "dist", "runs", "*.sif", "*.sqsh", "*.tar")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """The arguments and options of `imgkit add`: what to install, and into which file."""

    requirements: tuple[str, ...] = ()
    """Requirements as pip takes them: ``einops``, ``omegaconf>=2.3``."""
    image: Path | None = option_field(None, metavar="PATH", help="The .sif that the packages are for.")
    output: Path | None = option_field(
        None, "--output", "-o", metavar="FILE", help="File to write (default: X+N.sqsh beside the image)."
    )
    requirements_file: Path | None = option_field(
        None, "--requirements", "-r", metavar="FILE", help="File with requirements, as for pip."
    )
    project: Path | None = option_field(
        None, metavar="DIR", help="Folder of a project to install, with what it depends on."
    )
    wheels: Path | None = option_field(
        None, metavar="DIR", help="Take all packages from the wheels in this folder; needs no network."
    )
    replace: tuple[str, ...] = option_field(
        (), metavar="NAME", help="Allow another version of this package than the image has."
    )

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments that decide what is installed: ``("einops", "--replace", "numpy")``.

        They stand in the file's record. The image and the output file are not among them.
        """
        options = {"-r": self.requirements_file, "--project": self.project, "--wheels": self.wheels}
        arguments = list(self.requirements)
        for name, value in options.items():
            if value is not None:
                arguments += (name, str(value))
        for name in self.replace:
            arguments += ("--replace", name)
        return tuple(arguments)

    @property
    def reads_files(self) -> bool:
        """Return whether files of this machine decide what is installed.

        Their content can change, so the same request may install something else the next time.
        """
        return any((self.requirements_file, self.project, self.wheels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The result of `add`: a file with packages, and the image that it is for."""

    path: Path
    image: Path
    size_bytes: int
    record: PackagesRecord
    up_to_date: bool
    """Whether the file already had these packages for this image, so that nothing was installed."""

    @property
    def exec_line(self) -> str:
        """Return the shell line that starts Python in the image with the packages, without imgkit."""
        target = record.target(1)
        variables = f"--env PREPEND_PATH={target}/bin,PYTHONPATH={target}"
        bind = shlex.quote(f"{self.path}:{target}:image-src=/,ro")
        return f"singularity exec --bind {bind} {variables} {shlex.quote(str(self.image))} python3 ..."


def add(request: AddRequest, report: Reporter = SILENT) -> Added:
    """Install the packages of `request` into a new file, and return a description of the file.

    The file is complete when it gets its name. If an error is raised, an earlier file stays as it was.
    Nothing is installed if the file was made by an equal request for the same image, unless the request reads
    files.

    Raises
    ------
    UsageError : the request is not valid, does not fit the image, or the file cannot be written.
    ToolMissing : there is no Singularity or no mksquashfs.
    ToolFailed : pip or mksquashfs failed, or the disk is full.
    """
    image = _check_image(request)
    _check_requirements(request)
    target = _target(request, image)
    digest = record.image_digest(image)
    existing = _read_existing(target, request)
    if existing is not None and existing.image_digest == digest and not request.reads_files:
        return _added(target, image, existing, up_to_date=True)
    _refuse_foreign_arch(request, image)
    with workspace(target, tmp_base(target, None)) as work, runtime.log_file(target.stem) as log:
        report.stage(f"pip in {image.name}")
        answer = _run_inside(image, work.folder, _write_order(request, work.folder), report, log)
        if "failure" in answer:
            raise failures.explain(answer, image=image, requirements=request.requirements, log=log.name)
        report.stage("squash")
        _squash(work.folder / "root", work.part)
        added = new_record(request, image.name, digest, answer)
        # `record.refuse_unfit` also accepts an image by its id. A .sif that imgkit packed again from the same
        # image has another digest, but the same id.
        sif = sif_image.read(image)
        if sif.record is not None:
            added = dataclasses.replace(added, image_id=sif.record.image_id)
        record.append(work.part, added)
        files.publish_file(work.part, target)
    return _added(target, image, added, up_to_date=False)


def _added(path: Path, image: Path, stored: PackagesRecord, *, up_to_date: bool) -> Added:
    """Return the result of `add` for the file `path`, which exists."""
    size_bytes = path.stat().st_size
    return Added(path=path, image=image, size_bytes=size_bytes, record=stored, up_to_date=up_to_date)


def _check_image(request: AddRequest) -> Path:
    """Return the absolute path of the image. Raise UsageError if none is named, or if it is not a .sif."""
    if request.image is None:
        packages = ", ".join(request.requirements) or "PACKAGE"
        raise UsageError(
            "packages are added beside an image that exists, and none is named",
            where="--image",
            hint=f"--image X.sif; or build them into an image, by its recipe: image: {{pip: [{packages}]}}",
        )
    image = request.image.absolute()
    if not sif_image.is_sif(image):
        problem = "this is no .sif" if image.exists() else "there is no such image"
        raise UsageError(
            problem, where=str(request.image), hint="imgkit sif IMAGE makes a .sif of an archive or an image"
        )
    return image


def _check_requirements(request: AddRequest) -> None:
    """Check what the request asks pip to install.

    Raises
    ------
    UsageError : the request names no package, a requirement has a wrong form, an argument has a secret in it,
        or a file or folder does not exist.
    """
    if not (request.requirements or request.requirements_file or request.project):
        raise UsageError("no package given", where="PACKAGE", hint="imgkit add einops --image X.sif")
    for text in request.requirements:
        check_requirement(text)
    # The arguments stand in the record at the end of the file, which others may read.
    kind = secret_patterns.in_arguments(request.arguments)
    if kind:
        raise UsageError(
            f"it holds {kind}, and the record of the file would show it",
            where="PACKAGE",
            hint="export PIP_INDEX_URL=..., which is not recorded",
        )
    for option, path in (
        ("-r", request.requirements_file),
        ("--project", request.project),
        ("--wheels", request.wheels),
    ):
        if path is not None and not path.exists():
            raise UsageError("there is no such file or folder", where=f"{option} {path}")


def check_requirement(text: str) -> None:
    """Raise UsageError if `text` is not a requirement by PEP 508, such as ``omegaconf>=2.3``."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(text)
    except InvalidRequirement:
        hint = "NAME, or 'NAME>=2.3'"
        raise UsageError(f"{text!r} is not a requirement", where="PACKAGE", hint=hint) from None


def _target(request: AddRequest, image: Path) -> Path:
    """Return the absolute path of the file to write.

    The default is ``X+N.sqsh`` beside the image ``X.sif``. N is the number of requirements on the command
    line, or 1 if there are none.

    Raises
    ------
    UsageError : no runtime can mount the path, or this user cannot write into its folder.
    """
    count = len(request.requirements) or 1
    target = request.output or image.with_name(f"{image.stem}+{count}.sqsh")
    target = target.absolute()
    if not record.safe_name(str(target)):
        raise UsageError(
            f"no runtime can mount {str(target)!r}",
            where="--output",
            hint="-o FILE.sqsh with a path without colons, commas and quotes",
        )
    if not target.parent.is_dir():
        raise UsageError("there is no such folder", where=str(target), hint=f"mkdir -p {target.parent}")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        hint = f"-o FILE.sqsh, in a folder of yours: -o {target.name}"
        raise UsageError(f"you may not write in {target.parent}", where=str(target), hint=hint)
    return target


def _read_existing(target: Path, request: AddRequest) -> PackagesRecord | None:
    """Return the record of the file `target`, if it exists and an equal request made it.

    Return None if the file does not exist.

    Raises
    ------
    UsageError : the file exists, but `imgkit add` did not write it, or wrote it for other arguments.
    """
    if not os.path.lexists(target):
        return None
    existing = record.read(target) if record.is_packages(target) else None
    if existing is not None and existing.arguments == request.arguments:
        return existing
    content = "is not one of imgkit add" if existing is None else f"holds {shlex.join(existing.arguments)}"
    raise UsageError(
        f"the file exists and {content}",
        where=str(target),
        hint=f"-o OTHER.sqsh, or: rm {shlex.quote(str(target))}",
    )


def _refuse_foreign_arch(request: AddRequest, image: Path) -> None:
    """Raise UsageError if the image is for another architecture than that of this machine.

    The hint has the command that runs `imgkit add` on a node of the cluster.
    """
    arch = sif_image.read(image).arch
    if arch in (host_arch(), "unknown"):
        return
    submit = "srun --nodes 1 --ntasks 1" if shutil.which("srun") else "qsub -I, then on the node:"
    command = shlex.join(("imgkit", "add", *request.arguments, "--image", str(image)))
    raise UsageError(
        f"the image is for {arch}, and this machine is {host_arch()}: pip cannot run in it here",
        where=str(image),
        hint=f"on a node for the image: {submit} {command}",
    )


def _write_order(request: AddRequest, folder: Path) -> list[str]:
    """Write ``inside.py``, its order and a copy of the project into `folder`.

    Return the mounts of everything else that pip reads, each as ``SRC:DEST:ro``.
    """
    (folder / PROGRAM).write_bytes(program_source())
    requirements, options, mounts = [*request.requirements], [], []
    if request.wheels is not None:
        options = ["--no-index", "--find-links", f"{INSIDE}-wheels"]
        mounts.append(f"{request.wheels.absolute()}:{INSIDE}-wheels:ro")
    if request.requirements_file is not None:
        # The whole folder of the file is mounted, because the file may name others beside it: "-r base.txt".
        file = request.requirements_file.absolute()
        requirements += ["-r", f"{INSIDE}-requirements/{file.name}"]
        mounts.append(f"{file.parent}:{INSIDE}-requirements:ro")
    if request.project is not None:
        # The project is copied and not mounted, because a build writes into the folder.
        shutil.copytree(request.project, folder / "project", ignore=shutil.ignore_patterns(*_NOT_COPIED))
        requirements.append(f"{INSIDE}/project")
    bundle = next(filter(None, map(os.environ.get, _CERTIFICATES)), "")
    if bundle and Path(bundle).is_file():
        mounts.append(f"{bundle}:{CERTIFICATES}:ro")
    with files.create_file(folder / "order.json") as stream:
        stream.write(order(requirements, options, request.replace))
    return mounts


def program_source() -> bytes:
    """Return the source of ``inside.py``, which runs in the image."""
    return importlib.resources.files(__package__).joinpath(PROGRAM).read_bytes()


def order(requirements: Sequence[str], options: Sequence[str] = (), replace: Sequence[str] = ()) -> bytes:
    """Return the content of ``order.json``, by which ``inside.py`` knows what to install.

    Parameters
    ----------
    options : options for pip, such as ``--no-index``.
    replace : names of packages that may get another version than the image has.
    """
    values = {"requirements": requirements, "options": options, "replace": replace, "protected": PROTECTED}
    return json.dumps(values).encode()


def _run_inside(
    image: Path, folder: Path, mounts: Sequence[str], report: Reporter, log: TextIO
) -> dict[str, Any]:
    """Run ``inside.py`` in the image, and return its answer, which may describe a failure of pip.

    Parameters
    ----------
    folder : the folder with ``inside.py`` and its order. The container mounts it as `INSIDE`.
    mounts : further mounts, each as ``SRC:DEST:ro``.

    Raises
    ------
    UsageError : the image has no Python.
    ToolFailed : the image does not start.
    """
    # Of this machine, the container gets only the network. Its variables, home folder and /tmp would change
    # what pip does.
    options = [*runtime.Isolation(network=True).options, "--pwd", "/"]
    for mount in (f"{folder}:{INSIDE}", *mounts):
        options += ["--bind", mount]
    arguments = ("exec", *options, str(image), "python3", "-s", f"{INSIDE}/{PROGRAM}")
    # What a killed process leaves is then in the workspace, which the next one removes.
    env = {**_passed(), "TMPDIR": str(folder)}
    try:
        runtime.run(
            runtime.find_runtime(), arguments, folder=Path("/"), env=env, on_line=report.line, log=log
        )
    except ToolFailed as error:
        if "executable file not found" not in (error.hint or ""):
            raise
        raise UsageError("the image has no python3", where=str(image), hint="another image") from error
    answer: dict[str, Any] = json_text.load(folder / "answer.json")
    return answer


def _passed() -> dict[str, str]:
    """Return the variables by which the runtime sets those of `PASSED` in a container.

    Apptainer reads ``APPTAINERENV_NAME``, and SingularityCE reads ``SINGULARITYENV_NAME``.
    """
    values = {}
    for name in PASSED:
        if os.environ.get(name):
            for prefix in ("APPTAINERENV", "SINGULARITYENV"):
                values[f"{prefix}_{name}"] = os.environ[name]
    return values


def _squash(root: Path, part: Path) -> None:
    """Write the folder `root` into the file `part` as a squashfs. Raise ToolMissing without mksquashfs."""
    program = mksquashfs.find_any()
    if program is None:
        raise ToolMissing("mksquashfs is not on this machine", hint=squash.INSTALL)
    # Not every build of mksquashfs can write zstd.
    compression = (
        ["-comp", "gzip"] if mksquashfs.zstd_error(program) else ["-comp", "zstd", "-Xcompression-level", "3"]
    )
    options = ["-noappend", "-no-progress", "-all-root", "-no-xattrs", *compression]
    process.run([program, root, part, *options, *mksquashfs.gather_limits().mksquashfs_options()])


def new_record(request: AddRequest, image: str, digest: str, answer: dict[str, Any]) -> PackagesRecord:
    """Return the record for the `answer` of ``inside.py``, without the id of the image and the digest.

    Parameters
    ----------
    image : the name of the image's file.
    digest : the digest of that file, as `record.image_digest` returns it.
    """
    packages = [AddedPackage(**package) for package in answer["packages"]]
    return PackagesRecord(
        imgkit=__version__,
        image=image,
        image_digest=digest,
        image_id="",
        arch=arch_of(answer["machine"]),
        python=answer["python"],
        arguments=request.arguments,
        packages=tuple(sorted(packages, key=lambda package: package.name.lower())),
        modules=tuple(sorted(set(answer["modules"]))),
    )
