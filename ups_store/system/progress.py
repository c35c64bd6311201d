"""`Progress`: what long work calls now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int], object]  # takes the number of bytes that were done since the last call
