"""Start an interactive job of a remote in this terminal. ssh gives salloc or qsub -I a terminal there.

The script of the job may contain values of variables. It cannot be sent through the standard input of that
ssh, which is the terminal. It cannot be sent in arguments, which other users of the login node can see. So
imgkit first writes it to a private file on the remote.
"""

from __future__ import annotations

import os
import shlex

from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.remote.connection import Connection

# Write the standard input to a new file, and print the name of the file. mktemp makes the file private. A
# file that is an hour old is removed: its job was never started, because ssh could not connect.
_WRITE = """\
cd -- "$folder" || exit 1
find . -maxdepth 1 -name '.interactive.*' -mmin +60 -exec rm -f {} +
file=$(mktemp .interactive.XXXXXXXXXX) && cat > "$file" && echo "$file"
"""
# The first lines of the job's script. They remove the file of the script itself, and renew the times of the
# image and the code, so that `gc` keeps both. The job has no id yet, so it has no note by which
# `gc.find_superseded` would keep its image. Instead, a second hard link to the .sif keeps the image until the
# script ends. On a file system without hard links, the image is removed after two later images of the
# project.
_START = """\
rm -f -- "$0"
cd -- {folder} || exit 1
for file in {files}; do
    touch -c -- "$file" 2> /dev/null
    if [ ! -e "$file" ]; then
        echo "$file has been removed meanwhile; run the command again to send it" >&2
        exit 1
    fi
done
image={image}
link=${{image%/*}}/.interactive.$$
case $image in images/*) ln -- "$image" "$link" 2> /dev/null && trap 'rm -f -- "$link"' EXIT ;; esac
"""


def interactive_argv(connection: Connection, job: Job, script: Script) -> Argv:
    """Write `script` to a file on the remote, and return the argv that runs the file in this terminal.

    Raises
    ------
    Cut, ScriptFailed : the remote cannot be reached, or the file cannot be written.
    """
    folder = str(job.directory)
    script_bytes = os.fsencode(_script_text(job, script))
    answer = connection.answer(connection.stream(_WRITE, {"folder": folder}, data=[script_bytes]))
    file_name = answer.decode().strip()
    return connection.interactive(("bash", f"{folder}/{file_name}"))


def _script_text(job: Job, script: Script) -> str:
    """Return the text of the file for `script`.

    The first lines check that the image and the code still exist. Then the values of the user's variables are
    exported.
    """
    # `_START` changes to this folder, so paths in it are relative.
    folder = str(job.directory)
    image = job.container.image.removeprefix(f"{folder}/")
    used_paths = [image]
    if job.container.code_folder:
        used_paths.append(job.container.code_folder.removeprefix(f"{folder}/"))
    lines_before = _START.format(
        folder=shlex.quote(folder), files=shlex.join(used_paths), image=shlex.quote(image)
    )
    for name in job.container.names:
        lines_before += f"export {name}={shlex.quote(os.environ[name])}\n"
    return lines_before + script.text
