"""`import_pt`: a folder of `sample_*.pt` files becomes one store; what was committed is not read again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import SourceError, SpecError, needs
from ups_store.format.array_spec import ArraySpec
from ups_store.system.paths import check_local, path_of
from ups_store.write.create import create
from ups_store.write.target import check_not_source, check_target

with needs("torch"):
    from blake3 import blake3

READER = "ups_store.torch.pt_folder"  # loaded when it is needed: this module must not import torch
PATTERN = "sample_*.pt"
COMMIT_BYTES = 16 << 20
LATENT_DIMS = ("sample", "time", "token", "width")

Sample = Mapping[str, npt.NDArray[Any]]
Read = Callable[..., Sample]  # of the bytes of a file, and its `path` for messages
Good = dict[Path, bytes]  # the files that become samples, in order, and blake3 of their bytes


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        path: The store.
        num_samples: Its samples.
        num_written: Samples that this run committed; fewer where an earlier one was interrupted.
        skipped: Why a file was left out, by file name.
    """

    path: Path
    num_samples: int
    num_written: int
    skipped: dict[str, str]


def import_pt(
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    on_error: Literal["fail", "skip"] = "fail",
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ImportReport:
    """Make a store of the files `sample_*.pt` of a folder, in order of their numbers.

    Each holds a dict with `latent` (a tensor), `params` and `bc` (dicts of tensors or numbers), any of them
    absent or None. They become the arrays `latent` (N, ...), NAME (N, ...) and `bc_NAME` (N, ...). Files are
    loaded with `weights_only`: nothing in them is executed. All are read twice: once to know which are good,
    once to write.

    Args:
        folder: Where the files are.
        target: The store to make. An interrupted import of the same files is continued.
        on_error: What to do about files that can't be used: fail and list them, or leave them out.
        force: Whether to replace what is there: a finished store, and an unfinished one of other files.
        progress: Called with the number of file bytes that were read since the last call.
    Raises:
        SpecError: If the target exists (kind "exists"), or is one of the files (kind "same_file").
        SourceError: If files can't be used, or change meanwhile; names them with reasons.
        IdentityMismatchError: If an unfinished store of other files is at the target.
    """
    if on_error not in ("fail", "skip"):
        raise SpecError("on_error", expected="fail or skip", found=on_error)
    read: Read = import_module(READER).read_sample
    report = progress or (lambda nbytes: None)
    check_local(folder)
    paths, path = _files_in(Path(folder)), path_of(target)
    check_not_source(path, paths)
    check_target(path, force=force)  # before a long look at the files
    good, specs, skipped = _examine(paths, read, report)
    if skipped and (on_error == "fail" or not good):
        raise _unusable(Path(folder), skipped)
    options: dict[str, Any] = {"identity": _identity(good), "attrs": {"source": PATTERN}}
    with create(target, specs, **options, on_mismatch="restart" if force else "raise") as writer:
        missing = writer.missing().tolist()
        for indices, samples in _batches(missing, list(good.items()), read, report):
            writer.commit_many(indices, {name: np.stack([s[name] for s in samples]) for name in samples[0]})
        return ImportReport(writer.finish(), len(good), len(missing), skipped)


def _files_in(folder: Path) -> list[Path]:
    found = sorted(folder.glob(PATTERN), key=_number_key)
    if not found:
        hint = "check the path"
        raise SourceError("no samples", path=folder, expected=f"files {PATTERN}", found="none", hint=hint)
    return found


def _number_key(path: Path) -> tuple[list[str | int], str]:
    """sample_2 comes before sample_10."""
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], path.name


def _examine(
    paths: list[Path], read: Read, progress: Callable[[int], None]
) -> tuple[Good, dict[str, ArraySpec], dict[str, str]]:
    """Good files, the arrays that they make, and why others are no good; the first good one is the model."""
    good: Good = {}
    skipped: dict[str, str] = {}
    model: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for path in paths:
        try:
            raw = path.read_bytes()
            sample = read(raw, path=path)
            progress(len(raw))
            found = {name: (value.shape, value.dtype) for name, value in sample.items()}
            model = model or found
            _check_same(found, model, path, good)
            good[path] = blake3(raw).digest()
        except (SourceError, OSError) as error:
            skipped[path.name] = error.problem if isinstance(error, SourceError) else str(error)
    specs = {name: _spec(name, (len(good), *shape), dtype) for name, (shape, dtype) in model.items()}
    return good, specs, skipped


def _check_same(found: Mapping[str, Any], model: Mapping[str, Any], path: Path, good: Good) -> None:
    for name in sorted(found.keys() | model.keys()):
        if found.get(name) != model.get(name):
            here, there = (_described(arrays.get(name)) for arrays in (found, model))
            raise SourceError(f"array {name!r} is {here}, but {there} in {next(iter(good)).name}", path=path)


def _described(array: tuple[tuple[int, ...], np.dtype[Any]] | None) -> str:
    return f"{array[1]} {array[0]}" if array else "absent"


def _spec(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArraySpec:
    dims = LATENT_DIMS if name == "latent" and len(shape) == len(LATENT_DIMS) else None
    return ArraySpec(shape, dtype, dims=dims)


def _unusable(folder: Path, skipped: dict[str, str]) -> SourceError:
    lines = [f"  {name}: {reason}" for name, reason in skipped.items()]
    return SourceError(
        "\n".join([f"{len(lines)} files can't be used", *lines]) + "\n",
        kind="damaged_files",
        path=folder,
        hint="repair or remove them, or leave them out: --on-error skip",
    )


def _identity(good: Good) -> dict[str, Any]:
    """One digest over names and digests: the identity stays small whatever N is."""
    everything = blake3()
    for path, digest in good.items():
        everything.update(path.name.encode("utf-8", "surrogateescape") + b"\0" + digest)
    files = {"num": len(good), "blake3": everything.hexdigest()}
    return {
        "kind": "imported",
        "encoder": "unknown",
        "reader": {"name": "pt_folder", "version": 1},
        "files": files,
    }


def _batches(
    missing: list[int], good: list[tuple[Path, bytes]], read: Read, progress: Callable[[int], None]
) -> Iterator[tuple[list[int], list[Sample]]]:
    indices: list[int] = []
    samples: list[Sample] = []
    nbytes = 0
    for i in missing:
        path, digest = good[i]
        raw = path.read_bytes()
        if blake3(raw).digest() != digest:
            hint = "import the folder again when no program writes to it"
            raise SourceError("the file changed during the import", path=path, hint=hint)
        indices.append(i)
        samples.append(read(raw, path=path))
        progress(len(raw))
        nbytes += sum(value.nbytes for value in samples[-1].values())
        if nbytes >= COMMIT_BYTES:
            yield indices, samples
            indices, samples, nbytes = [], [], 0
    if indices:
        yield indices, samples
