"""Dataclasses from JSON values of a file, checked against their fields before anything is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import GenericAlias
from typing import Annotated, Any, Self

from ups.errors import needs

with needs("train"):
    from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

# strict: `yes` isn't 1 and 1.5 isn't a count
Count = Annotated[int, Field(strict=True, ge=1)]

CountOrZero = Annotated[int, Field(strict=True, ge=0)]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

Finite = Annotated[float, Field(allow_inf_nan=False)]

# Of an axis, of a window, of a U-Net: what is looped over before there are tensors to compare with.
Length = Annotated[Count, Field(le=1 << 33)]

Window = Annotated[Count, Field(le=1 << 16)]

Levels = Annotated[Count, Field(le=64)]


def _is_of_channels(values: Mapping[str, list[float]]) -> Mapping[str, list[float]]:
    if values.keys() != {"mean", "std"} or len(values["mean"]) != len(values["std"]):
        raise ValueError("no mean and std by channel")
    return values


# {"mean": [...], "std": [...]} by channel
Statistics = Annotated[Mapping[str, list[Finite]], AfterValidator(_is_of_channels)]


class Parsed:
    """A dataclass that is read from a file."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make it of values that have its fields, of their types, and no others."""
        try:
            text = json.dumps([values])
            parsed: Self = _adapter(cls).validate_json(text, strict=True)[0]  # type: ignore[arg-type]
            return parsed
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"][1:]))
            raise ValueError(f"{field}: {first['msg'].lower()}") from None


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Of a tuple, for which a configuration is taken; the dataclasses within follow it."""
    alone: Any = GenericAlias(tuple, (cls,))
    return TypeAdapter(alone, config=ConfigDict(extra="forbid"))
