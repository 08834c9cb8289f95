"""Clusters over ssh: what is there, what has to move, and the jobs that run there.

``config`` is the list of remotes, ``connection`` runs a script on one, and ``check`` reports on it. ``store``
is imgkit's folder there. ``rsync`` runs rsync over the same connection: ``transfer`` sends a file or a folder
into the store, ``code`` the code of a job, and ``fetch`` brings a run back. ``jobs`` submits and follows. The
cluster needs POSIX sh, coreutils, find, rsync and the scheduler; imgkit installs nothing there.
"""
