"""Docker, and Podman, whose command accepts the same options. Jobs under Slurm use Podman."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Job, Runner
from imgkit_builder.jobs.memory import size_text
from imgkit_builder.jobs.runtimes.base import Runtime, check_reference, with_targets

_OPEN_FILES = "--ulimit=nofile=16384"
"""Docker's option for the number of open files.

Docker 29 lowers the limit to 1,024. This is too low for data workers, and for the head (the node to which all
others connect). With a number above this one, no container would start if the engine's own limit is lower, as
in rootless engines and sandboxes.
"""

_PODMAN_OPTIONS = ("--network=host", "--ipc=host", "--cgroups=disabled", "--pull=never")
"""Options that Podman gets under Slurm, unless the recipe sets them.

The nodes communicate over the network of the host, and the workers of a node through its shared memory. With
``--cgroups=disabled``, the processes stay in the cgroup of the Slurm step, so that Slurm accounts for them
and ends them. With ``--pull=never``, a thousand nodes do not ask a registry at the same time.
"""

_WITHOUT_SCHEDULER = ("standalone", "mpi")
"""Systems without a scheduler that limits the memory of a job.

An option of the container must do so there.
"""


class Docker(Runtime):
    """Docker or Podman."""

    kind = "docker"
    # NVIDIA's page about its PyTorch image asks for the options on the first line.
    usual_options = (
        *("--gpus=all", "--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864"),
        "--network=host",  # NCCL and the rendezvous choose their own ports between the nodes
    )
    passes_variables_as_options = True

    def image(self, reference: str, recipe_name: str, directory: Path) -> str:
        """Return the name of the image. The default is the recipe's image, ``RECIPE:latest``."""
        return check_reference(reference) or f"{recipe_name}:latest"

    def needs_entry_points(self, job: Job) -> bool:
        """Return whether the user names an image, or chooses a Python in it.

        The default image is from imgkit.
        """
        container = job.request.container
        return bool(container.image or container.python_flag)

    def image_digest(self, job: Job, run: Runner) -> str:
        """Return the id of the image, ``sha256:...``, or "" if the engine has no such image."""
        argv = (self.program(job.recipe), "image", "inspect", "--format", "{{.Id}}", job.container.image)
        finished = run(argv)
        image_id = finished.output.strip().rpartition("\n")[2]  # warnings can come before the last line
        if finished.returncode or not re.fullmatch(r"(sha256:)?[0-9a-f]{64}", image_id):
            return ""
        return image_id

    def warnings(self, job: Job) -> Iterator[str]:
        """Yield a warning if the command starts in a folder of the image, where new files get lost."""
        requested = job.request.container
        if job.container.workdir and not requested.workdir and requested.code is None:
            yield (
                f"the command starts in {job.container.workdir} of the image; files that it writes there are "
                "lost with the container: start in a copy of your code (--code .), or in the job's folder "
                "(--workdir .)"
            )

    def used_flags(self) -> tuple[str, ...]:
        """Return the flags that request memory, because Docker has an option to limit it."""
        return ("mem", "mem-per-gpu")

    def options(self, job: Job) -> Argv:
        """Return the options for each start: those in the recipe, followed by those that imgkit adds.

        imgkit adds the options for Podman and the limit of open files only if they are not set already.
        """
        options = list(super().options(job))
        memory = job.allocation.memory
        if memory and job.system in _WITHOUT_SCHEDULER:  # elsewhere, the scheduler limits the memory
            options.append(f"--memory={size_text(memory.node_MiB).lower()}")
        if job.system == "slurm":  # only Podman is allowed there, and not Docker
            options += _missing_podman_options(options)
        # The option is searched as text, because it can be written in several forms.
        elif "nofile" not in " ".join((*options, *job.request.allocation.options)):
            options.append(_OPEN_FILES)
        return tuple(options)

    def with_input(self, argv: Argv, *, is_terminal: bool) -> Argv:
        """Return `argv` with the options that connect the standard input.

        Docker would refuse ``--tty`` if the input is not a terminal.
        """
        if is_terminal:
            return self.with_options(argv, ("--interactive", "--tty"))
        return self.with_options(argv, ("--interactive",))

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        """Return the ``docker run`` command that starts `command` in the job's image.

        The shell of the node replaces variables of the site, such as $SCRATCH, in mounts.

        Parameters
        ----------
        forward : names of variables that docker passes on from its own environment.
        """
        container = job.container
        mounts = map(quoting.quote_with_site_variables, with_targets(self.mounts(job)))
        options = (
            *self.options(job),
            *quoting.repeat_option("--volume", mounts),
            "--workdir",
            container.workdir or str(job.directory),
            *self._variable_options(job, forward),
        )
        return (self.program(job.recipe), "run", "--rm", *options, container.image, *command)

    def _variable_options(self, job: Job, forward: Argv) -> Argv:
        """Return the options of docker that set the variables of the job in the container.

        The shell of the node replaces variables of the site, such as $SCRATCH, in values of the recipe. It
        does not replace variables in a value of the user (``--env``).

        Parameters
        ----------
        forward : names of variables that docker passes on from its own environment.
        """
        container = job.container
        # `job.settings` are imgkit's own variables. A variable of the user replaces one of the same name, and
        # `system_variables` leaves out those of the user as well.
        variables = {name: value for name, value in job.settings.items() if name not in container.env}
        variables |= self.system_variables(job)
        assignments = [
            *map(quoting.quote_with_site_variables, quoting.assignments(variables)),
            *quoting.assignments(container.env),
        ]
        options = quoting.repeat_option("--env", assignments)
        if container.env_file:
            options += ("--env-file", container.env_file)
        # For a name without a value, docker takes the value from its own environment.
        return (*options, *quoting.repeat_option("--env", (*container.names, *forward)))

    def _digest_command(self, job: Job, digest: str) -> tuple[str, str]:
        """Return the shell command that prints the id of the image on the node, and the expected id."""
        program = shlex.quote(self.program(job.recipe))
        return f"{program} image inspect --format '{{{{.Id}}}}' \"$image\"", digest


def _missing_podman_options(options: Iterable[str]) -> list[str]:
    """Return those of `_PODMAN_OPTIONS` that `options` does not set. Their values may differ."""
    names = {option.partition("=")[0] for option in options}
    return [option for option in _PODMAN_OPTIONS if option.partition("=")[0] not in names]
