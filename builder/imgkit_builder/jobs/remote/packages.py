"""Packages for an image on a remote: pip runs there, and the file stays beside the image."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.jobs import added_packages
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.runtimes.base import Runner
from imgkit_builder.packages import add, failures, record
from imgkit_builder.packages.add import INSIDE, PASSED, PROGRAM, AddRequest
from imgkit_builder.packages.record import PackagesRecord
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed, UsageError

ScriptRunner = Callable[[str, Iterable[str], Iterable[bytes]], bytes]
"""Runs a script of sh on the remote with arguments and a standard input, and returns its output."""
_END_BYTES = 1 << 20

# Arguments: the new file, the image, the runtime's program, the text of `inside.py`, and modules. Prints the
# folder in which the squashfs is ready, its digest, and the answer of `inside.py`; of a failure only that.
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
# Arguments: the folder that `_INSTALL` printed, and the new file. Appends the standard input.
_PUBLISH = """\
cat >> "$1/out" && mv -f -- "$1/out" "$2"
code=$?
chmod -R u+w "$1"
rm -rf -- "$1"
exit "$code"
"""
# Arguments: the new file. It contains the standard input.
_WRITE = 'umask 077; cat > "$1.part" && mv -f -- "$1.part" "$1"\n'


def bring(job: Job, image_id: str, run: Runner, script: ScriptRunner, report: Reporter) -> Job:
    """Return `job` with its packages on the remote, after sending or making what is not there.

    Raises
    ------
    ImgkitError : a file does not fit the image, or the packages cannot be installed there.
    """
    job = added_packages.with_packages(job)
    if not job.container.packages:
        return job
    digest = runtime_of(job).image_digest(job, run)
    requested, image = job.request.container, job.container.image
    # What lies beside an image in the store goes with it.
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
    """Return the path on the remote and the record of a file that is there, or here and is then sent."""
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
    """Return the path and the record of the file with the packages of imgkit.toml; make it once."""
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
