"""The templates of job scripts, shipped or the user's own."""

from __future__ import annotations

from typing import Any

from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_entrypoints.errors import UsageError


def fill(job: Job, name: str, **values: Any) -> str:
    """Return the text of template `name`, which sees `job` and `values`.

    Raises
    ------
    UsageError : the user's own template is faulty; names its file and line.
    """
    import jinja2

    from imgkit_builder.image.render import environment

    runtime, folder = runtime_of(job), job.request.templates
    if not job.makes_image:
        values["exports"] = runtime.exports(job)
    if folder is not None and not folder.is_dir():
        raise UsageError(f"no folder {folder}", where="--templates")
    try:
        template = environment("templates/job", folder).get_template(name)
        return template.render(job=job, modules=runtime.modules(job), **values)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        where = f"{folder or ''}/{name}"
        if isinstance(error, jinja2.TemplateSyntaxError):
            where = f"{error.filename}:{error.lineno}"
        raise UsageError(f"a faulty template: {error}", where=where) from error
