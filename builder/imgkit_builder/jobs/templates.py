"""Render job scripts from the shipped templates, or from those in the user's folder of ``--templates``."""

from __future__ import annotations

import shlex
from typing import Any

from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_entrypoints.errors import UsageError


def render_template(job: Job, name: str, **values: Any) -> str:
    """Render the template `name`, such as ``run-folder.sh.j2``, and return the text.

    A template in the folder of ``--templates`` replaces the shipped one of the same name. It can use `job`,
    ``modules``, ``exports``, ``data_links`` and `values`.

    Raises
    ------
    UsageError : the folder of ``--templates`` is missing, or a template in it is faulty. The error names the
        file, and the line of a syntax error.
    """
    # Not at the top of the file, so that only commands that render a template load jinja2.
    import jinja2

    from imgkit_builder.image.render import template_environment

    runtime = runtime_of(job)
    folder = job.request.templates
    if folder is not None and not folder.is_dir():
        raise UsageError(f"no folder {folder}", where="--templates")
    try:
        template = template_environment("templates/job", folder).get_template(name)
        return template.render(
            job=job,
            modules=runtime.modules(job),
            exports=runtime.exports(job),
            data_links=runtime.data_links(job),
            **values,
        )
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"a faulty template: {error}", where=f"{error.filename}:{error.lineno}") from error
    # Beside jinja2's own errors, an expression of a template can raise whatever Python raises for it.
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"a faulty template: {error}", where=f"{folder or ''}/{name}") from error


def run_folder_lines(job: Job, job_id: str) -> str:
    """Return shell lines that make the run folder of an interactive job, with the run's copy of the code.

    The script of any other job has these lines already. An interactive job without code has no run folder, so
    the result is empty.

    Parameters
    ----------
    job_id : shell text with the variable that has the job's id, such as ``$SLURM_JOB_ID``.
    """
    if job.container.code is None:
        return ""
    runs = shlex.quote(f"{job.directory}/runs")
    # A subshell: where a person types the lines, set -e would end the shell of the job.
    lines = f'dir={runs}/{job.name}-"{job_id}"\nexport IMGKIT_RUN_DIR=$dir\n(set -e\n'
    for name in ("run-folder.sh.j2", "workspace.sh.j2"):
        lines += render_template(job, name)
    return f"{lines})"
