"""Clusters over ssh: what is there, what has to move, and the jobs that run there.

``config`` is the list of remotes, ``connection`` runs a script on one, and ``check`` reports on it. ``store``
is imgkit's folder there. ``transfer`` moves a file into it, ``code`` chooses what of a folder has to
move, ``jobs`` submits and follows, ``fetch`` brings a run back. On the cluster all of it is POSIX sh,
coreutils, find, tar and the scheduler: nothing is installed.
"""
