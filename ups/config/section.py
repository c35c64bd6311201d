"""What sections of the configuration have in common: strictness, and the types of their numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from ups.errors import needs

with needs("train"):
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

    from ups_store.build import long_dtype

# strict: `yes` isn't 1 and 1.5 isn't a count
Count = Annotated[int, Field(strict=True, ge=1)]

CountOrZero = Annotated[int, Field(strict=True, ge=0)]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

LatentDtype = Annotated[Literal["float16", "bfloat16", "float32"], BeforeValidator(long_dtype)]


class Section(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
