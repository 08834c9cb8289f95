"""jinja2 for templates of others: printing a job's script executes nothing of the template's author."""

from __future__ import annotations

from typing import Any

from jinja2.runtime import Macro
from jinja2.sandbox import SandboxedEnvironment

_PLAIN = (str, tuple, list)


class Templates(SandboxedEnvironment):
    """Templates that call only macros, jinja2's own functions, and methods of texts and lists.

    jinja2's sandbox hides what begins with an underscore; but a template also sees paths, which write files.
    """

    def is_safe_callable(self, obj: Any) -> bool:
        """Return whether a template may call `obj`."""
        if isinstance(obj, Macro) or any(obj is function for function in self.globals.values()):
            return True
        return isinstance(getattr(obj, "__self__", None), _PLAIN) and super().is_safe_callable(obj)
