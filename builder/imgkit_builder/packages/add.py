"""Install Python packages into a squashfs file that belongs to a .sif.

pip runs in the image, as the user who calls imgkit, and installs into a temporary folder on the machine that
has the image. The folder is packed as a squashfs, with a record of the packages at its end. Jobs mount the
squashfs into the image. The .sif itself does not change.

The script `machine.sh` carries out these steps. It runs on this machine or, over ssh, on a remote.
"""

from __future__ import annotations

import collections
import importlib.resources
import itertools
import json
import secrets
import shlex
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from imgkit_builder.base import process
from imgkit_builder.base.flags import option_field
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.image import members
from imgkit_builder.image.members import Code, TarMember
from imgkit_builder.oci.platform import arch_of
from imgkit_builder.packages import failures, record
from imgkit_builder.packages.record import AddedPackage, PackagesRecord
from imgkit_builder.recipe.requirements import PROTECTED
from imgkit_builder.sif import runtime
from imgkit_entrypoints import __version__, json_text, secret_patterns
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

INSIDE = "/run/imgkit/add"
"""Path in the container of the folder with ``inside.py``, its input (``request.json``) and its answer."""
# Files and folders of a project that pip does not need: version control, environments, earlier builds, runs
# and images.
_NOT_SENT = (".git", ".venv", "venv", "__pycache__", "build", "dist", "runs", "*.sif", "*.sqsh", "*.tar")
# The files that a remote gets from the folder of a requirements file. They include files beside it, because a
# line such as "-r base.txt" names one.
_REQUIREMENTS_FILES = ("*.txt", "*.in")

ScriptRunner = Callable[[str, Sequence[str], Iterable[bytes]], Generator[bytes, None, None]]
"""A function that runs a shell script with arguments and a standard input, and yields the script's output.

After its last byte, the standard input stays open until the script ends.
"""


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
    def path_options(self) -> dict[str, Path]:
        """Return the files and folders on this machine that decide what is installed, by option.

        For example, ``{"-r": Path("requirements.txt")}``.
        """
        paths = {"-r": self.requirements_file, "--project": self.project, "--wheels": self.wheels}
        return {option: path for option, path in paths.items() if path is not None}

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments that decide what is installed, such as ``("einops", "--replace", "numpy")``.

        They are stored in the record of the file. The image and the output file are not among them.
        """
        arguments = list(self.requirements)
        for option, path in self.path_options.items():
            arguments += (option, str(path))
        for name in self.replace:
            arguments += ("--replace", name)
        return tuple(arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedFile:
    """The result of `add`: a file with packages, and the image that it is for."""

    path: Path
    image: Path
    size_bytes: int
    record: PackagesRecord
    up_to_date: bool
    """Whether nothing was installed, because the file already had these packages for this image."""

    @property
    def exec_line(self) -> str:
        """Return a shell command that starts Python with the image and the packages, without imgkit."""
        target = record.mount_path(1)
        variables = f"--env PREPEND_PATH={target}/bin,PYTHONPATH={target}"
        bind = shlex.quote(f"{self.path}:{target}:image-src=/,ro")
        return f"singularity exec --bind {bind} {variables} {shlex.quote(str(self.image))} python3 ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMachine:
    """The machine that has the image: this machine or a remote."""

    run: ScriptRunner
    program: str
    """The name or path of the container runtime on that machine, such as ``apptainer``."""
    modules: tuple[str, ...] = ()
    """The environment modules to load before the runtime can be used."""
    remote: str = ""
    """Name of the remote, or empty for this machine."""


def this_machine() -> ImageMachine:
    """Return an `ImageMachine` for this machine, with the first runtime on PATH."""

    def run_script(script: str, args: Sequence[str], data: Iterable[bytes]) -> Generator[bytes, None, None]:
        return process.filter_through(("sh", "-c", script, "sh", *args), data, hold=True)

    installed_runtimes = [name for name in runtime.COMMANDS if shutil.which(name)]
    # If no runtime is installed, the first command is used. `machine.sh` then reports that it is missing.
    return ImageMachine(run=run_script, program=(*installed_runtimes, *runtime.COMMANDS)[0])


def add(
    request: AddRequest,
    report: Reporter = SILENT,
    *,
    machine: ImageMachine | None = None,
    image_id: str = "",
) -> AddedFile:
    """Install the packages of `request` into a new file, and return a description of the file.

    The file gets its name only when it is complete. If an error is raised, an older file is left unchanged.
    If an equal request has already made the file for the same image, nothing is installed. A request that
    reads files, such as a requirements.txt, is always carried out, because their content may have changed.

    Parameters
    ----------
    machine : the machine that has the image. None means this machine.
    image_id : the id of an image on another machine, if it is known. On this machine, it is read from the
        image.

    Raises
    ------
    UsageError : the request is not valid, does not fit the image, or the file cannot be written.
    ToolMissing : Singularity or mksquashfs is missing.
    ToolFailed : pip or mksquashfs failed, the disk is full, or a remote cannot be reached.
    """
    image = _choose_image_path(request, machine)
    _check_request(request)
    target = _choose_target_path(request, image, machine)
    if machine is None:
        machine = this_machine()
        image_id = record.read_image_id(image)
    steps = _Steps(request=request, machine=machine, image=image, target=target, token=secrets.token_hex(8))
    state = steps.read_state()
    existing = state.target_record
    if existing is not None:
        _refuse_other_arguments(existing, request, target)
        # The content of files can change. Then the same request installs something else.
        if existing.image_digest == state.image_digest and not request.path_options:
            return AddedFile(
                path=target, image=image, size_bytes=state.target_bytes, record=existing, up_to_date=True
            )
    with runtime.log_file(target.stem) as log:
        report.stage(f"pip in {image.name}")
        installation = steps.install(report, log)
    new_record = _make_record(steps, state, installation, image_id)
    new_bytes = steps.publish(new_record)
    return AddedFile(path=target, image=image, size_bytes=new_bytes, record=new_record, up_to_date=False)


def _refuse_other_arguments(existing: PackagesRecord, request: AddRequest, target: Path) -> None:
    """Raise UsageError if the file `target`, whose record is `existing`, is of another request."""
    if existing.arguments != request.arguments:
        raise UsageError(
            f"the file exists and holds {shlex.join(existing.arguments)}",
            where=str(target),
            hint=f"-o OTHER.sqsh, or: rm {shlex.quote(str(target))}",
        )


def _choose_image_path(request: AddRequest, machine: ImageMachine | None) -> Path:
    """Return the absolute path of the image to which packages are added, on the machine that has it.

    `machine` is the remote that has the image, or None for this machine.

    Raises
    ------
    UsageError : the request names no image, or a path on a remote is not absolute.
    """
    if request.image is None:
        packages = ", ".join(request.requirements) or "PACKAGE"
        raise UsageError(
            "packages are added beside an image that exists, and none is named",
            where="--image",
            hint=f"--image X.sif; or build them into an image, by its recipe: image: {{pip: [{packages}]}}",
        )
    hint = "the absolute path of an image there"
    return _make_absolute(request.image, machine, option="--image", hint=hint)


def _make_absolute(path: Path, machine: ImageMachine | None, *, option: str, hint: str) -> Path:
    """Return the absolute path of `path`, the value of an option, on the machine that has the image.

    `machine` is the remote that has the image, or None for this machine.

    Raises
    ------
    UsageError : a path on a remote is relative. It would depend on the folder in which ssh starts.
    """
    if machine is None:
        return path.absolute()
    if not path.is_absolute():
        raise UsageError(f"{str(path)!r} is not a path on the remote", where=option, hint=hint)
    return path


def _check_request(request: AddRequest) -> None:
    """Refuse a request whose packages, files or folders pip cannot install.

    A request with a secret in an argument is refused as well, because the file with the packages records the
    arguments.

    Raises
    ------
    UsageError : the request names no package, a requirement has the wrong form, an argument contains a
        secret, or a file or folder does not exist.
    """
    if not (request.requirements or request.requirements_file or request.project):
        raise UsageError("no package given", where="PACKAGE", hint="imgkit add einops --image X.sif")
    for text in request.requirements:
        check_requirement(text)
    # What a secret seems to be, such as a token. Empty if there is none.
    secret_kind = secret_patterns.find_secret_argument(request.arguments)
    if secret_kind:
        raise UsageError(
            f"it holds {secret_kind}, and the record of the file would show it",
            where="PACKAGE",
            hint="export PIP_INDEX_URL=..., which is not recorded",
        )
    for option, path in request.path_options.items():
        if not path.exists():
            raise UsageError("there is no such file or folder", where=f"{option} {path}")


def check_requirement(text: str) -> None:
    """Raise UsageError if `text` is not a requirement as PEP 508 defines it, such as ``omegaconf>=2.3``."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(text)
    except InvalidRequirement:
        hint = "NAME, or 'NAME>=2.3'"
        raise UsageError(f"{text!r} is not a requirement", where="PACKAGE", hint=hint) from None


def _choose_target_path(request: AddRequest, image: Path, machine: ImageMachine | None) -> Path:
    """Return the absolute path of the file to write, on the machine that has the image.

    The default for the image ``X.sif`` is ``X+N.sqsh`` in the same folder. N is the number of requirements on
    the command line, or 1 if there are none. `machine` is the remote that has the image, or None for this
    machine.

    Raises
    ------
    UsageError : the path has a character with which no runtime can mount it, or a path on a remote is not
        absolute.
    """
    count = len(request.requirements) or 1
    default = image.with_name(f"{image.stem}+{count}.sqsh")
    output = request.output or default
    hint = f"its absolute path there: -o {shlex.quote(str(image.parent / output.name))}"
    target = _make_absolute(output, machine, option="--output", hint=hint)
    if not record.is_mountable(str(target)):
        raise UsageError(
            f"no runtime can mount {str(target)!r}",
            where="--output",
            hint="-o FILE.sqsh with a path without colons, commas and quotes",
        )
    return target


class _FileState(NamedTuple):
    """The state of the image and of the file to write before the installation."""

    image_digest: str
    target_bytes: int = 0
    """The size of the file to write. It is 0 if the file does not exist yet."""
    target_record: PackagesRecord | None = None
    """The record in the file to write. None if the file does not exist yet."""


class _Installation(NamedTuple):
    """What pip has installed in the image."""

    answer: Mapping[str, Any]
    """The answer of ``inside.py``."""
    squashfs_sha256: str


class _SharedFolder(NamedTuple):
    """A folder of this machine that pip has to read in the container."""

    name: str
    """The name of the folder below `INSIDE` in the container."""
    path: Path
    patterns: Sequence[str]
    """Patterns for the names of the files that pip needs, such as ``*.txt``."""

    def list_members(self) -> Iterator[TarMember]:
        """Yield the files in the folder that match `patterns`, as members of a tar archive."""
        paths: set[Path] = set()  # a file may match several patterns
        for pattern in self.patterns:
            paths.update(self.path.glob(pattern))
        for path in sorted(paths):
            if path.is_file():
                name = f"{self.name}/{path.name}"
                yield TarMember(name=name, size_bytes=path.stat().st_size, source=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The steps of `machine.sh` for one call of `add`. Each method runs one step on the machine."""

    request: AddRequest
    machine: ImageMachine
    image: Path
    target: Path
    token: str
    """A random number. The script uses it to tell its own files and output from those of others."""

    def read_state(self) -> _FileState:
        """Read the state of the image and of the file to write.

        Raises
        ------
        UsageError : the image or the folder of the file cannot be used, or imgkit did not write the file.
        """
        output = b"".join(self._run_machine_step("look"))
        # The first line is "DIGEST  -", or "problem NAME" if the image or the folder cannot be used. If the
        # file to write exists, a line with its size and then its last bytes follow.
        first_line_bytes, _, target_output = output.partition(b"\n")
        first_line = first_line_bytes.decode()
        self._refuse_problem(first_line)
        image_digest, *_ = first_line.split()
        if not target_output:
            return _FileState(image_digest)
        size_line, _, end = target_output.partition(b"\n")
        target_record = record.parse_end(end, str(self.target))
        return _FileState(image_digest, target_bytes=int(size_line), target_record=target_record)

    def install(self, report: Reporter, log: TextIO) -> _Installation:
        """Run ``inside.py`` in the image, and pack what pip has installed as a squashfs.

        Raises
        ------
        UsageError : another process is writing the file, the image is for another processor, or it has no
            Python.
        ToolMissing : the machine has no runtime or no mksquashfs.
        ToolFailed : the image does not start, or pip or mksquashfs failed.
        """
        pip_lines: collections.deque[str] = collections.deque(maxlen=process.KEPT_LINES)
        lines = self._start_installation()
        try:
            # The token ends the output of pip. The next line is the answer of `inside.py`.
            for line in itertools.takewhile(lambda line: line != self.token, lines):
                self._refuse_problem(line)
                pip_lines.append(line)
                log.write(f"{line}\n")
                report.line(secret_patterns.mask_secrets(line))
            answer: dict[str, Any] = json_text.parse(next(lines, ""))
            if "failure" not in answer:
                report.stage("squash")
            digest_line = "".join(lines)  # "DIGEST  -", or nothing after a failure
        except ToolFailed as error:
            raise self._explain(error, "\n".join(pip_lines), log.name) from error
        except ValueError as error:
            message = f"the answer of the image cannot be read: {error}"
            raise ToolFailed(message, where=str(self.image), hint=f"full log: {log.name}") from error
        if "failure" in answer:
            raise failures.explain(
                answer,
                image=self.image,
                target=self.target,
                requirements=self.request.requirements,
                log=log.name,
                remote=self.machine.remote,
            )
        return _Installation(answer, squashfs_sha256=digest_line.partition(" ")[0])

    def _start_installation(self) -> Iterator[str]:
        """Return the output of the step ``install``, line by line. The step starts at the first line."""
        tar, mount_options = self._pack_inputs()
        modules = " ".join(self.machine.modules)
        args = (str(members.tar_size(tar)), self.machine.program, modules, *mount_options)
        output = self._run_machine_step("install", *args, data=members.tar_chunks(tar))
        return (line.decode(errors="replace") for line in process.split_lines(output))

    def publish(self, added: PackagesRecord) -> int:
        """Append the record to the squashfs, give the file its final name, and return its size in bytes."""
        record_bytes = record.to_bytes(added)
        size = str(len(record_bytes))
        try:
            output = b"".join(self._run_machine_step("publish", size, data=[record_bytes]))
        except ToolFailed as error:
            raise self._explain(error) from error
        # "problem NAME", or the size of the file
        answer = output.decode().strip()
        self._refuse_problem(answer)
        return int(answer)

    def _run_machine_step(
        self, step: str, *args: str, data: Iterable[bytes] = ()
    ) -> Generator[bytes, None, None]:
        """Run a step of `machine.sh` on the machine that has the image, and yield its output.

        Parameters
        ----------
        step : the step ``look``, ``install`` or ``publish``.
        args : the further arguments of this step, as the head of `machine.sh` lists them. All steps get the
            path of the image, the path of the file to write, and the token.
        data : the standard input of the step.
        """
        # `machine.sh` uses these two variables and this function of the shell.
        script_header = (
            f"inside={INSIDE} end_bytes={record.END_BYTES}",
            f"digest_of_image() {{ {record.digest_command('$image')}; }}",
        )
        script = "\n".join((*script_header, _read_source("machine.sh").decode()))
        return self.machine.run(script, (step, str(self.image), str(self.target), self.token, *args), data)

    def _refuse_problem(self, line: str) -> None:
        """Raise an error if `line` is a problem that `machine.sh` reports. Ignore any other line."""
        failures.refuse_problem(
            line, image=str(self.request.image), target=self.target, remote=self.machine.remote
        )

    def _explain(self, error: ToolFailed, output: str = "", log: str = "") -> ImgkitError:
        """Return the error to show for a failed step of `machine.sh`.

        `output` is what the container has printed, and `log` is the path of the file with all of it. Both are
        empty for a step that starts no container.
        """
        command = shlex.join(("imgkit", "add", *self.request.arguments, "--image", str(self.image)))
        return failures.explain_crash(
            error, output, image=self.image, target=self.target, command=command, log=log
        )

    def _pack_inputs(self) -> tuple[list[TarMember], list[str]]:
        """Return the input of pip in the container: members of a tar, and the runtime's mount options.

        The tar has ``inside.py``, the project, and ``request.json``, which says what to install. Folders with
        wheels or requirements files are mounted if the image is on this machine. A remote does not have these
        folders, so their files are added to the tar. pip finds all of this in the folder `INSIDE`.
        """
        request = self.request
        tar_members = [members.memory_file("inside.py", _read_source("inside.py"))]
        if request.project is not None:
            # The project is copied and not mounted, because a build writes into the folder.
            code = Code(source=request.project, context_folder="project", where="--project", ignore=_NOT_SENT)
            tar_members += members.collect_code([code], ()).members[code]
        mount_options: list[str] = []
        for folder in _list_shared_folders(request):
            # The folder in the tar is also the place at which the runtime mounts.
            tar_members.append(members.empty_folder(folder.name))
            if self.machine.remote:
                tar_members += folder.list_members()
            else:
                mount_options += ["--bind", f"{folder.path.absolute()}:{INSIDE}/{folder.name}:ro"]
        pip_request = json.dumps(_make_pip_request(request)).encode()
        tar_members.append(members.memory_file("request.json", pip_request))
        return tar_members, mount_options


def _make_record(
    steps: _Steps, state: _FileState, installation: _Installation, image_id: str
) -> PackagesRecord:
    """Return the record of the packages that `installation` has added to the image with the id `image_id`."""
    answer = installation.answer
    packages = [AddedPackage(**package) for package in answer["packages"]]
    return PackagesRecord(
        imgkit=__version__,
        image=steps.image.name,
        image_digest=state.image_digest,
        image_id=image_id,
        arch=arch_of(answer["machine"]),
        python=answer["python"],
        arguments=steps.request.arguments,
        packages=tuple(sorted(packages, key=lambda package: package.name.lower())),
        modules=tuple(sorted(set(answer["modules"]))),
        squashfs_sha256=installation.squashfs_sha256,
    )


def _list_shared_folders(request: AddRequest) -> Iterator[_SharedFolder]:
    """Yield the folders with wheels and requirements files that pip reads in the container."""
    if request.wheels is not None:
        yield _SharedFolder("wheels", request.wheels, ["*"])
    if request.requirements_file is not None:
        # Files beside it are shared as well, because it may refer to them (-r, -c).
        file = request.requirements_file.absolute()
        yield _SharedFolder("requirements", file.parent, [file.name, *_REQUIREMENTS_FILES])


def _make_pip_request(request: AddRequest) -> dict[str, object]:
    """Return the content of ``request.json``: what pip installs, with the paths in the container."""
    requirements = [*request.requirements]
    options: list[str] = []
    if request.wheels is not None:
        # Packages come only from this folder, and pip does not need a network.
        options = ["--no-index", "--find-links", f"{INSIDE}/wheels"]
    if request.requirements_file is not None:
        requirements += ["-r", f"{INSIDE}/requirements/{request.requirements_file.absolute().name}"]
    if request.project is not None:
        requirements.append(f"{INSIDE}/project")
    return {
        "requirements": requirements,
        "options": options,
        "replace": request.replace,
        "protected": PROTECTED,
    }


def _read_source(name: str) -> bytes:
    """Return the source code of ``inside.py`` or ``machine.sh``, which are sent to where they run."""
    return importlib.resources.files(__package__).joinpath(name).read_bytes()
