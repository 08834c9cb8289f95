"""Send a folder of code: one folder per digest on the remote, where equal files of earlier ones are linked.

A job binds its folder read-only. An edit makes another folder, so that it does not reach a job in the queue.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from imgkit_builder.base.progress import Reporter
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.remote import transfer
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.remote.store import Store

_SIMILAR = 3
"""Number of folders on the remote in which rsync looks for equal files."""


def upload(connection: Connection, code: CodeFolder, store: Store, report: Reporter) -> str:
    """Make the folder of `code` in the store unless it is there; return its path below the remote's folder.

    Raises
    ------
    UsageError : the folder changes while it is read.
    ToolMissing, ToolFailed, CheckFailed : as of the transfer.
    """
    target = f"code/{code.record.sha256}"
    if code.record.sha256 in store.code:
        report.note(f"to send: nothing of the code; {connection.remote.name} has that of {code.folder}")
        return target
    with tempfile.TemporaryDirectory(prefix="imgkit-") as work:
        # A copy: what rsync reads is what the digest names, even if somebody edits a file meanwhile.
        copy = Path(work, "code")
        code.tree.write(copy)
        sent = transfer.send_folder(
            connection,
            copy,
            label="code",
            size_bytes=code.tree.size_bytes,
            home=store.home,
            target=target,
            similar=store.code[:_SIMILAR],
            report=report,
        )
    report.note(f"sent: code{f': {sent}' if sent else ''}")
    return target
