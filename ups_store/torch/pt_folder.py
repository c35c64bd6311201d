"""Stores as folders of `sample_*.pt`, each a dict `{latent, params, bc}`: the layout that they replace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.convert.export import array_attrs, provenance
from ups_store.read.base import AnyStore
from ups_store.torch.memory import as_tensor
from ups_store.write.target import new_folder, payload_nbytes

BC_PREFIX = "bc_"


def write(store: AnyStore, target: Path, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write a file per sample, `constants.pt` and `store.json`.

    Array `latent` goes to the key `latent`, arrays `bc_NAME` to `bc[NAME]`, all others to `params`.
    """
    with new_folder(target, marker="store.json", force=force, needed_bytes=payload_nbytes(store)) as folder:
        digits = max(6, len(str(len(store))))
        for i in range(len(store)):
            sample = {name: _tensor(value) for name, value in store.sample(i).items()}
            torch.save(_nested(sample), folder / f"sample_{i:0{digits}}.pt")
            progress(sum(value.nbytes for value in sample.values()))
        constants = {name: _tensor(value) for name, value in store.constants.items()}
        if constants:
            torch.save(constants, folder / "constants.pt")
        (folder / "store.json").write_text(json.dumps(_document(store), ensure_ascii=False, indent=1) + "\n")


def _document(store: AnyStore) -> dict[str, Any]:
    arrays = {name: array_attrs(store, name) for name in store.arrays}
    dims = {name: list(names) for name, names in store.dims.items()}
    return {**provenance(store), "attrs": dict(store.attrs), "dims": dims, "array_attrs": arrays}


def _nested(sample: dict[str, Tensor]) -> dict[str, Any]:
    nested: dict[str, Any] = {"params": {}, "bc": {}}
    for name, value in sample.items():
        if name == "latent":
            nested["latent"] = value
        elif name.startswith(BC_PREFIX):
            nested["bc"][name.removeprefix(BC_PREFIX)] = value
        else:
            nested["params"][name] = value
    return nested


def _tensor(view: npt.NDArray[Any]) -> Tensor:
    """A tensor that owns its bytes: `torch.save` writes the whole storage that a view lies in."""
    return as_tensor(np.array(view, order="C"))
