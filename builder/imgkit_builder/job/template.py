"""Fill a job template: the user's, if there is one of that name, or the shipped one."""

from __future__ import annotations

from typing import Any

from imgkit_builder.job import container
from imgkit_builder.job.request import Job
from imgkit_entrypoints.errors import UsageError


def fill(job: Job, name: str, **values: Any) -> str:
    """The text of template `name`, which sees `job` and `values`.

    Raises
    ------
    UsageError : the user's own template is faulty; names its file and line.
    """
    import jinja2

    from imgkit_builder.image.render import environment

    own = job.request.templates
    if own is not None and not own.is_dir():
        raise UsageError(f"no folder {own}", where="--templates")
    try:
        return (
            environment("templates/job", own)
            .get_template(name)
            .render(job=job, exports=container.exports(job), modules=container.modules(job), **values)
        )
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(
            error.message or "a faulty template", where=f"{error.filename}:{error.lineno}"
        ) from None
    except jinja2.TemplateError as error:
        raise UsageError(error.message or "a faulty template", where=f"{own or ''}/{name}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"a faulty template: {error}", where=f"{own or ''}/{name}") from error
