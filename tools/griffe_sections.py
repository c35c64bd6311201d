"""Docstrings as the site reads them: a section such as `Raises:` may follow another without a blank line."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Returns|Raises|Yields|Attributes|Args|Example|Examples):\n)")


class Sections(griffe.Extension):
    """Put the blank line in that the parser wants."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """For every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub("\n\n", obj.docstring.value)
