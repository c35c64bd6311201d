"""Keys of a run's configuration that aren't the build's own: what they say to a build.

One configuration serves a whole run, so it has sections that a build passes over. A package that has such
sections says so by an entry point of the group `ups_store.config_keys`, which names an object, or a module,
with the functions of `OtherKeys`. It is imported by every build of such a configuration, so keep it light.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any, Protocol

ENTRY_POINTS = "ups_store.config_keys"


class OtherKeys(Protocol):
    """What another package knows of its own keys.

    Attributes:
        PLACES: Beginnings of keys that say where something is or how it is done, not what comes out of it:
            their values may come from the environment.
        SENT: Beginnings of those among them that another machine is told: only of variables that the command
            line allows.
    """

    PLACES: tuple[str, ...]
    SENT: tuple[str, ...]

    def to_build(self, values: dict[str, Any]) -> dict[str, Any]:
        """What a configuration says to a build, without the package's own sections and keys.

        Args:
            values: Configuration as nested dictionaries; unchanged.
        Returns:
            Sections of `BuildConfig`, and unknown ones, for it to refuse.
        """

    def without_effect(self, values: dict[str, Any]) -> Iterator[str]:
        """One sentence for each key, such as a misspelled one of its sections, that isn't read.

        Args:
            values: Configuration as nested dictionaries; wrong keys of the build's own sections are errors.
        """


def load_other_keys() -> tuple[OtherKeys, ...]:
    """Those of all packages that are installed, by the names of their entry points."""
    entries = sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
    return tuple(entry.load() for entry in entries)
