"""Remotes: clusters that imgkit reaches over ssh, the files that it keeps there, and its jobs there.

``config`` reads and writes the list of remotes. ``connection`` runs a script on a remote, and ``check``
reports whether a remote can be used. ``store`` describes imgkit's folder on a remote, ``gc`` removes unused
files from it, and ``packages`` adds packages to an image in it. ``rsync`` runs rsync over the same
connection. ``transfer`` uses it to send an image, code or data to the store, and ``fetch`` to copy a run
folder back. ``jobs`` submits a job and follows its output, and ``interactive`` starts an interactive job. The
cluster needs POSIX sh, coreutils, find, rsync and the scheduler. imgkit installs nothing there.
"""
