"""Making stores: the building file, commits, and what publishes a file.

Called, it is `ups_store.write`, the one-line way (`write.write`): the function has the room's name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """This module, which can be called: importing any module of the room sets `ups_store.write` to it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from ups_store.write.write import write

        return write(*args, **options)


sys.modules[__name__].__class__ = _Room
