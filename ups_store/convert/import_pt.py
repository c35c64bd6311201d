"""`import_pt`: a folder of `.pt` files becomes one store; what was committed is not read again."""

from __future__ import annotations

import io
import os
import pickletools
import re
import stat
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store.errors import SourceError, SpecError, StoreError, needs
from ups_store.format.metadata import DTYPE_NAMES, MAX_ARRAYS, ArraySpec, dtype_of, is_name
from ups_store.printable import counted, one_line
from ups_store.system import files, memory
from ups_store.system.paths import check_local, path_of
from ups_store.writing.create import create
from ups_store.writing.target import check_not_source, check_target

with needs("torch"):
    import torch
    from blake3 import blake3

PATTERN = "sample_*.pt"
COMMIT_BYTES = 16 << 20
LATENT_DIMS = ("sample", "time", "token", "width")
PREFIXES = {"params.": "", "bc.": "bc_"}  # of keys, and what arrays have instead

# Bounds of what a file may claim before anything is made of it.
MAX_DIRECTORY_BYTES = 1 << 20  # of its archive; 46 of them become an object of about 500
MAX_PICKLE_BYTES = 4 << 20  # of all that isn't numbers of tensors; each may become an object of about 60
MAX_NODES = 1 << 20  # of a key with all tuples within it, which may share inner ones
MAX_KEYS, MAX_DEPTH, MAX_KEY_LENGTH = 2 * MAX_ARRAYS, 32, 1000

_NOT_SAVED = "it is cut off, damaged, or not what torch.save writes since version 1.6"
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

Sample = dict[str, npt.NDArray[Any]]
Shapes = dict[str, tuple[tuple[int | None, ...], np.dtype[Any]]]


class RefusedFilesError(SourceError):
    """Files can't be used. Kind "shapes_differ" where all are whole but unlike the first good one; kind
    "missing_files" where numbers between those of the first and the last file have none.

    Attributes:
        refused: Why, by file name.
    """

    kind = "refused_files"

    def __init__(self, problem: str, refused: dict[str, str], **context: Any) -> None:
        super().__init__(problem, **context)
        self.refused = refused


@dataclass(frozen=True)
class ImportReport:
    """What an import did."""

    path: Path
    num_samples: int
    num_written: int  # samples that this run committed; fewer where an earlier one was interrupted
    keys: dict[str, str]  # the files' key of each array
    refused: dict[str, str]  # why a file was left out, by file name


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
    its array, but `params.NAME` becomes NAME and `bc.NAME` becomes `bc_NAME`. They are read by `torch.load`
    with `weights_only=True`: nothing in a file is executed. All are read twice: once to know which are good,
    once to write.

    Args:
        folder: Where the files are.
        target: The store to make. An interrupted import of the same files is continued.
        pattern: Which files of the folder.
        map: Names of arrays by key, where they aren't to be called as their keys: `{"image": "x"}`.
        ignore: Keys to leave out, with all within them; their values needn't be tensors.
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
    is_strict = on_error == "fail"
    contents = _look_at(Path(folder), paths, names, frozenset(ragged), must_be_good=is_strict, report=report)
    options: dict[str, Any] = {"identity": contents.identity(), "attrs": {"source": pattern}}
    with create(target, contents.specs(), **options, on_mismatch="restart" if force else "raise") as writer:
        missing, good = writer.missing().tolist(), list(contents.good.items())
        batch: dict[int, Sample] = {}
        nbytes = 0
        for i in missing:
            file, digest = good[i]
            raw = _read_regular(file)
            if blake3(raw).digest() != digest:
                hint = "import the folder again when no program writes to it"
                raise SourceError("the file changed during the import", path=file, hint=hint)
            batch[i] = names.read(raw, file)[0]
            report(len(raw))
            nbytes += sum(value.nbytes for value in batch[i].values())
            if nbytes >= COMMIT_BYTES or i == missing[-1]:
                values = {name: [sample[name] for sample in batch.values()] for name in contents.shapes}
                stacked = {name: np.stack(values[name]) for name in values.keys() - contents.lengths.keys()}
                writer.commit_many(list(batch), {**values, **stacked})
                batch, nbytes = {}, 0
        return ImportReport(writer.finish(), len(good), len(missing), contents.keys, contents.refused)


def folder_nbytes(folder: Path, pattern: str = PATTERN) -> int:
    """Add up the bytes of the regular files that an import would read."""
    return sum(path.stat().st_size for path in _matching(folder, pattern) if path.is_file())


def _matching(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except (ValueError, NotImplementedError, IndexError, RecursionError):  # as pathlib refuses a pattern
        expected = "one of files in the folder, such as '*.pt'"
        raise SpecError("pattern", expected=expected, found=repr(pattern)[:140]) from None


def _files_in(folder: Path, pattern: str) -> list[Path]:
    """The files in order of their numbers: sample_2 comes before sample_10."""

    def key(path: Path) -> tuple[list[str | int], str]:
        words = re.split(r"(\d+)", path.name)
        return [int(word) if i % 2 else word for i, word in enumerate(words)], path.name

    paths = sorted(_matching(folder, pattern), key=key)
    if not paths:
        if not folder.is_dir():
            hint = "check the path; `import-pt` takes the folder that holds the files"
            raise SourceError("no such folder", path=folder, hint=hint)
        hint = "check the path, or say which files by --pattern '*.pt'"
        raise SourceError("no samples", path=folder, expected=f"files {pattern}", found="none", hint=hint)
    return paths


def _missing_among(paths: list[Path]) -> dict[str, str]:
    """Names without a file between two that differ in their last number alone, a run of them as one."""
    gaps = {}
    for one, other in pairwise(paths):
        first, second = (re.fullmatch(r"(.*?)(\d+)(\D*)", path.name, re.DOTALL) for path in (one, other))
        if first is None or second is None or first.group(1, 3) != second.group(1, 3):
            continue
        before, after = int(first[2]), int(second[2])
        ends = dict.fromkeys((before + 1, after - 1)) if after - before > 1 else ()
        if names := [f"{first[1]}{number:0{len(first[2])}}{first[3]}" for number in ends]:
            gaps[" to ".join(names)] = "missing"
    return gaps


def _look_at(
    folder: Path,
    paths: list[Path],
    names: Names,
    ragged: frozenset[str],
    *,
    must_be_good: bool,
    report: Callable[[int], None],
) -> _Contents:
    """Read all files once, to know which are good.

    Raises:
        RefusedFilesError: If there are others, or missing ones, and all must be good; or if none is.
        SpecError: If a ragged array isn't in them.
    """
    contents = _Contents(refused=_missing_among(paths))
    if contents.refused and must_be_good:
        first, *others = contents.refused
        more = f", and {counted(len(others), 'more gap')}" if others else ""
        raise RefusedFilesError(
            "numbers are missing among the files, and samples behind them would move up",
            contents.refused,
            kind="missing_files",
            path=folder,
            expected="a file for every number",
            found=f"no {one_line(first)}{more}",
            hint="bring them back, or import the others, in their order, by --on-error skip",
        )
    kinds: set[str] = set()
    reasons: dict[str, str] = {}
    for path in paths:
        try:
            raw = _read_regular(path)
            report(len(raw))
            sample, keys = names.read(raw, path)
            shapes = _shapes_of(sample, ragged, path)
            if not contents.good:
                contents.shapes, contents.keys = shapes, keys
            for name in sorted(shapes.keys() | contents.shapes.keys()):
                if shapes.get(name) != contents.shapes.get(name):
                    raise _differing(name, shapes, contents, path)
        except (SourceError, OSError) as error:
            if isinstance(error, StoreError):
                kinds.add(error.kind)
                reasons[path.name] = error.problem
            else:
                kinds.add("")
                reasons[path.name] = (error.strerror or str(error)).lower()
            continue
        contents.good[path] = blake3(raw).digest()
        for name in ragged & sample.keys():
            contents.lengths.setdefault(name, []).append(len(sample[name]))
    if reasons and (must_be_good or not contents.good):
        hint = (
            "take arrays that differ in their number of rows by --ragged NAME; leave other files out by "
            "--on-error skip, or other arrays by --ignore KEY"
            if kinds == {"shapes_differ"}
            else "repair or remove these files, or leave them out by --on-error skip; or keys by --ignore KEY"
        )
        raise RefusedFilesError(
            f"{len(reasons)} of {len(paths)} files can't be used",
            reasons,
            kind="shapes_differ" if kinds == {"shapes_differ"} else None,
            path=folder,
            hint="".join([hint, *(f"\n  {one_line(name)}: {reason}" for name, reason in reasons.items())]),
        )
    if unknown := sorted(ragged - contents.shapes.keys()):
        expected = f"some of {', '.join(contents.shapes)}"[:300]
        raise SpecError("ragged", expected=expected, found=unknown[0][:140])
    contents.refused |= reasons
    return contents


def _shapes_of(sample: Sample, ragged: frozenset[str], path: Path) -> Shapes:
    for name in ragged & sample.keys():
        if not sample[name].ndim:
            raise SourceError(f"array {name!r} is a single number, so it can't be ragged", path=path)
    return {
        name: ((None, *value.shape[1:]) if name in ragged else value.shape, value.dtype)
        for name, value in sample.items()
    }


def _differing(name: str, shapes: Shapes, contents: _Contents, path: Path) -> SourceError:
    here, there = (
        f"{array[1]} {array[0]}" if (array := arrays.get(name)) else "absent"
        for arrays in (shapes, contents.shapes)
    )
    problem = f"array {name!r} is {here}, but {there} in {next(iter(contents.good)).name}"
    where: dict[str, Any] = {"path": path, "array": name}
    return SourceError(problem, kind="shapes_differ", **where, expected=there, found=here)


@dataclass(frozen=True)
class Names:
    """Which keys of the files become arrays, and what these are called; see `import_pt`."""

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

    def read(self, raw: bytes, path: Path) -> tuple[Sample, dict[str, str]]:
        """Read the arrays of one file, and the key of each."""
        document = _load_pickle(raw, path)
        if not isinstance(document, dict):
            raise _bad_file(path, f"expected a dict of names to tensors, found {_described(document)}")
        values = {key: value for key, value in _leaves(document, path) if not self._is_ignored(key)}
        keys: dict[str, str] = {}
        for key in values:
            prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), "")
            name = self.map.get(key, PREFIXES.get(prefix, "") + key.removeprefix(prefix))
            if name in keys:
                both = f"keys {keys[name][:140]!r} and {key[:140]!r} would both be array {name[:140]!r}"
                raise _bad_file(path, f"{both}; --map or --ignore one of them")
            if not is_name(name):
                problem = f"key {key[:140]!r}: {name[:140]!r} is no name of an array; --map or --ignore it"
                raise _bad_file(path, problem)
            keys[name] = key
        if missing := sorted(self.map.keys() - values.keys()):
            raise _bad_file(path, f"no {missing[0]!r}, which --map names; it has {', '.join(values)}"[:300])
        if not keys:
            raise _bad_file(path, "it holds no array")
        sample, expanded = {}, 0
        for name, key in keys.items():
            sample[name] = _array(key, values[key], path)
            expanded += sample[name].nbytes  # of one storage, together they may be larger than the file
            if expanded > len(raw) and 2 * expanded > (available := memory.available_bytes()):
                problem = f"{key[:100]} takes too much memory: {expanded:,} bytes of tensors from"
                raise _bad_file(path, f"{problem} {len(raw):,} bytes, {available:,} bytes are available")
        return sample, keys

    def _is_ignored(self, key: str) -> bool:
        words = key.split(".")
        return any(".".join(words[: i + 1]) in self.ignore for i in range(len(words)))


@dataclass
class _Contents:
    """What is in the files."""

    good: dict[Path, bytes] = field(default_factory=dict)  # files that become samples, blake3 of their bytes
    shapes: Shapes = field(default_factory=dict)  # of the first good one, which the others have to have too
    keys: dict[str, str] = field(default_factory=dict)  # the files' key of each array
    lengths: dict[str, list[int]] = field(default_factory=dict)  # rows of each ragged array, by file
    refused: dict[str, str] = field(default_factory=dict)  # why, by file name

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


def _bad_file(path: Path, problem: str) -> SourceError:
    return SourceError(problem, kind="damaged_file", path=path)


def _read_regular(path: Path) -> bytes:
    """Read a regular file; of a FIFO, a device or a folder nothing is read."""
    with files.opened(path) as fd:
        mode = files.mode(fd)
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "something else")
            raise SourceError(f"expected a regular file, found {kind}", kind="not_a_file", path=path)
        nbytes, available = files.size(fd), memory.available_bytes()
        if 2 * nbytes > available:
            limit = f"memory holds {available:,} bytes, and reading it takes twice its size"
            raise SourceError(f"{nbytes:,} bytes: {limit}", kind="too_large", path=path)
        return files.read_at(fd, 0, nbytes)


def _load_pickle(raw: bytes, path: Path) -> Any:
    """Load a file by `torch.load`, once nothing in it can take more memory or time than its bytes."""
    try:
        if not raw.startswith(b"PK\3\4") or raw[-22:-18] != b"PK\5\6" or raw[-2:] != b"\0\0":
            raise _bad_file(path, _NOT_SAVED)  # with a comment, readers could find different directories
        is_zip64 = raw[-42:-38] == b"PK\6\7" and raw[-98:-94] == b"PK\6\6"  # APPNOTE 4.3.14, 4.3.15
        directory_nbytes = int.from_bytes(raw[-58:-50] if is_zip64 else raw[-10:-6], "little")
        if directory_nbytes > MAX_DIRECTORY_BYTES:
            raise _bad_file(path, f"its directory is longer than {MAX_DIRECTORY_BYTES:,} bytes")
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise _bad_file(path, "its entries are compressed, which torch.save never does")
            expanded = sum(entry.file_size for entry in entries)
            if expanded > len(raw) or len(entries) > len(archive.NameToInfo):
                raise _bad_file(path, f"it expands to {expanded:,} bytes, the file has {len(raw):,} bytes")
            if damaged := archive.testzip():  # torch.load doesn't look at checksums
                raise _bad_file(path, f"its entry {damaged[:100]} is damaged")
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            _check_pickle(archive.read(pickled), path)
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except SourceError:
        raise
    except Exception as error:  # zipfile, pickletools and torch raise whatever the damage leads to
        if unknown := re.search(r"GLOBAL (\S+)", str(error)):
            problem = f"it holds a {unknown[1][:100]}, and torch.load reads tensors, numbers and texts only"
            raise _bad_file(path, problem) from None
        raise _bad_file(path, _NOT_SAVED) from error


def _check_pickle(stream: bytes, path: Path) -> None:
    """Refuse a pickle with tuples that share inner ones so often that to hash one would never end."""
    if len(stream) > MAX_PICKLE_BYTES:
        problem = f"{len(stream):,} bytes of it aren't tensors, expected at most {MAX_PICKLE_BYTES:,}"
        raise _bad_file(path, problem)
    stack: list[int] = []  # of each object how many there are within it, shared ones counted again
    memo: dict[int, int] = {}
    marks: list[int] = []
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif opcode.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE", "PUT"):
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif opcode.name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(argument or 0)])
        else:
            num = len([kind for kind in opcode.stack_before if kind is not pickletools.stackslice])
            first = len(stack) - num
            if pickletools.markobject in opcode.stack_before:
                first = marks.pop() - (num - 1)
            nodes = 1 + sum(stack[first:])
            del stack[first:]
            if nodes > MAX_NODES:
                raise _bad_file(path, f"its pickle has tuples of more than {MAX_NODES:,} objects")
            is_hashed = opcode.name.startswith("TUPLE") or opcode.name in ("REDUCE", "NEWOBJ")
            stack += [nodes if is_hashed else 1] * len(opcode.stack_after)


def _leaves(document: dict[Any, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Yield everything but None by dotted key; few bytes make many dicts, which share inner ones."""
    num_seen = 0

    def visit(prefix: str, document: dict[Any, Any], depth: int) -> Iterator[tuple[str, Any]]:
        nonlocal num_seen
        for key, value in document.items():
            num_seen += 1
            is_short = isinstance(key, str | float | None) or (isinstance(key, int) and key.bit_length() < 64)
            word = str(key) if is_short else f"({type(key).__name__})"
            if num_seen > MAX_KEYS or depth > MAX_DEPTH or len(word) > MAX_KEY_LENGTH:
                limits = f"{MAX_KEYS} keys, {MAX_DEPTH} dicts within each other, {MAX_KEY_LENGTH} letters"
                raise _bad_file(path, f"it has more than {limits} of a key")
            if isinstance(value, dict):
                yield from visit(f"{prefix}{word}.", value, depth + 1)
            elif value is not None:
                yield f"{prefix}{word}", value

    return visit("", document, 1)


def _array(key: str, value: Any, path: Path) -> npt.NDArray[Any]:
    """A tensor or number as an array that owns its bytes, or shares them with the tensor."""
    for kind, dtype in ((bool, np.bool_), (float, np.float64), (int, np.int64)):  # a bool is an int too
        if isinstance(value, kind):
            try:
                return np.array(value, dtype)
            except OverflowError:
                raise _bad_file(path, f"{key[:100]} is an integer of more than 64 bits") from None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        problem = f"{key[:100]} is {_described(value)}, expected a dense tensor or a number"
        raise _bad_file(path, problem)
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise _bad_file(path, f"{key[:100]} is {name}, expected one of {', '.join(DTYPE_NAMES)}")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        problem = f"{key[:100]} repeats its elements: {tuple(value.shape)} of fewer stored ones"
        raise _bad_file(path, problem)
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    if name == "bfloat16":
        return dense.view(torch.int16).numpy().view(dtype_of(name))
    array: npt.NDArray[Any] = dense.numpy()
    return array


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor" if value.layout == torch.strided else f"a tensor of layout {value.layout}"
    return f"a {type(value).__name__}"[:120]
