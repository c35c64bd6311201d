"""Answers requests with tensorstore: its driver `zarr3` over its key-value store `zip`."""

from __future__ import annotations

import tensorstore as ts
from answering import answer_all


def read(store: str, array: str, first: int | None) -> tuple[list[int], bytes]:
    kvstore = {"driver": "zip", "base": {"driver": "file", "path": store}, "path": f"{array}/"}
    opened = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    selected = opened if first is None else opened[first:]
    value = selected.read().result()
    return list(value.shape), value.tobytes()


answer_all(read)
