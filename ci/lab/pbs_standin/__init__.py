"""A stand-in for PBS and PALS on the virtual cluster: not PBS, but what a job script sees of it.

A job runs at once, on the first nodes; there is no queue, and the one limit is walltime. These properties of
PBS are reproduced, since job scripts go wrong over them (after the sources of OpenPBS 23.06.06, an OpenPBS of
2026, and job scripts of systems with PALS):

* Ids are SEQUENCE.SERVER, from 0 on; qstat and qdel take the number alone too.
* The script runs on the first host alone, in a login shell, with PBS' variables and none of the submitter's,
  in the home folder, with umask 077 (start_exec.c). Directives count up to the first command.
* The node file has a line for each of a chunk's mpiprocs, and is on the first host's own disk.
* OMP_NUM_THREADS and NCPUS are the chunk's ncpus. Without place=scatter all chunks are on one host.
* pbsdsh starts a task for each line of the node file. A task gets the script's PBS_* variables without
  PBS_NODEFILE, also PBS_ENVIRONMENT, NCPUS and TMPDIR (start_process). PBS_NODENUM is the index of its host,
  from 0; PBS_TASKNUM has 8 hexadecimal digits. It gets none of the script's own variables, modules and
  folder. Its output is the job's, not pbsdsh's. pbsdsh ends with 0 in any case (pbsdsh.c). It does not return
  from a host that is lost, and a signal does not end it while it waits (tcp_dis.c begins again after EINTR).
* The exit code of a script or task that a signal has ended is 256 and the signal's number (mom_start.c).
* mpiexec hands environment and folder on, sets PALS_* and PMI_* (no PALS_SIZE), and ends all ranks with the
  first that fails.
* The job's output is brought to the folder of qsub when the job ends, in NAME.oSEQUENCE, and without -j oe in
  NAME.eSEQUENCE too. The output of a subjob ends in .INDEX.
* A task of pbsdsh has PATH=/bin:/usr/bin.
* qsub -J FIRST-LAST[:STEP] makes an array job SEQUENCE[].SERVER; its subjobs SEQUENCE[INDEX].SERVER have
  PBS_ARRAY_INDEX and PBS_ARRAY_ID. The exit status of the array is 1 if a subjob has another one than 0.
* walltime ends the job as qdel does, with exit status -29.
* qstat of a job that has ended fails with 35 and asks for -x; with -x and -f it prints the exit status.
* qdel signals the sessions on the first host alone: TERM, and KILL after kill_delay. When the script has
  ended, every session of the job gets KILL (catch_child.c, kill_job). Processes that ssh started stay.

What differs from OpenPBS 23.06.06 all the same: kill_delay is 3 s, not 10; nothing is queued, held or run
again; chunks are given whole hosts; a program that ends with 129 to 159 by itself counts as ended by a
signal; a job whose host is lost ends when its script does, where a real server may keep it in state E until
it calls the host down (unverified); walltime is exact, where a real server takes up to 9 s more; hooks,
prologues, cgroups and other limits are missing.
"""
