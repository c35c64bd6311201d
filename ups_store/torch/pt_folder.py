"""Folders of `sample_*.pt`, each a dict `{latent, params, bc}` of tensors: the layout that stores replace."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups_store.convert.export import array_attrs, provenance
from ups_store.errors import SourceError
from ups_store.format.metadata import DTYPE_NAMES, dtype_of, is_name
from ups_store.read.protocol import AnyStore
from ups_store.torch.memory import torch_dtype
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
    owned = np.array(view, order="C")
    if owned.dtype.name == "bfloat16":  # which torch doesn't take from NumPy
        return torch.from_numpy(owned.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(owned).to(torch_dtype(owned.dtype))


def read_sample(raw: bytes, *, path: Path) -> dict[str, npt.NDArray[Any]]:
    """Arrays of one `sample_*.pt` by the names that they get in a store; copies, the caller's.

    Loaded with `weights_only`: nothing in the file is executed, whatever it holds.

    Raises:
        SourceError: If it is damaged, or isn't a dict `{latent, params, bc}` of tensors and numbers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated storages, about a file that others wrote
            document = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # the reader raises whatever the damage leads to
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise SourceError(f"torch can't load it: {reason}", kind="damaged_file", path=path) from error
    return {name: _array(name, value, path) for name, value in _flat(document, path).items()}


def _flat(document: Any, path: Path) -> dict[str, Any]:
    keys = set(document) if isinstance(document, dict) else {f"a {type(document).__name__}"}
    if not keys or keys - {"latent", "params", "bc"}:
        found = ", ".join(sorted(map(str, keys)))[:200] or "nothing"
        raise _bad(path, f"expected a dict of latent, params and bc, found {found}")
    flat = {} if document.get("latent") is None else {"latent": document["latent"]}
    for key, prefix in (("params", ""), ("bc", BC_PREFIX)):
        values = {} if document.get(key) is None else document[key]
        if not isinstance(values, dict):
            raise _bad(path, f"{key} is a {type(values).__name__}, expected a dict")
        for name, value in values.items():
            full = f"{prefix}{name}"
            if full in flat or not is_name(full):
                reason = "occurs twice" if full in flat else "is no name of an array"
                raise _bad(path, f"{key}: {full[:140]!r} {reason}")
            flat[full] = value
    if not flat:
        raise _bad(path, "it holds no array")
    return flat


def _array(name: str, value: Any, path: Path) -> npt.NDArray[Any]:
    for kind, dtype in ((bool, np.bool_), (float, np.float64), (int, np.int64)):  # a bool is an int too
        if not isinstance(value, kind):
            continue
        try:
            return np.array(value, dtype)
        except OverflowError as error:
            raise _bad(path, f"{name}: the integer has more than 64 bits") from error
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        found = f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise _bad(path, f"{name} is {found}, expected a dense tensor or a number")
    dtype_name = str(value.dtype).removeprefix("torch.")
    if dtype_name not in DTYPE_NAMES:
        raise _bad(path, f"{name} is {dtype_name}, expected one of {', '.join(DTYPE_NAMES)}")
    if value.numel() * value.itemsize > value.untyped_storage().nbytes():
        raise _bad(path, f"{name} repeats its elements: {tuple(value.shape)} of fewer stored ones")
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    if dtype_name == "bfloat16":
        return dense.view(torch.int16).numpy().view(dtype_of(dtype_name)).copy()
    owned: npt.NDArray[Any] = dense.numpy().copy()
    return owned


def _bad(path: Path, problem: str) -> SourceError:
    return SourceError(problem, kind="damaged_file", path=path)
