"""Fields of arrays that a test makes, in a store in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import ups_store
from ups.data.fields import Fields, FieldsInfo


def fields_of(info: FieldsInfo, arrays: Mapping[str, Any], *, times: Any = None) -> Fields:
    """As a store of `arrays` would give them; `times` are those of all samples, (T,), or of each, (N, T)."""
    values = {name: np.asarray(array) for name, array in arrays.items()}
    constants, dims = {}, {"fields": ("sample", "time", *"xyz"[: info.grid.ndim], "channel")}
    if times is not None and np.ndim(times) == 1:
        constants["t"], dims["t"] = np.asarray(times), ("time",)
    elif times is not None:
        values["t"] = np.asarray(times)
    specs = {
        name: ups_store.ArraySpec(each.shape, each.dtype, dims=dims.get(name))
        for name, each in values.items()
    }
    given: dict[str, Any] = {"constants": constants, "dims": {name: dims[name] for name in constants}}
    with ups_store.create(":memory:", specs, identity={}, **given) as writer:
        writer.commit_many(range(len(values["fields"])), values)
        return Fields(ups_store.open(writer.finish()), info=info, origin="memory", identity="files memory")
