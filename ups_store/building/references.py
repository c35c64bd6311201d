"""References in configurations: `${key}` to another value, `${oc.env:NAME}` to a variable of the environment.

Every value is resolved once and what references expand to is counted before it is put together, so that a few
lines can't become gigabytes. Which values come from the environment is remembered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ups_store.errors import ConfigError

MAX_EXPANDED = 1 << 20  # letters and values that all references together become
MAX_CHAIN = 64  # values within each other, and references to references

_REFERENCE = re.compile(r"(\\*)\$\{([^${}]*)(\}?)")
_PART_OF_KEY = re.compile(r"[^.\[\]]+")
_VARIABLE = "oc.env:"  # as OmegaConf calls it
_HINT = "check the dotted keys"

Key = tuple[str | int, ...]


class Literal(str):
    """A text that is meant as it is written, without references."""

    __slots__ = ()


class References:
    """The values of a configuration, with what they refer to in its place.

    Args:
        values: Nested dictionaries and lists; a text "???" has still to be said. Unchanged.
        path: File that they are from, for messages.

    Attributes:
        variables: Which variables of the environment a text depends on, by dotted key.
    """

    def __init__(self, values: Mapping[str, Any], *, path: Path | None) -> None:
        self.variables: dict[str, set[str]] = {}
        self._root, self._path = values, path
        self._found: dict[Key, Any] = {}
        self._sizes: dict[Key, int] = {}
        self._variables_of: dict[Key, set[str]] = {}
        self._at_work: list[Key] = []
        self._expanded = 0

    def resolved(self) -> dict[str, Any]:
        """New nested dictionaries.

        Raises:
            ConfigError: If a reference leads nowhere or back to itself; kinds "too_long" and "too_deep".
        """
        values = self._value((), self._root)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    def _value(self, key: Key, raw: Any) -> Any:
        if key in self._found:
            return self._found[key]
        if key in self._at_work:
            raise self._error(key, "refers to itself")
        if len(self._at_work) >= MAX_CHAIN:
            raise self._error(key, f"at most {MAX_CHAIN} values within or behind each other", kind="too_deep")
        self._at_work.append(key)
        if isinstance(raw, (dict, list)):
            self._found[key] = self._container(key, raw)
        else:
            self._found[key] = self._text(key, raw) if isinstance(raw, str) else raw
        self._at_work.pop()
        return self._found[key]

    def _container(self, key: Key, raw: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
        items = raw.items() if isinstance(raw, dict) else enumerate(raw)
        inner = {name: self._value((*key, name), value) for name, value in items}
        keys = [(*key, name) for name in inner]
        self._sizes[key] = 1 + sum(self._sizes.get(each, 1) for each in keys)
        for each in keys:
            self._depend(key, each)
        return inner if isinstance(raw, dict) else list(inner.values())

    def _text(self, key: Key, text: str) -> Any:
        if text == "???":
            raise self._error(key, "is mandatory", hint=f"say {_dotted(key)}=...")
        matches = [] if isinstance(text, Literal) else list(_REFERENCE.finditer(text))
        whole = matches[0] if matches and matches[0].span() == (0, len(text)) else None
        value = self._reference(key, whole) if whole and not whole[1] else self._joined(key, text, matches)
        if isinstance(value, str):
            self._sizes[key] = len(value)
        if key in self._variables_of:
            self.variables[_dotted(key)] = self._variables_of[key]
        return value

    def _joined(self, key: Key, text: str, matches: list[re.Match[str]]) -> str:
        """A text with references in it; a backslash before one makes it text."""
        parts, end = [], 0
        for match in matches:
            backslashes, is_text = divmod(len(match[1]), 2)
            found = match[0][len(match[1]) :] if is_text else str(self._reference(key, match))
            parts += [text[end : match.start()], "\\" * backslashes, found]
            end = match.end()
        return "".join((*parts, text[end:]))

    def _reference(self, key: Key, match: re.Match[str]) -> Any:
        """What one reference in the text of a key stands for; its size is counted."""
        name = match[2].strip()
        if not match[3] or not name:
            raise self._error(key, "${ without }, or a reference within another")
        if name.startswith(_VARIABLE):
            return self._variable(key, name.removeprefix(_VARIABLE))
        if ":" in name:
            raise self._error(key, f"${{{name}}}: the known references are ${{key}} and ${{oc.env:NAME}}")
        target, value = self._find(key, name)
        self._depend(key, target)
        self._sizes[key] = self._sizes.get(target, 1)
        self._expanded += self._sizes[key]
        if self._expanded > MAX_EXPANDED:
            problem = f"references of more than {MAX_EXPANDED:,} letters and values together"
            raise self._error(
                key, problem, kind="too_long", hint="write values out instead of referring to them"
            )
        return value

    def _find(self, key: Key, name: str) -> tuple[Key, Any]:
        """The key that a reference names, and its value; leading dots count from where it stands."""
        num_dots = len(name) - len(name.lstrip("."))
        base = key[: max(0, len(key) - num_dots)] if num_dots else ()
        target: Key = ()
        node: Any = self._root
        for part in (*base, *_PART_OF_KEY.findall(name)):
            if isinstance(node, str):  # a reference, too
                node = self._value(target, node)
            found = next((each for each in _names(node) if str(each) == str(part)), None)
            if found is None:
                raise self._error(key, f"${{{name}}} leads nowhere")
            target, node = (*target, found), node[found]
        return target, self._value(target, node)

    def _variable(self, key: Key, text: str) -> str | None:
        name, comma, default = text.partition(",")
        self._variables_of.setdefault(key, set()).add(name.strip())
        value = os.environ.get(name.strip(), default.strip().strip("'\"") if comma else None)
        if value is None:
            raise self._error(key, f"no variable {name.strip()} in the environment")
        return None if value == "null" and name.strip() not in os.environ else value

    def _depend(self, key: Key, on: Key) -> None:
        if on in self._variables_of:
            self._variables_of.setdefault(key, set()).update(self._variables_of[on])

    def _error(self, key: Key, problem: str, *, kind: str | None = None, hint: str = _HINT) -> ConfigError:
        return ConfigError(f"{_dotted(key)}: {problem}", kind=kind, path=self._path, hint=hint)


def variables_in(raw: Any) -> Iterator[str]:
    """Give the variables of the environment that texts of a file refer to."""
    if isinstance(raw, str):
        names = (match[2].strip().partition(",")[0] for match in _REFERENCE.finditer(raw))
        yield from (name.removeprefix(_VARIABLE).strip() for name in names if name.startswith(_VARIABLE))
    for each in raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ():
        yield from variables_in(each)


def _names(node: Any) -> Any:
    return node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()


def _dotted(key: Key) -> str:
    return ".".join(map(str, key))[:200]
