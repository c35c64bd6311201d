"""Text on its way to people and programs: whatever would move a cursor or turn letters around is escaped.

Paths, names, attributes and host names may come from anybody's files and hold any character. Consoles, logs,
errors and `repr` pass what they say through `printable`; what programs read is made by `json_text`. It stands
alone because errors, below which there is nothing else, need it, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

_LINE_BREAK = 0x0A  # messages of ours may have several lines; a name of a file's can't, see `one_line`

_CONTROLS = (
    range(0x20),  # C0, of which ESC begins the sequences that a terminal obeys
    range(0x7F, 0xA0),  # DEL and C1: 0x9B alone begins a sequence, too
    (0x061C, 0x200E, 0x200F),  # marks of direction
    range(0x2028, 0x202F),  # line and paragraph separators, embeddings and overrides of direction
    range(0x2066, 0x206A),  # isolates
)
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in chain.from_iterable(_CONTROLS) if code != _LINE_BREAK}


def printable(text: str) -> str:
    r"""The text with escapes such as `\x1b` for control characters but line breaks; always valid UTF-8."""
    return text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode()


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+://|https?:/)(?:[^\s/?#'\"]*@)?([^\s?#'\"]*)(?:\?[^\s#'\"]*)?")


def without_secrets(text: str) -> str:
    """Leave out user, password and query of all URLs in a text: they may hold keys."""
    return _URL.sub(r"\1\2", text) if ":/" in text else text


def one_line(text: str) -> str:
    """The same of text that is no sentence of ours, such as a path: it can't begin a line of its own."""
    return printable(text).replace("\n", "\\n")


def counted(num: int, noun: str) -> str:
    """`1 problem`, `1,200 problems`, `2 trajectories`."""
    if num != 1:
        noun = f"{noun[:-1]}ies" if noun[-1] == "y" and noun[-2] not in "aeiou" else f"{noun}s"
    return f"{num:,} {noun}"


def json_text(
    document: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None
) -> str:
    """A JSON document in ASCII, with all control characters escaped, also DEL, which JSON lets through.

    Args:
        document: JSON values.
        indent: Spaces of each level; one line without it.
        default: Makes JSON values of others, as of `json.dumps`.
    Raises:
        ValueError: For NaN and infinities, which JSON doesn't have.
    """
    text = json.dumps(document, indent=indent, default=default, allow_nan=False)
    return text.replace("\x7f", "\\u007f")
