"""A jinja2 sandbox for templates that others have written.

With it, imgkit can print a job script without running code of the template's author.
"""

from __future__ import annotations

from typing import Any

from jinja2.runtime import Macro
from jinja2.sandbox import SandboxedEnvironment

_PLAIN = (str, tuple, list)


class Templates(SandboxedEnvironment):
    """Templates that can call only macros, jinja2's own functions, and methods of texts, tuples and lists.

    jinja2's sandbox hides only attributes that begin with an underscore. That is not enough, because a
    template also gets paths, whose methods can write files.
    """

    def is_safe_callable(self, obj: Any) -> bool:
        """Return whether a template may call `obj`. jinja2 asks before each call."""
        if isinstance(obj, Macro) or any(obj is function for function in self.globals.values()):
            return True
        return isinstance(getattr(obj, "__self__", None), _PLAIN) and super().is_safe_callable(obj)
