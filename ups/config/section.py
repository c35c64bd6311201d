"""What sections of the configuration have in common: strictness, and the types of their numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from ups.errors import needs
from ups.parsing import Count as Count
from ups.parsing import CountOrZero as CountOrZero
from ups.parsing import Fraction as Fraction
from ups.parsing import NotNegative as NotNegative
from ups.parsing import Positive as Positive

with needs("train"):
    from pydantic import BaseModel, BeforeValidator, ConfigDict

    from ups_store.build import long_dtype

LatentDtype = Annotated[Literal["float16", "bfloat16", "float32"], BeforeValidator(long_dtype)]


class Section(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
