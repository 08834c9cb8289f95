"""Remotes: clusters that ssh reaches, with the files that imgkit keeps there and the jobs that run there.

``config`` reads and writes the list of remotes, ``connection`` runs a script on one of them, and ``check``
reports on it. ``store`` is imgkit's folder there, ``gc`` removes unused files from it, and ``packages`` adds
packages to an image in it. ``rsync`` runs rsync over the same connection. With it, ``transfer`` sends an
image, code or data into the store, and ``fetch`` copies a run folder back. ``jobs`` submits a job and follows
its output, and ``interactive`` starts an interactive one. The cluster needs POSIX sh, coreutils, find, rsync
and the scheduler. imgkit installs nothing there.
"""
