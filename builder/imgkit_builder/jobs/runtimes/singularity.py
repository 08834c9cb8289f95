"""Singularity and Apptainer, which start a .sif, a sandbox (an image as a folder) or a plain squashfs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path, PurePath

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Job
from imgkit_builder.jobs.runtimes.base import SQSH_SUFFIXES, Runtime
from imgkit_builder.oci.manifest import MANIFEST_JSON
from imgkit_builder.sif import image, sqsh
from imgkit_entrypoints.errors import UsageError

_WITHOUT_INFO_LINES = "--quiet"
"""Option that suppresses INFO lines, which each node would print. Warnings and errors are still printed."""

_CLEAN_ENVIRONMENT = re.compile(r"--(cleanenv|containall)(=.*)?|-[cfinpuw]*[eC].*")
"""Options that keep the node's variables out of the container. Short ones can be combined: ``-ce``."""

_UNSET_CLEAN_VARIABLES = (
    "unset APPTAINER_CLEANENV SINGULARITY_CLEANENV APPTAINER_CONTAINALL SINGULARITY_CONTAINALL"
)
"""Shell line that unsets variables with the same effect as the options in `_CLEAN_ENVIRONMENT`.

A user's shell may set them. The container would then have no variables of the node. Without these, the node
agents would not find each other, and each node would run alone.
"""


class Singularity(Runtime):
    """Singularity or Apptainer."""

    kind = "singularity"
    usual_options = ("--nv",)
    image_suffix = ".sif"
    serves_image = True
    squashfs_options = "image-src=/,ro"
    options_index = 3  # singularity --quiet exec OPTIONS
    opens_shells = True

    def image(self, reference: str, recipe_name: str, directory: Path) -> str:
        """Return the path of the image. If `reference` is empty, it is the recipe's .sif in `directory`."""
        return str(directory / (reference or f"{recipe_name}.sif"))

    def _lacks_manifest(self, path: Path) -> bool:
        """Return whether `path` is an image file or a sandbox on this machine without a manifest of imgkit.

        A sandbox is an image in the form of a folder.
        """
        if not path.is_dir():
            return super()._lacks_manifest(path)
        is_sandbox = (path / "usr").is_dir()
        return is_sandbox and not Path(f"{path}{MANIFEST_JSON}").exists()

    def _image_arch(self, path: Path) -> str:
        """Return the architecture of the image, such as ``arm64``.

        For a .sif, it is in the header of the file.
        """
        if image.is_sif(path):
            return image.read(path).arch
        return super()._image_arch(path)

    def check(self, job: Job) -> None:
        """Check that the container receives the variables that the node and the job set for it.

        Without the scheduler's variables, the node agents would not find each other, and each node would run
        alone.

        Raises
        ------
        UsageError : an option of the recipe, such as ``--cleanenv``, keeps the variables out of the
            container.
        """
        sets_variables = job.settings or job.container.names or job.container.env_file
        if job.system == "standalone" and not sets_variables:
            return  # without a scheduler, the node sets no variables either
        for option in self.options(job):
            if _CLEAN_ENVIRONMENT.fullmatch(option):
                raise UsageError(
                    f"with {option}, the container receives no variable of the node and the job: the node "
                    "agent would find neither the other nodes nor the job's settings",
                    where=job.recipe.where("system", "runtime", "options"),
                    hint=f"remove {option} from system.runtime.options; --contain and --no-home keep the "
                    "variables",
                )

    def check_submission(self, job: Job) -> None:
        """Raise UsageError if the image does not exist, or is for other nodes."""
        path = Path(job.container.image)
        if not path.exists():
            hint = f"imgkit sif {job.recipe.name}, or --image PATH"
            raise UsageError(f"no image {path}", where="--image", hint=hint)
        super().check_submission(job)

    def shell(self, job: Job) -> Argv:
        """Return the argv of a shell in the job's image.

        It is ``singularity shell``, unless something must be set up in the container before the shell starts.
        Then it is ``singularity exec`` with bash, like the start of a command.
        """
        # Without a command, `system_variables` returns all variables of the system.
        shell_job = dataclasses.replace(job, command=())
        container = shell_job.container
        needs_setup = (
            bool(container.env)
            or bool(self.system_variables(shell_job))
            or shell_job.request.container.activate != ""
            or bool(container.packages)
            or _is_sqsh(shell_job)  # `_start` sets the image's own variables
        )
        if needs_setup:
            return super().shell(shell_job)
        return self._argv_to_image(shell_job, "shell")

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return shell lines that set the variables of the job, and the library path for the container.

        Singularity takes the library path from a variable such as ``SINGULARITYENV_LD_LIBRARY_PATH``.
        """
        # Variables of the user's shell may keep the job's variables out of the container, so they are unset.
        lines = (_UNSET_CLEAN_VARIABLES, *super().exports(job))
        libraries = ":".join(self.listed_libraries(job))
        if not libraries or _is_sqsh(job):  # for a plain squashfs, `_start` sets the library path
            return lines
        program = PurePath(self.program(job.recipe)).name
        prefix = "APPTAINERENV" if program == "apptainer" else "SINGULARITYENV"
        # For example:
        #     libraries="$NVHPC/lib:/opt/lib"
        #     export SINGULARITYENV_LD_LIBRARY_PATH="$libraries"'${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}'
        # The shell of the node replaces variables of the site in the folders. LD_LIBRARY_PATH must be
        # replaced later, inside the container, so it is in single quotes.
        return (
            *lines,
            f"libraries={quoting.quote(quoting.quote_with_site_variables(libraries))}",
            f"export {prefix}_LD_LIBRARY_PATH=\"$libraries\"'{quoting.INHERITED}'",
        )

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        """Return the ``singularity exec`` command that starts `command`.

        Singularity sets the image's own variables (ENV) only for a .sif. For a plain squashfs, a shell sets
        them before `command` starts.
        """
        argv = self._argv_to_image(job, "exec")
        if not _is_sqsh(job):
            return (*argv, *command)
        set_library_path = ""  # shell text
        libraries = self.listed_libraries(job)
        if libraries:
            set_library_path = quoting.export_library_path(libraries)
        return (*argv, *sqsh.environment_argv(set_library_path), *command)

    def _argv_to_image(self, job: Job, verb: str) -> Argv:
        """Return the command line up to and including the image.

        For example: ``singularity --quiet VERB OPTIONS IMAGE``.
        """
        mounts = map(quoting.quote_with_site_variables, self.mounts(job))
        options = [*self.options(job), *quoting.repeat_option("--bind", mounts)]
        if job.container.workdir:
            options += ("--pwd", job.container.workdir)  # older versions of apptainer lack --cwd
        return (self.program(job.recipe), _WITHOUT_INFO_LINES, verb, *options, job.container.image)


def _is_sqsh(job: Job) -> bool:
    """Return whether the image is a plain squashfs.

    If the file is not on this machine, its suffix decides.
    """
    return job.container.image.endswith(SQSH_SUFFIXES) or sqsh.is_sqsh(Path(job.container.image))
