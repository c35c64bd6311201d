"""What sections of the configuration have in common: strictness, and the types of their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ups.errors import needs
from ups.parsing import Count as Count
from ups.parsing import CountOrZero as CountOrZero
from ups.parsing import Fraction as Fraction
from ups.parsing import NotNegative as NotNegative
from ups.parsing import Positive as Positive

with needs("train"):
    from pydantic import BaseModel, ConfigDict, Field
    from pydantic.fields import FieldInfo


# Which training a key changes: names of stages.
Affects = tuple[str, ...]


def key(
    default: Any,
    doc: str,
    *,
    affects: Affects | None = None,
    affects_within: Mapping[str, Affects] | None = None,
    needs: str | None = None,
    read_by: tuple[str, ...] | None = None,
    tune: tuple[int, ...] | None = None,
    **constraints: Any,
) -> Any:
    """Declare a key, or a section, of a configuration.

    Args:
        default: Its value where nothing is said.
        doc: What the reference and errors say of it.
        affects: Stages that compute something else with another value, so that a training isn't continued or
            kept with it; by default those of the section, and of a section of `RunConfig` all.
        affects_within: The same of keys of a section that is declared elsewhere.
        needs: The switch of the same section without which it has no effect.
        read_by: Names of the optimisers or schedules that read it; by default all.
        tune: Of an operator's own section: values that `ups tune --stage operator` tries.
        **constraints: As `pydantic.Field` has them.
    """
    facts: dict[str, Any] = {"affects": affects, "affects_within": affects_within, "needs": needs}
    facts |= {"read_by": read_by, "tune": tune}
    said: dict[str, Any] = {name: value for name, value in facts.items() if value is not None}
    return Field(default, description=doc, json_schema_extra=said, **constraints)


def fact(field: FieldInfo, name: str) -> Any:
    """What `key` was told about a key, such as `needs`; None if nothing."""
    said = field.json_schema_extra
    return said.get(name) if isinstance(said, dict) else None


class Section(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
