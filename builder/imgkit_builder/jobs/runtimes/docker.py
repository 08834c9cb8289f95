"""Docker, or Podman, whose command has the same options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Job
from imgkit_builder.jobs.memory import size_text
from imgkit_builder.jobs.runtimes.base import Runner, Runtime, check_reference, with_targets
from imgkit_builder.recipe.systems import is_podman

_OPEN_FILES = "--ulimit=nofile=16384"
"""Docker's option for every job: Docker 29 lowers the limit to 1,024, too few for data workers and a head.

A larger one would keep a container from starting where the engine's own limit is lower (rootless, sandboxes).
"""

_PODMAN_OPTIONS = ("--network=host", "--ipc=host", "--cgroups=disabled", "--pull=never")
"""Options of Podman under Slurm that the recipe does not set.

The nodes meet on the host's network, and the workers of a node in its shared memory. The processes stay in
the cgroup of the step, so that Slurm counts and ends them. A thousand nodes do not ask a registry at once.
"""

_WITHOUT_SCHEDULER = ("standalone", "mpi")
"""Systems on which nothing but the container limits the memory of a job."""


class Docker(Runtime):
    """Docker or Podman."""

    kind = "docker"
    # NVIDIA's page of the image asks for them.
    usual_options = (
        *("--gpus=all", "--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864"),
        "--network=host",  # NCCL and the rendezvous choose their own ports between the nodes
    )
    environment_by_options = True
    input_options = ("--interactive",)
    terminal_options = ("--interactive", "--tty")

    def image(self, text: str, recipe: str, directory: Path) -> str:
        """Return the name of the image; without `text`, that of the recipe's image."""
        return check_reference(text) or f"{recipe}:latest"

    def is_foreign(self, job: Job) -> bool:
        """Return whether the user names an image or chooses a Python in it."""
        container = job.request.container
        return bool(container.image or container.python_flag)

    def image_digest(self, job: Job, run: Runner) -> str:
        """Return the id of the image; empty if the engine has no such image."""
        argv = (self.program(job.recipe), "image", "inspect", "--format", "{{.Id}}", job.container.image)
        result = run(argv)
        image_id = result.output.strip().rpartition("\n")[2]  # warnings come before it
        if result.returncode or not re.fullmatch(r"(sha256:)?[0-9a-f]{64}", image_id):
            return ""
        return image_id

    def belongs_to_service(self, program: str) -> bool:
        """Return whether `program` is Docker: the containers of Podman are processes of the job."""
        return not is_podman(program)

    def warnings(self, job: Job) -> Iterator[str]:
        """Yield a warning about a command that starts in the container, where its files are lost."""
        requested = job.request.container
        if job.container.workdir and not requested.workdir and requested.code is None:
            yield (
                f"the command starts in {job.container.workdir} of the image; files that it writes there are "
                "lost with the container: start in a copy of your code (--code .), or in the job's folder "
                "(--workdir .)"
            )

    def used_flags(self) -> tuple[str, ...]:
        """Return the flags of memory. See `Runtime`."""
        return ("mem", "mem-per-gpu")

    def options(self, job: Job) -> Argv:
        """Return the options of every start, with those that the recipe leaves to imgkit."""
        options = super().options(job)
        memory = job.allocation.memory
        if memory and job.system in _WITHOUT_SCHEDULER:
            options = (*options, f"--memory={size_text(memory.node_MiB).lower()}")
        if job.system == "slurm":
            names = {option.partition("=")[0] for option in options}
            missing = (option for option in _PODMAN_OPTIONS if option.partition("=")[0] not in names)
            return (*options, *missing)
        sets_open_files = any("nofile" in option for option in (*options, *job.request.allocation.options))
        return options if sets_open_files else (*options, _OPEN_FILES)

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        """Return the ``docker run`` command that starts `command` as it is."""
        container = job.container
        # The shell of the node replaces variables of the site in these values. A value of the user's own is
        # never expanded.
        expanded = {name: value for name, value in job.settings.items() if name not in container.env}
        expanded |= self.system_variables(job)
        assignments = [
            quoting.quote_with_site_variables(f"{name}={value}") for name, value in expanded.items()
        ]
        assignments += [f"{name}={value}" for name, value in container.env.items()]
        mounts = map(quoting.quote_with_site_variables, with_targets(self.mounts(job)))
        env_file = ("--env-file", container.env_file) if container.env_file else ()
        return (
            *(self.program(job.recipe), "run", "--rm", *self.options(job)),
            *quoting.repeat_option("--volume", mounts),
            *("--workdir", container.workdir or str(job.directory)),
            *quoting.repeat_option("--env", assignments),
            *env_file,
            *quoting.repeat_option("--env", (*container.names, *forward)),
            *(container.image, *command),
        )

    def _digest_command(self, job: Job, digest: str) -> tuple[str, str]:
        program = shlex.quote(self.program(job.recipe))
        return f"{program} image inspect --format '{{{{.Id}}}}' \"$image\"", digest
