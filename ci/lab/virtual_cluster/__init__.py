"""A small virtual cluster on one Linux machine, for tests of launch scripts.

Every "node" is a set of namespaces (pid, net, uts, ipc, mount) with its own host name, address, /etc, /run,
/dev/shm, /proc and /sys, joined to the others by a bridge. All file systems besides these are the machine's
own, so they act as the cluster's shared storage. The nodes have no route to the outside.

One process, the keeper, is the parent of all nodes; the nodes die with it (parent-death signal), and all
processes of a node die with the node's first process (pid namespace). So `down` needs to end one process,
known by its pid and start time, and nothing can stay behind. With --die-with PID the cluster also goes down
by itself when that process (a test session) ends.

With `up --debian SUITE`, the Slurm of another Debian release lies over the nodes' /usr, or with --no-slurm
its Open MPI and MPICH. ci/lab/unpack fetches them once. The rest, such as Python and singularity, stays this
machine's own.

Only the standard library is used: the cluster runs before there is a virtual environment.
"""
