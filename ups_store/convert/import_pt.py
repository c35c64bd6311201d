"""`import_pt`: a folder of `.pt` files becomes one store; what was committed is not read again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.convert.pt_file import PtFile, read_regular
from ups_store.errors import SourceError, SpecError, StoreError, needs
from ups_store.format.array_spec import ArraySpec
from ups_store.format.metadata import is_name
from ups_store.printable import counted, one_line
from ups_store.system.paths import path_of
from ups_store.system.urls import check_local
from ups_store.write.create import create
from ups_store.write.target import check_not_source, check_target

with needs("torch"):
    from blake3 import blake3

PATTERN = "sample_*.pt"
COMMIT_BYTES = 16 << 20
LATENT_DIMS = ("sample", "time", "token", "width")
PREFIXES = {"params.": "", "bc.": "bc_"}  # of keys, and what arrays have instead

Sample = Mapping[str, npt.NDArray[Any]]
Shapes = dict[str, tuple[tuple[int | None, ...], np.dtype[Any]]]


class RefusedFilesError(SourceError):
    """Files can't be used. Kind "shapes_differ" where all are whole but unlike the first good one; kind
    "missing_files" where numbers between those of the first and the last file have none.

    Attributes:
        refused: Why, by file name.
    """

    kind = "refused_files"
    refused: dict[str, str]


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        path: The store.
        num_samples: Its samples.
        num_written: Samples that this run committed; fewer where an earlier one was interrupted.
        keys: The files' key of each array.
        refused: Why a file was left out, by file name.
    """

    path: Path
    num_samples: int
    num_written: int
    keys: dict[str, str]
    refused: dict[str, str]


@dataclass(frozen=True)
class Names:
    """Which keys of the files become arrays, and what these are called.

    Attributes:
        map: Names of arrays by key; others are called as their keys, but for `PREFIXES`.
        ignore: Keys that are left out, with all within them.
    """

    map: Mapping[str, str]
    ignore: Collection[str]

    def __post_init__(self) -> None:
        for key, name in self.map.items():
            if not is_name(name):
                raise SpecError("map", expected="names of arrays", found=repr(name)[:140])
            if list(self.map.values()).count(name) > 1:
                raise SpecError("map", expected="a name of its own for each key", found=repr(name)[:140])
            if self._is_ignored(key):
                raise SpecError("map and ignore", expected="different keys", found=repr(key)[:140])

    def read(self, raw: bytes, *, path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
        """The arrays of one file, and the key of each.

        Raises:
            SourceError: As `PtFile`; if two keys give one array, or one of `map` is missing.
        """
        file = PtFile(raw, path=path)
        values = {key: value for key, value in file.values().items() if not self._is_ignored(key)}
        keys: dict[str, str] = {}
        for key in values:
            name = self._name_of(key)
            if name in keys:
                both = f"keys {keys[name][:140]!r} and {key[:140]!r} would both be array {name[:140]!r}"
                raise _bad(path, f"{both}; --map or --ignore one of them")
            if not is_name(name):
                problem = f"key {key[:140]!r}: {name[:140]!r} is no name of an array; --map or --ignore it"
                raise _bad(path, problem)
            keys[name] = key
        if missing := sorted(self.map.keys() - values.keys()):
            raise _bad(path, f"no {missing[0]!r}, which --map names; it has {', '.join(values)}"[:300])
        if not keys:
            raise _bad(path, "it holds no array")
        return {name: file.array(key, values[key]) for name, key in keys.items()}, keys

    def _is_ignored(self, key: str) -> bool:
        parts = key.split(".")
        return any(".".join(parts[: i + 1]) in self.ignore for i in range(len(parts)))

    def _name_of(self, key: str) -> str:
        if key in self.map:
            return self.map[key]
        prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), "")
        return PREFIXES.get(prefix, "") + key.removeprefix(prefix)


def import_pt(
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    pattern: str = PATTERN,
    map: Mapping[str, str] | None = None,
    ignore: Collection[str] = (),
    ragged: Collection[str] = (),
    on_error: Literal["fail", "skip"] = "fail",
    force: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ImportReport:
    """Make a store of the `.pt` files of a folder, a sample each, in order of the numbers in their names.

    Each holds a dict of names to tensors or numbers; dicts within it give dotted keys. A key is the name of
    its array, but `params.NAME` becomes NAME and `bc.NAME` becomes `bc_NAME`. Nothing in a file is executed,
    and torch isn't needed. All are read twice: once to know which are good, once to write.

    Args:
        folder: Where the files are.
        target: The store to make. An interrupted import of the same files is continued.
        pattern: Which files of the folder.
        map: Names of arrays by key, where they aren't to be called as their keys: `{"image": "x"}`.
        ignore: Keys to leave out, with all within them; their values may be anything.
        ragged: Names of the arrays of which every file may have another number of rows, axis 0: they become
            ragged arrays.
        on_error: What to do about files that can't be used, or whose number is missing among the others: fail
            and list them, or leave them out, so that samples behind them move up.
        force: Whether to replace what is there: a finished store, and an unfinished one of other files.
        progress: Called with the number of file bytes that were read since the last call.
    Raises:
        SpecError: If the target exists (kind "exists"), or is one of the files (kind "same_file"); for names
            that no array may have, and ragged arrays that aren't in the files.
        RefusedFilesError: If files can't be used; has the reason of each.
        SourceError: If files change meanwhile.
        IdentityMismatchError: If an unfinished store of other files is at the target.
    """
    if on_error not in ("fail", "skip"):
        raise SpecError("on_error", expected="fail or skip", found=on_error)
    names, report = Names(dict(map or {}), frozenset(ignore)), progress or (lambda nbytes: None)
    check_local(folder)
    paths, path = _files_in(Path(folder), pattern), path_of(target)
    check_not_source(path, paths)
    check_target(path, force=force)  # before a long look at the files
    gaps = _missing_among(paths)
    if gaps and on_error == "fail":
        raise _missing_error(Path(folder), gaps)
    found = _examine(paths, names, frozenset(ragged), report)
    if found.refused and (on_error == "fail" or not found.good):
        raise _refused_error(Path(folder), found)
    if unknown := sorted(found.ragged - found.shapes.keys()):
        raise SpecError("ragged", expected=f"some of {', '.join(found.shapes)}"[:300], found=unknown[0][:140])
    options: dict[str, Any] = {"identity": found.identity(), "attrs": {"source": pattern}}
    with create(target, found.specs(), **options, on_mismatch="restart" if force else "raise") as writer:
        missing = writer.missing().tolist()
        for indices, samples in _batches(missing, list(found.good.items()), names, report):
            batch = {name: [sample[name] for sample in samples] for name in samples[0]}
            stacked = {name: np.stack(batch[name]) for name in batch.keys() - found.ragged}
            writer.commit_many(indices, {**batch, **stacked})
        reasons = {path.name: _reason(error) for path, error in found.refused.items()}
        return ImportReport(writer.finish(), len(found.good), len(missing), found.keys, {**gaps, **reasons})


def folder_nbytes(folder: Path, pattern: str = PATTERN) -> int:
    """Bytes of the regular files that an import would read."""
    return sum(path.stat().st_size for path in _matching(folder, pattern) if path.is_file())


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except (ValueError, NotImplementedError, IndexError, RecursionError):  # as pathlib refuses a pattern
        expected = "one of files in the folder, such as '*.pt'"
        raise SpecError("pattern", expected=expected, found=repr(pattern)[:140]) from None


def _files_in(folder: Path, pattern: str) -> list[Path]:
    found = sorted(_matching(folder, pattern), key=_number_key)
    if not found:
        hint = "check the path, or say which files by --pattern '*.pt'"
        raise SourceError("no samples", path=folder, expected=f"files {pattern}", found="none", hint=hint)
    return found


def _number_key(path: Path) -> tuple[list[str | int], str]:
    """sample_2 comes before sample_10."""
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], path.name


def _missing_among(paths: list[Path]) -> dict[str, str]:
    """Names without a file between two that differ in their last number alone, a run of them as one."""
    gaps = {}
    for one, other in pairwise(paths):
        first, second = (re.fullmatch(r"(.*?)(\d+)(\D*)", path.name, re.DOTALL) for path in (one, other))
        if first is None or second is None or first.group(1, 3) != second.group(1, 3):
            continue
        before, after = int(first[2]), int(second[2])
        ends = dict.fromkeys((before + 1, after - 1)) if after - before > 1 else ()
        names = [f"{first[1]}{number:0{len(first[2])}}{first[3]}" for number in ends]
        if names:
            gaps[" to ".join(names)] = "missing"
    return gaps


def _missing_error(folder: Path, gaps: dict[str, str]) -> RefusedFilesError:
    first, *others = gaps
    error = RefusedFilesError(
        "numbers are missing among the files, and samples behind them would move up",
        kind="missing_files",
        path=folder,
        expected="a file for every number",
        found=f"no {one_line(first)}" + (f", and {counted(len(others), 'more gap')}" if others else ""),
        hint="bring them back, or import the others, in their order, by --on-error skip",
    )
    error.refused = gaps
    return error


@dataclass
class _Examined:
    """What is in the files.

    Attributes:
        good: Those that become samples, in order, and blake3 of their bytes.
        shapes: Shape and dtype of each array in the first good one, which the others have to have too.
        keys: The files' key of each array.
        refused: What is wrong with the others.
        ragged: Arrays whose number of rows may differ.
        lengths: Rows of each of these, by file.
    """

    ragged: frozenset[str]
    good: dict[Path, bytes] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    refused: dict[Path, SourceError | OSError] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)

    def add(self, path: Path, raw: bytes, names: Names) -> None:
        """Take a file in; raises what is wrong with it."""
        sample, keys = names.read(raw, path=path)
        for name in sorted(self.ragged & sample.keys()):
            if not sample[name].ndim:
                raise SourceError(f"array {name!r} is a single number, so it can't be ragged", path=path)
        shapes = {name: (self._fixed(name, value.shape), value.dtype) for name, value in sample.items()}
        if self.good:
            self._check_same(shapes, path)
        else:
            self.shapes, self.keys = shapes, keys
        self.good[path] = blake3(raw).digest()
        for name in self.ragged & sample.keys():
            self.lengths.setdefault(name, []).append(len(sample[name]))

    def _fixed(self, name: str, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        """What all samples have in common of an array's shape: of a ragged one not the number of rows."""
        return (None, *shape[1:]) if name in self.ragged and shape else shape

    def _check_same(self, shapes: Shapes, path: Path) -> None:
        for name in sorted(shapes.keys() | self.shapes.keys()):
            if shapes.get(name) != self.shapes.get(name):
                here, there = (_described(arrays.get(name)) for arrays in (shapes, self.shapes))
                raise SourceError(
                    f"array {name!r} is {here}, but {there} in {next(iter(self.good)).name}",
                    kind="shapes_differ",
                    path=path,
                    array=name,
                    expected=there,
                    found=here,
                )

    def specs(self) -> dict[str, ArraySpec]:
        """The arrays of the store."""
        specs = {}
        for name, (shape, dtype) in self.shapes.items():
            dims = LATENT_DIMS if name == "latent" and len(shape) + 1 == len(LATENT_DIMS) else None
            lengths = self.lengths.get(name)
            specs[name] = ArraySpec((len(self.good), *shape), dtype, dims=dims, lengths=lengths)
        return specs

    def identity(self) -> dict[str, Any]:
        """One digest over names and digests: the identity stays small whatever N is."""
        everything = blake3()
        for path, digest in self.good.items():
            everything.update(path.name.encode("utf-8", "surrogateescape") + b"\0" + digest)
        return {
            "kind": "imported",
            "encoder": "unknown",
            "reader": {"name": "pt_folder", "version": 1},
            "files": {"num": len(self.good), "blake3": everything.hexdigest()},
            "keys": self.keys,
        }


def _examine(
    paths: list[Path], names: Names, ragged: frozenset[str], progress: Callable[[int], None]
) -> _Examined:
    """Look at every file; the first good one is the model of the others."""
    found = _Examined(ragged)
    for path in paths:
        try:
            raw = read_regular(path)
            progress(len(raw))
            found.add(path, raw, names)
        except (SourceError, OSError) as error:
            found.refused[path] = error
    return found


def _described(array: tuple[tuple[int | None, ...], np.dtype[Any]] | None) -> str:
    return f"{array[1]} {array[0]}" if array else "absent"


def _reason(error: SourceError | OSError) -> str:
    return error.problem if isinstance(error, StoreError) else (error.strerror or str(error)).lower()


def _refused_error(folder: Path, found: _Examined) -> RefusedFilesError:
    """The error that lists all files that can't be used."""
    reasons = {path.name: _reason(error) for path, error in found.refused.items()}
    kinds = {error.kind if isinstance(error, SourceError) else "" for error in found.refused.values()}
    are_whole = kinds == {"shapes_differ"}
    hint = (
        "take arrays that differ in their number of rows by --ragged NAME; leave other files out by "
        "--on-error skip, or other arrays by --ignore KEY"
        if are_whole
        else "repair or remove these files, or leave them out by --on-error skip; or keys by --ignore KEY"
    )
    error = RefusedFilesError(
        f"{len(reasons)} of {len(reasons) + len(found.good)} files can't be used",
        kind="shapes_differ" if are_whole else None,
        path=folder,
        hint="".join([hint, *(f"\n  {one_line(name)}: {reason}" for name, reason in reasons.items())]),
    )
    error.refused = reasons
    return error


def _bad(path: Path, problem: str) -> SourceError:
    return SourceError(problem, kind="damaged_file", path=path)


def _batches(
    missing: list[int], good: list[tuple[Path, bytes]], names: Names, progress: Callable[[int], None]
) -> Iterator[tuple[list[int], list[Sample]]]:
    indices: list[int] = []
    samples: list[Sample] = []
    nbytes = 0
    for i in missing:
        path, digest = good[i]
        raw = read_regular(path)
        if blake3(raw).digest() != digest:
            hint = "import the folder again when no program writes to it"
            raise SourceError("the file changed during the import", path=path, hint=hint)
        indices.append(i)
        samples.append(names.read(raw, path=path)[0])
        progress(len(raw))
        nbytes += sum(value.nbytes for value in samples[-1].values())
        if nbytes >= COMMIT_BYTES:
            yield indices, samples
            indices, samples, nbytes = [], [], 0
    if indices:
        yield indices, samples
