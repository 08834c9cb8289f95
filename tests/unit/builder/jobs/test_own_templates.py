"""Templates of others: to print a job's script executes nothing of their author."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_builder import make_job

from imgkit_builder.jobs import templates
from imgkit_builder.jobs.job import Job
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.schedulers.placement import Size


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job("cpu", directory=tmp_path, templates=tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ job.directory.joinpath('canary').touch() }}",
        "{{ (job.directory / 'canary').write_text('x') }}",
        "{{ job.__init__.__globals__ }}",
        "{{ self.__init__.__globals__.__builtins__.open('canary', 'w') }}",
        "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
        "{{ '{0.__class__}'.format(job) }}",
        "{{ 1 / 0 }}",
        "{{ job.allocation.nodes + 'x' }}",
    ],
)
def test_templates_run_no_program_and_write_no_file(job, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.sh.j2").write_text(text)
    with pytest.raises(UsageError):
        templates.render_template(job, "mine.sh.j2")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.sh.j2"]


def test_templates_use_values_filters_and_macros(job, tmp_path):
    (tmp_path / "mine.sh.j2").write_text(
        "{% macro twice(word) %}{{ word }}{{ word }}{% endmacro %}"
        "{{ twice(job.allocation.nodes) }} {{ range(2) | list }} {{ 'a,b'.split(',') | join('-') }} "
        "{{ 'x y' | sh_quote }}"
    )
    alone = job.with_allocation(size=Size.parse("2+1"))
    assert templates.render_template(alone, "mine.sh.j2") == "33 [0, 1] a-b 'x y'"
