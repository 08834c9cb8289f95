"""imgkit's folder on a remote ("the store"), and its content.

::

    images/IMAGE-ROOT/image.sif     a complete .sif. IMAGE is the image's id, ROOT the start of the digest of
                                    its root partition
    images/IMAGE-ROOT/image.json    the description of the image, a `RemoteImage`
    code/DIGEST/                    a folder of code, which jobs copy
    data/DIGEST-PROJECT/            a folder of data, which all runs of a project mount
    runs/NAME-ID/                   the files of a job
    jobs/ID                         the paths that a job uses, for `gc`

Each image has its own folder, because rsync finds an older version of a file only under the same name. A
folder whose name has no leading dot is complete, because it got its name by a single rename.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM, Connection, unreadable_answer
from imgkit_builder.jobs.systems import pods
from imgkit_builder.sif import image
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

FOLDERS = ("images", "code", "data")
"""The folders in the store into which imgkit sends files."""
SIF = "image.sif"
"""Name of the .sif in the folder of an image, whatever its name is on the machine that sent it."""
IMAGE_JSON = "image.json"
"""Name of the file beside the .sif that describes the image."""
Answer = Mapping[str, Sequence[str]]
"""The values in the answer of a script on a remote, by key: ``{"home": ["/scratch/me"], ...}``."""
IMAGE_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{12}")
"""The name of an image's folder. The name of a data folder has the same form."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DESCRIPTION_SIZE = re.compile(r"\d{1,9}", re.ASCII)
_DESCRIPTION_SCHEMA = 1
_MAX_DESCRIPTION_BYTES = 1 << 16
"""Largest size of an `IMAGE_JSON` that is read. With 500 layers, it has 40 kB."""
_DF_NUMBERS = re.compile(r"\s\d+\s+\d+\s+(?P<free_kib>-?\d{1,15})\s+(?:\d+%|-)\s")
"""The numbers in a line of ``df -Pk``: size, used space, free space and use.

The free space can be negative.
"""

FIND_OWNER = """\
owner=
if [ -e "$folder" ] && [ ! -O "$folder" ]; then
    owner=$(find -H "$folder" -maxdepth 0 -printf %u) && echo "owner $owner"
fi
"""
"""Lines of a script that print the owner of ``$folder`` if the folder belongs to another user.

That user could replace the files that this user's jobs execute.
"""

FIND_VOLUME = """\
if [ -n "$volume" ]; then
    volume=$(cd -- "$volume" && pwd -P) 2> /dev/null
else
    volume=$(stat -c %m . 2> /dev/null)
fi
echo "volume $volume"
echo "ids $(id -u):$(id -g)"
"""
"""Lines of a script that print the root of the volume with the current folder, and the ids of the user.

Pods need the root to find the files on the volume, and the ids to be allowed to read them.
"""

# The script that lists the store. The code and the output of a run may be private, so the umask keeps other
# users out of all new folders. The script renews the time of the code's folder, which tells `imgkit remote
# gc` that the folder is in use. If the code is missing, the script creates the folder that will receive it,
# which saves a round trip after each edit of the code.
_LIST_STORE = (
    FIND_PROGRAM
    + """\
umask 077
mkdir -p -- "$folder" || exit 1
"""
    + FIND_OWNER
    + f"""\
if [ -n "$owner" ]; then echo end; exit 0; fi
cd -- "$folder" && mkdir -p {" ".join(FOLDERS)} runs jobs || exit 1
echo "home $(pwd -P)"
"""
    + FIND_VOLUME
    + f"""\
if command -v "$program" > /dev/null 2>&1; then echo "program there"; fi
ls -t code | sed 's/^/code /'
touch -c -- "code/$code" 2> /dev/null
if [ -n "$code" ] && [ ! -e "code/$code" ] && mkdir -p code/.incoming; then
    if mkdir -- "code/.incoming/$code" 2> /dev/null; then echo "incoming $code"; fi
fi
ls -t data | sed 's/^/data /'
ls -t images | while IFS= read -r name; do
    description=images/$name/{IMAGE_JSON}
    if [ -f "images/$name/{SIF}" ] && size=$(wc -c < "$description"); then
        echo "image $((size)) $name"
        cat "$description"
    fi
done
echo end
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteImage:
    """The description of an image in a store: the content of the file `IMAGE_JSON` beside its .sif."""

    image_id: str
    """``sha256:...``, the digest of the image's configuration.

    For an image that imgkit did not build, it is the digest of the root partition.
    """
    root_sha256: str
    """Hex digest of the root partition."""
    root_offset: int
    """Position in the .sif, in bytes, at which the root partition begins."""
    root_bytes: int
    """Size of the root partition."""
    sif_bytes: int
    arch: str
    diff_ids: tuple[str, ...] = ()
    """``sha256:...`` of each layer, the lowest layer first.

    It is empty for an image that imgkit did not build.
    """
    title: str = ""
    """The file name of the .sif on the machine that sent it, such as ``letters.sif``."""
    input_sha256: str = ""
    """Digest of the build's input if `imgkit run` built the image.

    It is empty for a .sif that the user named.
    """
    project: str = ""
    """The host and folder of the project whose job sent the image."""

    @property
    def name(self) -> str:
        """The name of the image's folder in ``images``."""
        return f"{self.image_id.removeprefix('sha256:')}-{self.root_sha256[:12]}"

    @property
    def path(self) -> str:
        """The path of the .sif, relative to imgkit's folder."""
        return f"images/{self.name}/{SIF}"

    def to_json(self) -> bytes:
        """Return the content of the image's file `IMAGE_JSON`."""
        return json.dumps({"schema": _DESCRIPTION_SCHEMA, **dataclasses.asdict(self)}).encode() + b"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The content of imgkit's folder on a remote."""

    home: str
    """Absolute path of imgkit's folder on the remote."""
    has_program: bool
    """Whether the remote has the scheduler's program."""
    images: tuple[RemoteImage, ...]
    """The images. The image that was changed last comes first."""
    code: tuple[str, ...]
    """Digests of the folders of code. The folder that was used last comes first."""
    data: tuple[str, ...] = ()
    """Names of the data folders. The folder that was used last comes first."""
    incoming_code: str = ""
    """Digest of the code for which `open_store` has created an empty folder in ``code/.incoming``, or ""."""
    volume: str = ""
    """Absolute path of the root of the volume with imgkit's folder, or "" if the remote cannot find it."""
    ids: str = ""
    """``UID:GID`` of the user on the remote."""

    def find_image(self, image_id: str, root_sha256: str = "") -> RemoteImage | None:
        """Return the newest image with this id, or None if the store has no such image.

        If `root_sha256` is not empty, the root partition of the image must have this digest too.
        """
        for stored in self.images:
            if stored.image_id == image_id and root_sha256 in ("", stored.root_sha256):
                return stored
        return None

    def find_built(self, input_sha256: str) -> RemoteImage | None:
        """Return the newest image that was built from the input with this digest, or None if there is none.

        If `input_sha256` is empty, the result is None.
        """
        if not input_sha256:
            return None
        for stored in self.images:
            if stored.input_sha256 == input_sha256:
                return stored
        return None

    def closest_image(self, new: RemoteImage) -> RemoteImage | None:
        """Return the stored image that is most similar to `new`, or None if no image is similar.

        rsync needs to send only the blocks that differ from this image. The image with the most layers in
        common with `new` is chosen. Among images with equally many common layers, an image with the same
        title is preferred. An image of another architecture, or without a common layer and the same title, is
        not similar.
        """
        closest = None
        # The number of common layers, and whether the titles are equal. Python compares the first values of
        # two tuples first.
        closest_similarity = (0, False)
        for stored in self.images:
            if stored.arch != new.arch:
                continue
            common_layers = set(stored.diff_ids) & set(new.diff_ids)
            similarity = (len(common_layers), stored.title == new.title)
            if similarity > closest_similarity:
                closest, closest_similarity = stored, similarity
        return closest


def describe_sif(path: Path, *, input_sha256: str = "", project: str = "") -> RemoteImage:
    """Return the description of the local .sif `path`. It is stored beside the .sif on a remote.

    A .sif that another tool built has no image id. It gets the digest of its root partition as its id.

    Parameters
    ----------
    input_sha256 : digest of the build's input if imgkit built the image for this job, or "".
    project : the host and folder of the project whose job sends the image.

    Raises
    ------
    CheckFailed : the file is not a .sif, or has no root partition.
    """
    sif = image.read(path)
    root = sif.require_root()
    image_id, root_sha256 = image.identify(path, sif)
    return RemoteImage(
        image_id=image_id,
        root_sha256=root_sha256,
        root_offset=root.offset,
        root_bytes=root.size_bytes,
        sif_bytes=sif.size_bytes,
        arch=sif.arch,
        diff_ids=sif.record.diff_ids if sif.record else (),
        title=path.name,
        input_sha256=input_sha256,
        project=project,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedPaths:
    """The paths that a job uses in the store.

    The file ``jobs/ID`` contains them, one on each line, so that `gc` does not remove them.
    """

    system: str
    """The system that took the job."""
    job_name: str
    stored_paths: tuple[str, ...]
    """Paths of the image, code and data in imgkit's folder: ``("images/.../image.sif", "code/...")``."""
    run: str = ""
    """Name of the run folder, or "" for ``NAME-ID``. A resumed job uses the folder of an earlier job."""

    @classmethod
    def of_job(cls, job: Job, run_name: str) -> UsedPaths:
        """Return the paths that `job` uses.

        Parameters
        ----------
        run_name : the name of its run folder, or "" for ``NAME-ID``.
        """
        store_prefix = f"{job.directory}/"
        container = job.container
        paths = []
        # Pods pull their image, so it has no path. An image outside of the store keeps its absolute path,
        # because the submission checks that the file still exists.
        if container.image.startswith("/"):
            paths.append(container.image.removeprefix(store_prefix))
        data_folders = [mount.source for mount in container.data]
        for path in (container.code_folder, *data_folders):
            # Data outside of the store is left out, because `gc` never removes it.
            if path.startswith(store_prefix):
                paths.append(path.removeprefix(store_prefix))
        return cls(system=job.system, job_name=job.name, stored_paths=tuple(paths), run=run_name)

    @classmethod
    def parse(cls, lines: Sequence[str]) -> UsedPaths:
        """Parse the lines of a file ``jobs/ID``.

        If the file is cut short, missing lines count as empty.
        """
        # The two empty texts stand for the lines that an empty file lacks.
        system, job_name, *paths = [*lines, "", ""]
        run = ""
        stored_paths = []
        for path in paths:
            if path.startswith("runs/"):  # only a resumed job names its run folder
                run = path.removeprefix("runs/")
            elif path:
                stored_paths.append(path)
        return cls(system=system, job_name=job_name, stored_paths=tuple(stored_paths), run=run)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the image, code and data: ``images/NAME`` instead of ``images/NAME/image.sif``."""
        return tuple(path.removesuffix(f"/{SIF}") for path in self.stored_paths)

    def run_name(self, job_id: str) -> str:
        """Return the name of the job's run folder in ``runs``."""
        return self.run or f"{self.job_name}-{job_id}"

    def lines_after_system(self) -> str:
        """Return the text of the file ``jobs/ID`` without its first line, which contains the system."""
        lines = [self.job_name, *self.stored_paths]
        if self.run:
            lines.append(f"runs/{self.run}")
        return "\n".join(lines)


def open_store(connection: Connection, *, program: str, code: str = "") -> Store:
    """Return the content of imgkit's folder on the remote. If the folder does not exist, create it.

    The script on the remote also renews the time of the code that the job uses, so that `imgkit remote gc`
    keeps it. A single script does all this, which saves round trips.

    Parameters
    ----------
    program : the scheduler's program, such as ``sbatch``. The result says whether the remote has it.
    code : digest of the code that the job uses, or "" for a job without code.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or the folder cannot be created.
    ToolFailed : the answer of the remote is cut short.
    UsageError : the folder belongs to another user, or its path cannot be used in a job.
    """
    remote = connection.remote
    script_variables = {"folder": remote.folder, "program": program, "code": code, "volume": remote.volume}
    output = connection.run(_LIST_STORE, script_variables)
    return parse_store(output, remote)


def parse_store(output: bytes, remote: Remote) -> Store:
    """Return the content of the store, which is imgkit's folder on a remote.

    `output` is what the script `_LIST_STORE` prints there, which `open_store` runs. Folders with
    names that imgkit does not use, and images with a damaged description, are left out.

    Raises
    ------
    ToolFailed : the output is cut short, or is not the output of imgkit's script.
    UsageError : the folder belongs to another user, or its path cannot be used in a job.
    """
    answer, descriptions = _parse_answer(output, remote)
    home = first_value(answer, "home")
    # If the folder belongs to another user, the script prints only the owner.
    owner = first_value(answer, "owner")
    # With two such lines, the path itself contains a line break and a line that begins with "home ".
    has_line_break = len(answer.get("home", ())) > 1
    if not owner and (not home or has_line_break):
        raise unreadable_answer(remote.name, output)
    error = home_error(home, owner, remote)
    if error is not None:
        raise error
    return Store(
        home=home,
        has_program="program" in answer,
        images=tuple(_parse_images(descriptions)),
        code=tuple(filter(_DIGEST.fullmatch, answer.get("code", ()))),
        # The names of data folders have the same form as those of images.
        data=tuple(filter(IMAGE_NAME.fullmatch, answer.get("data", ()))),
        incoming_code=first_value(answer, "incoming"),
        volume=first_value(answer, "volume"),
        ids=first_value(answer, "ids"),
    )


def first_value(answer: Answer, key: str) -> str:
    """Return the value of the first line with this key, or "" if the answer has no such line."""
    if key not in answer:
        return ""
    return answer[key][0]


def _parse_images(descriptions: Mapping[str, bytes]) -> Iterator[RemoteImage]:
    """Yield the images in the store, without those whose description is damaged.

    Parameters
    ----------
    descriptions : the content of `IMAGE_JSON` by the name of the image's folder.
    """
    for folder_name, description in descriptions.items():
        stored = _parse_description(description)
        # The name is made of the digests in the description. A folder with another name may have been copied
        # or edited by hand, so it is left out.
        if stored is not None and stored.name == folder_name:
            yield stored


def home_error(home: str, owner: str, remote: Remote) -> UsageError | None:
    """Return the error if jobs cannot use imgkit's folder on the remote, or None if they can.

    A folder of another user is refused, because that user could replace the files that the jobs execute. A
    path with characters that a job script cannot contain is refused as well.

    Parameters
    ----------
    home : the folder's absolute path on the remote, without symbolic links.
    owner : the user to whom the folder belongs. It is empty if that is this user.
    """
    if owner:
        command = _replace_command(remote, f"{remote.folder}/YOU")
        return UsageError(
            f"{remote.folder} belongs to {owner}, who could replace what your jobs run",
            where=remote.name,
            hint=f"a folder of your own, for example below it: {command}",
        )
    # Bytes of the path that are not UTF-8 were decoded as U+FFFD. A script with U+FFFD would use another
    # folder, so such a path must be refused. For that, U+FFFD is replaced by a character that no path in a
    # job may contain.
    checked_path = home.replace("\N{REPLACEMENT CHARACTER}", "\0")
    try:
        # Only to see whether the path is refused. The error of this function names the remote instead of a
        # flag.
        quoting.check_flag_value("--directory", checked_path)
    except UsageError as error:
        return UsageError(
            f"{home!r}, the folder's real path, cannot be used in a job",
            hint=f"{error.hint}; another folder: {_replace_command(remote, '/PATH')}",
        )
    return None


def pod_folder(remote: Remote, home: str, volume: str) -> str:
    """Return the path at which pods see imgkit's folder, which is on a volume that they mount.

    For example, the volume is ``/mnt/v`` on the remote and ``/data`` in the pods. Then ``/mnt/v/me`` ->
    ``/data/me``.

    Parameters
    ----------
    home : the absolute path of imgkit's folder on the remote, without symbolic links.
    volume : the path of the volume's root on the remote. It is empty if the user has named a root that does
        not exist.

    Raises
    ------
    UsageError : the folder is not on a volume.
    """
    claim = pods.parse_claim(remote.pvc)
    add_command = f"imgkit remote add {remote.name} {remote.address}:/DIR --pvc {remote.pvc} --replace"
    if not volume:
        raise UsageError(
            f"{remote.address} has no folder {remote.volume}, the root of the volume {claim.name}",
            where=remote.name,
            hint=f"{add_command} --volume /PATH",
        )
    if volume == "/" and not remote.volume:
        raise UsageError(
            f"{home} is on the root file system of {remote.address}, and not on a volume of pods",
            where=remote.name,
            hint=f"{add_command}; if it is on the volume {claim.name}: --volume /PATH, "
            "that of the volume there",
        )
    path = PurePosixPath(home)
    if not path.is_relative_to(volume):
        raise UsageError(
            f"{home} is not below {volume}, where {remote.address} has the volume {claim.name}",
            where=remote.name,
            hint=add_command,
        )
    return str(claim.path / path.relative_to(volume))


def _replace_command(remote: Remote, folder: str) -> str:
    """Return the command by which the user chooses another folder on the remote."""
    return f"imgkit remote add {remote.name} {remote.address}:{folder} --replace"


def free_bytes(row: str) -> int | None:
    """Return the free space in a line of ``df -Pk``, or None if the line contains no numbers."""
    match = _DF_NUMBERS.search(row)
    if match is None:
        return None
    return int(match["free_kib"]) * 1024


def _parse_answer(output: bytes, remote: Remote) -> tuple[Answer, Mapping[str, bytes]]:
    """Split `output`, the answer of `_LIST_STORE`, into its values and the descriptions of images.

    Most lines are ``KEY VALUE``, such as ``home /scratch/me``. A line ``image SIZE NAME`` is followed by SIZE
    bytes, which are the content of the image's file `IMAGE_JSON`. The last line is ``end``. Without it, the
    answer is cut short.

    Returns
    -------
    The values by key, and the content of `IMAGE_JSON` by the name of the image's folder.

    Raises
    ------
    ToolFailed : the line ``end`` is missing, or the size of an image is not valid.
    """
    answer: dict[str, list[str]] = {}
    descriptions: dict[str, bytes] = {}
    stream = io.BytesIO(output)
    for raw_line in stream:
        if not raw_line.endswith(b"\n"):  # the answer is cut short within this line
            break
        line = raw_line.removesuffix(b"\n").decode(errors="replace")
        key, _, value = line.partition(" ")
        if key == "end":  # only this line shows that the answer is complete
            return answer, descriptions
        if key != "image":
            answer.setdefault(key, []).append(value)
            continue
        size, _, name = value.partition(" ")
        if not _DESCRIPTION_SIZE.fullmatch(size):
            break
        # This moves the stream behind the description, whose lines are not lines of the answer.
        descriptions[name] = stream.read(int(size))
    raise unreadable_answer(remote.name, output)


def _parse_description(text: bytes) -> RemoteImage | None:
    """Parse the content of a file `IMAGE_JSON`, which describes an image.

    If the text is damaged, or if another version of imgkit wrote it in another schema, the result is None.
    """
    try:
        fields = json_text.parse(text, most_bytes=_MAX_DESCRIPTION_BYTES)
        if fields.pop("schema") != _DESCRIPTION_SCHEMA:
            return None
        stored: RemoteImage = json_text.build_value(RemoteImage, fields, "it", closed=True)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return stored
