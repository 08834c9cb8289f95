"""Add packages to an image on a remote.

pip runs in the image on the login node, and the file with the packages stays beside the image there. Later
jobs with the same requirements find it. A file that is on this machine is sent instead.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.jobs import added_packages
from imgkit_builder.jobs.job import Job, Runner
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.packages import add, failures, record
from imgkit_builder.packages.add import INSIDE, PASSED, PROGRAM, AddRequest
from imgkit_builder.packages.record import PackagesRecord
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed, UsageError

ScriptRunner = Callable[[str, Iterable[str], Iterable[bytes]], bytes]
"""A function that runs a script of sh on the remote with arguments and a standard input.

It returns the output of the script.
"""
# Bytes at the end of a file that are read from the remote to find the record in them.
_END_BYTES = 1 << 20

# Make the squashfs. The arguments are the new file, the image, the runtime's program, the text of
# `inside.py`, and the modules to load. The standard input is the order for `inside.py`. The script prints the
# folder in which the squashfs is ready, the digest of the squashfs, and the answer of `inside.py`. If pip
# failed, it prints only the answer. For mksquashfs, PATH is extended by the folder in which Apptainer has its
# own programs.
_INSTALL = (
    """\
umask 077
target=$1 image=$2 program=$3 source=$4
shift 4
"""
    + FIND_PROGRAM
    + f"""\
if [ $# -gt 0 ]; then
    PATH=$(bash -lc 'module load "$@" > /dev/null 2>&1; echo; echo "$PATH"' bash "$@" < /dev/null | tail -n 1)
fi
folder=$(mktemp -d "${{target%/*}}/.packages.XXXXXX") || exit 1
trap 'chmod -R u+w "$folder"; rm -rf "$folder"' EXIT
printf '%s' "$source" > "$folder/{PROGRAM}"
cat > "$folder/order.json" || exit 1
for name in {" ".join(PASSED)}; do
    eval "value=\\${{$name-}}"
    if [ -n "$value" ]; then export "APPTAINERENV_$name=$value" "SINGULARITYENV_$name=$value"; fi
done
(cd / && "$program" --quiet exec --containall --no-home --pwd / --bind "$folder:{INSIDE}" "$image" \\
    python3 -s {INSIDE}/{PROGRAM} > "$folder/log" 2>&1 < /dev/null) \\
    || {{ tail -n 5 "$folder/log" >&2; exit 1; }}
if [ -d "$folder/root" ]; then
    PATH=$PATH:/usr/sbin:/sbin:$(dirname "$(command -v "$program")")/../libexec/apptainer/bin
    mksquashfs "$folder/root" "$folder/out" -noappend -no-progress -all-root -no-xattrs -processors 4 \\
        > "$folder/log" 2>&1 || {{ tail -n 5 "$folder/log" >&2; exit 1; }}
    trap - EXIT
    echo "$folder"
    sha256sum < "$folder/out"
fi
cat "$folder/answer.json"
"""
)
# Append the standard input, which is the record, to the squashfs, and give the file its name. The arguments
# are the folder that `_INSTALL` printed, and the new file.
_PUBLISH = """\
cat >> "$1/out" && mv -f -- "$1/out" "$2"
code=$?
chmod -R u+w "$1"
rm -rf -- "$1"
exit "$code"
"""
# Write the standard input into a new file, whose path is the argument. It gets its name when it is complete.
_WRITE = 'umask 077; cat > "$1.part" && mv -f -- "$1.part" "$1"\n'


def bring(job: Job, image_id: str, run: Runner, script: ScriptRunner, report: Reporter) -> Job:
    """Return `job` with its packages on the remote, after sending or making the files that are missing.

    Parameters
    ----------
    image_id : the id of the image, for which the packages must have been made; empty if it is unknown.
    run : runs a command on the remote.
    script : runs a script on the remote.

    Raises
    ------
    ImgkitError : a file was made for another image, or the packages cannot be installed there.
    """
    job = added_packages.with_packages(job)
    if not job.container.packages:
        return job
    digest = runtime_of(job).image_digest(job, run)
    requested, image = job.request.container, job.container.image
    # A file beside an image in the store is removed together with the image. For other images, the file is in
    # the job's folder.
    folder = posixpath.dirname(image)
    if not image.startswith(f"{job.directory}/images/"):
        folder = str(job.directory)
    records = []
    if requested.packages:
        for path in requested.packages:
            records.append(_bring_file(path, folder, script, report))
    else:
        name = added_packages.file_name(image, requested.requirements, digest)
        records.append(_make(job, f"{folder}/{name}", digest, script, report))
    record.refuse_unfit(records, image=image, digests=[digest, image_id])
    added_packages.refuse_unseen(job, [stored for _, stored in records])
    return job.with_container(packages=tuple(path for path, _ in records))


def _bring_file(path: str, folder: str, script: ScriptRunner, report: Reporter) -> tuple[str, PackagesRecord]:
    """Return the path on the remote and the record of the file with packages `path`.

    A file on this machine is sent to `folder` on the remote, if it is not there yet. A path that does not
    exist here is one on the remote.
    """
    if not Path(path).exists():
        end = script('tail -c "$2" -- "$1"\n', (path, str(_END_BYTES)), ())
        return path, record.parse_end(end, path)
    stored = record.read(Path(path))
    target = f"{folder}/{stored.squashfs_sha256}.sqsh"
    if script('if [ -e "$1" ]; then echo there; fi\n', (target,), ()) == b"":
        report.note(f"to send: packages: {path}")
        with files.open_regular(Path(path)) as stream:
            script(_WRITE, (target,), iter(lambda: stream.read(files.CHUNK_BYTES), b""))
    return target, stored


def _make(
    job: Job, target: str, digest: str, script: ScriptRunner, report: Reporter
) -> tuple[str, PackagesRecord]:
    """Return the path on the remote and the record of the file with the packages of the job's requirements.

    The file `target` is made by the first job that needs it.

    Parameters
    ----------
    digest : the digest of the image, for the record.

    Raises
    ------
    UsageError : the login node cannot run the image.
    ImgkitError : pip failed, or the answer cannot be read.
    """
    there = script('if [ -e "$1" ]; then tail -c "$2" -- "$1"; fi\n', (target, str(_END_BYTES)), ())
    if there:
        return target, record.parse_end(there, target)
    image, requirements = job.container.image, job.request.container.requirements
    runtime = runtime_of(job)
    report.stage(f"pip in {job.recipe.name}, there")
    program = runtime.program(job.recipe)
    arguments = (target, image, program, add.program_source().decode(), *runtime.modules(job))
    try:
        output = script(_INSTALL, arguments, [add.order(requirements)]).decode(errors="replace")
    except ToolFailed as error:
        # "the image's architecture (arm64) could not run on the host's (amd64)"
        if "could not run on the host" not in f"{error.what} {error.hint}":
            raise
        command = shlex.join(("imgkit", "add", *requirements, "--image", image, "-o", target))
        raise UsageError(
            "the login node cannot run the image, which is for another processor",
            where="packages",
            hint=f"on a node: srun --nodes 1 --ntasks 1 {command}; then --packages {target}",
        ) from error
    # The answer of `inside.py` is a JSON object. The folder and the digest before it have no brace.
    head, _, text = output.partition("{")
    try:
        answer = json_text.parse("{" + text)
        if "failure" in answer:
            raise failures.explain(answer, image=Path(image), requirements=requirements, log="")
        folder, squashfs_sha256, *_ = head.split()
    except ValueError as error:
        raise ToolFailed(f"the answer of the image cannot be read: {error}", where=image) from error
    request = AddRequest(requirements=requirements)
    stored = add.new_record(request, PurePosixPath(image).name, digest, answer)
    script(_PUBLISH, (folder, target), [record.to_bytes(stored, squashfs_sha256)])
    return target, stored
