"""Render job scripts from the templates of imgkit, or from the user's templates in ``--templates``."""

from __future__ import annotations

import shlex
from typing import Any

from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_entrypoints.errors import UsageError


def render_template(job: Job, name: str, **values: Any) -> str:
    """Return the text of the template `name`, such as ``run-folder.sh.j2``, filled with the values of a job.

    If the folder of ``--templates`` contains a template of this name, it replaces the one of imgkit. A
    template can use `job`, ``modules``, ``exports``, ``data_links`` and `values`.

    Raises
    ------
    UsageError : the folder of ``--templates`` is missing, or a template in it has an error. The error names
        the file, and for a syntax error also the line.
    """
    # jinja2 is imported here, so that commands which render no template need not load it.
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
    # Besides jinja2's own errors, an expression in a template can raise ordinary exceptions of Python.
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"a faulty template: {error}", where=f"{folder or ''}/{name}") from error


def run_folder_lines(job: Job, job_id: str) -> str:
    """Return shell lines that create the run folder of an interactive job, with a copy of the code.

    The script of any other job contains these lines already. An interactive job without code needs no run
    folder, so the result is empty.

    Parameters
    ----------
    job_id : shell text that expands to the id of the job, such as ``$SLURM_JOB_ID``.
    """
    if job.container.code is None:
        return ""
    runs = shlex.quote(f"{job.directory}/runs")
    # The templates use `dir`, the path of the run folder.
    variables = f'dir={runs}/{job.name}-"{job_id}"\nexport IMGKIT_RUN_DIR=$dir\n'
    create_folder = render_template(job, "run-folder.sh.j2")
    copy_code = render_template(job, "workspace.sh.j2")
    # The lines run in a subshell, because a person may type them: "set -e" would otherwise end that person's
    # shell after an error.
    return f"{variables}(set -e\n{create_folder}{copy_code})"
