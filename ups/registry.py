"""Names of users' own code: registered by a decorator, or written `module:attribute` in a configuration.

operators = Registry("operator", key="operator.name", homes={"fno": "ups.models.fno"})

@operators("mine")
class Mine: ...

operators.find("mine"), operators.find("mylab.model:Net")
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from importlib import import_module
from typing import Any, Generic, TypeVar

from ups.errors import CheckpointError, ConfigError, did_you_mean

Thing = TypeVar("Thing")
# The variable with modules that files may name, by commas; processes that a command starts have it, too.
ALLOWED_CODE = "UPS_ALLOW_CODE"


class Registry(Generic[Thing]):
    """What has a name of one noun.

    Args:
        noun: "operator", "loss", ...
        key: Of the configuration, that names one.
        homes: Modules of those that the package itself has, by name; imported when they are asked for.
    """

    def __init__(self, noun: str, *, key: str, homes: Mapping[str, str] | None = None) -> None:
        self.noun, self.key, self._homes = noun, key, dict(homes or {})
        self._known: dict[str, Thing] = {}

    def __call__(self, name: str) -> Callable[[Thing], Thing]:
        """Decorate what shall have the name; the same name again replaces it, as in a notebook."""

        def register(thing: Thing) -> Thing:
            self._known[name] = thing
            return thing

        return register

    def names(self) -> list[str]:
        """All that have a name, the package's own among them."""
        return sorted({*self._homes, *self._known})

    def find(self, name: str, *, allow_code: str | Iterable[str] | None = None) -> Any:
        """What is registered under a name, or stands at `module:attribute`.

        Args:
            name: As a configuration or a file says it.
            allow_code: Where a file says it: modules that may be imported for it, besides those that are
                already and those of `UPS_ALLOW_CODE`. None where the caller's own configuration says it.

        Raises:
            ConfigError: Kind "unknown_<noun>"; kind "no_code", if there is no such module or attribute.
            CheckpointError: Kind "foreign_code", if importing its module isn't allowed.
        """
        if name not in self._known and name in self._homes:
            import_module(self._homes[name])
        if name in self._known:
            return self._known[name]
        module, colon, attribute = name.partition(":")
        if not colon or not module or module.startswith("."):
            hint = (
                did_you_mean(name, self.names())
                or f"write yours as module:attribute, such as mylab.model:{attribute or name}"
            )
            expected = f"one of {', '.join(self.names())}" if self.names() else "module:attribute"
            kind = f"unknown_{self.noun}"
            raise ConfigError(f"{self.key}", kind=kind, expected=expected, found=repr(name), hint=hint)
        if module not in sys.modules:
            if allow_code is not None:
                check_allowed(name, noun=self.noun, allow_code=allow_code)
            if os.getcwd() not in sys.path:  # as `python -m` has it; what is installed goes first
                sys.path.append(os.getcwd())
        try:
            found = import_module(module)
        except ImportError as error:
            hint = "install it, or run the command in the folder that it lies in"
            raise ConfigError(f"{self.key} = {name}: {error}", kind="no_code", hint=hint) from error
        try:
            return reduce(getattr, attribute.split("."), found)
        except AttributeError as error:
            names = [key for key, value in vars(found).items() if callable(value) and key[0] != "_"]
            hint = did_you_mean(attribute, names) or f"it has {', '.join(names) or 'nothing'}"
            raise ConfigError(f"{self.key} = {name}: {error}", kind="no_code", hint=hint) from error


def check_allowed(name: str, *, noun: str, allow_code: str | Iterable[str] = ()) -> None:
    """Refuse code that a file names, unless its module is imported already or may be ("foreign_code")."""
    module = name.partition(":")[0]
    named = [allow_code] if isinstance(allow_code, str) else allow_code
    if module not in {*sys.modules, *named, *os.environ.get(ALLOWED_CODE, "").split(",")}:
        raise CheckpointError(
            f"its {noun} is {name}, code of your own or of others",
            kind="foreign_code",
            expected=f"{module} to be imported already, or to be allowed",
            hint=f"if you trust it, --allow-code {module} or ups.load(..., allow_code={module!r})",
        )
