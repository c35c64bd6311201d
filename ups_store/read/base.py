"""`AnyStore`: what every kind of store can do, whatever its samples lie in; the type of `ups_store.open`."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import numpy.typing as npt

from ups_store import module_above
from ups_store.errors import ArrayNotFoundError, FormatError, SpecError
from ups_store.format.metadata import SAMPLE_DIM, ArrayMeta, ArraySpec, dtype_of
from ups_store.format.ragged import LENGTHS
from ups_store.format.root import RootMeta
from ups_store.printable import counted, one_line
from ups_store.read.gather import BatchArguments, Indices, Samples, check_effect, check_indices, names_of
from ups_store.read.ragged import Form, check_form, check_no_window, padded

MAX_ROWS = 20  # arrays that are shown; there may be thousands
_MAX_TEXT = 160  # characters of the identity that are shown
_SAMPLES_WITHOUT_BYTES = 1 << 28  # a file may claim any number of samples that have none

if TYPE_CHECKING:
    from xarray import Dataset

    from ups_store.read.preload import Mode, PreloadReport, Request
    from ups_store.read.verify import Report
    from ups_store.system.files import Progress


class AnyStore(ABC):
    """An open store: mapped (`Store`), in partitions, packed, at a URL, or in a device's memory.

    What a kind can't do, such as giving a packed array as one piece of memory, is a `SpecError` of kind
    "unsupported". Samples are NumPy's arrays, of a device store tensors. One mistake is one kind of error in
    all of them: `SampleIndexError` for a sample that isn't there, `ArrayNotFoundError` for a name,
    `SpecError` of kind "index" for what is no sample number (floating-point numbers and masks too),
    `StoreClosedError` after `close`.

    Attributes:
        path: Where it is, absolute.
        identity: What the caller of `create` said that the content was made from, as plain JSON values: what
            was a tuple there is a list here, and NumPy's numbers are Python's.
        identity_document: The identity with the arrays and the constants' digests around it (spec 8.1).
        partition: Number of the partition, and of partitions; None for a store of a whole split.
        config_hash: sha256 of the identity document, 64 hexadecimal digits.
        attrs: Attributes of the root group.
        version: Format version, `(major, minor)`.
        metas: Metadata of the arrays by name, constants included; of a ragged array that of its rows.
        is_partial: Whether it was opened while it was under construction.
        codec: How its chunks are packed: "none", "blosc" or "pcodec"; "mixed" of partitions that differ.
        network: Name of the network file system that it lies on, or scheme of its URL; None for local ones.
        nbytes: Length of the finished file, or files, in bytes; of a device store its memory.
    """

    is_partial = False
    codec: str = "none"
    network: str | None = None
    nbytes: int
    __iter__ = None  # over samples or over names? `range(len(store))` and `store.arrays` say which

    def __init__(self, path: Path, root: RootMeta, metas: Iterable[ArrayMeta], num_samples: int) -> None:
        self.path = path
        self.identity_document: Mapping[str, Any] = root.identity
        self.identity: dict[str, Any] = root.identity["content"]
        partition = root.identity.get("partition")
        self.partition: tuple[int, int] | None = (partition[0], partition[1]) if partition else None
        self.config_hash = root.config_hash
        self.attrs: Mapping[str, Any] = root.attrs
        self.version = root.version
        self.metas = {meta.name: meta for meta in metas if not meta.is_companion}
        self._num_samples = num_samples
        self._per_sample = tuple(meta.name for meta in self.metas.values() if not meta.is_constant)
        self._ragged = frozenset(meta.name for meta in self.metas.values() if meta.is_ragged)

    def __len__(self) -> int:
        """N, the number of samples."""
        return self._num_samples

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.metas

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays with a sample axis; `create` takes them as they are, ragged ones with their lengths."""
        return {name: spec_of(self.metas[name], len(self)) for name in self._per_sample}

    @property
    def constants(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays without a sample axis, read-only; `create` takes them as they are."""
        return {name: self.whole(name) for name, meta in self.metas.items() if meta.is_constant}

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Dimension names of every array."""
        return {name: meta.axes for name, meta in self.metas.items()}

    @property
    def committed(self) -> npt.NDArray[np.bool_]:
        """Tell which samples are there, bool, shape (N,).

        Raises:
            FormatError: If it has more samples than bytes, and too many for this: kind "limits".
        """
        if len(self) > max(self.nbytes, _SAMPLES_WITHOUT_BYTES):
            raise FormatError(
                "more samples than bytes",
                path=self.path,
                kind="limits",
                expected=f"at most {_SAMPLES_WITHOUT_BYTES:,} samples of which none has a byte",
                found=f"{len(self):,}",
                hint="whoever wrote it is mistaken, or means harm",
            )
        return np.ones(len(self), bool)

    @overload
    def __getitem__(self, key: str) -> npt.NDArray[Any]: ...

    @overload
    def __getitem__(self, key: int | np.integer[Any] | slice) -> dict[str, Any]: ...

    def __getitem__(self, key: object) -> Any:
        """`store[name]` is a whole array, `store[i]` a sample, `store[a:b]` a batch; see `whole`, `gather`.

        Raises:
            ArrayNotFoundError: For a name that it doesn't have; also a KeyError.
            SampleIndexError: For a sample that it doesn't have; also an IndexError.
            SpecError: For anything else, kind "index"; what else `whole` raises.
        """
        if isinstance(key, str):
            return self.whole(key)
        if isinstance(key, slice):
            return self.gather(key)
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            return self.sample(int(key))
        expected = "the name of an array, a sample number or a slice"
        hint = "`gather` takes several sample numbers"
        actual = type(key).__name__
        raise SpecError(
            "store[...]", kind="index", path=self.path, expected=expected, found=actual, hint=hint
        )

    @property
    @abstractmethod
    def access(self) -> str:
        """Tell how samples are got: "map", "pread", "decode", "remote", "device"; "mixed" of several."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of the content: equal for equal content in one file, mapped or packed; cheap to compare."""

    @abstractmethod
    def whole(self, name: str) -> Any:
        """Give the whole array, read-only, where it is one piece of memory.

        Raises:
            ArrayNotFoundError: If there is none of that name; also a KeyError.
            SpecError: Kind "unsupported", if samples of this kind of store are no single array.
            NotCommittedError: For an array of a store under construction.
            TruncatedError: If another program cut the file.
            CorruptChunkError: If a chunk is damaged, which `verify="touch"` looks for.
        """

    def gather(
        self,
        indices: Indices | slice,
        names: Sequence[str] | None = None,
        *,
        start: int | Indices | None = None,
        length: int | None = None,
        stride: int = 1,
        out: Mapping[str, Any] | None = None,
        num_threads: int | None = None,
        ragged: Form = "views",
    ) -> dict[str, Any]:
        """Copy samples, or windows of them, into a batch.

        Args:
            indices: Sample numbers, shape (B,), in any order, repeats allowed, negative ones from the end; or
                a slice.
            names: Arrays to take; all with a sample axis by default.
            start: First time step of the window, one number or one per sample; 0 by default.
            length: Number of time steps of the window; as many as there are by default. Arrays without a
                dimension "time" are taken whole.
            stride: Time steps from one to the next.
            out: Arrays to write to, by name, shape (B, ...); new memory costs more than the copy, so reuse
                what an earlier call returned. Of another dtype, what is copied is converted: floating-point
                numbers to any floating-point dtype, others where nothing is lost.
            num_threads: Threads that copy, by default 1: more copy large samples faster, until memory is the
                limit. Where `access` is "pread" or "remote", reads or requests under way at once, by default
                8 and 16. Of a packed store threads that decode, by default as many as there are processors
                where that is worth it, at most 8.
            ragged: How ragged arrays are given: "views" as a list of B read-only arrays, which aren't copied
                where the store is mapped (of text as `str`, which are); "padded" as an array (B, L, ...) of
                zeros behind each sample, L the rows of the longest or those of `out`, and under the name
                `NAME.lengths` the numbers of rows, int64, shape (B,).
        Returns:
            Arrays of shape (B, ...) by name: those of `out`, else new ones that the caller owns.
        Raises:
            SampleIndexError: For a sample or window outside the store.
            ArrayNotFoundError: For a name that it doesn't have; also a KeyError.
            SpecError: For one name that isn't in a list; for indices that aren't integers (kind "index"); for
                an `out` of another shape, or of a dtype that loses what the array holds.
            TruncatedError: If another program cut the file.
            CorruptChunkError: If a chunk is damaged; of a mapped store only `verify="touch"` finds that.
            StoreReplacedError: If the object at a URL isn't the one that was opened.
            RemoteError: If an object store refuses, or doesn't answer before the deadline.
        """
        chosen = self._per_sample if names is None else names_of(names)
        if self._ragged and not self._ragged.isdisjoint(chosen):
            arguments = BatchArguments(start, length, stride, out, num_threads)
            return self._gather_ragged(indices, chosen, arguments, ragged)
        if ragged != "views":
            check_form(ragged, (), None, path=self.path)
        batch = self._gather_usual(indices, chosen, start, length, stride, out, num_threads)
        if batch and len(batch) == len(chosen):
            return batch
        self.check_open()
        arguments = BatchArguments(start, length, stride, out, num_threads)
        samples = check_indices(indices, self._num_samples, path=self.path)
        metas = [self._sampled_meta(name) for name in chosen]
        check_effect(metas, arguments, path=self.path)
        return batch | self._gather(samples, [meta for meta in metas if meta.name not in batch], arguments)

    def _gather_usual(
        self, indices: Any, names: Sequence[str], start: Any, length: Any, stride: Any, out: Any, threads: Any
    ) -> dict[str, Any]:
        """Gather the first of the arrays, up to one that is unusual or wrong, by the fastest way there is."""
        return {}

    @abstractmethod
    def _gather(self, samples: Samples, metas: list[ArrayMeta], arguments: BatchArguments) -> dict[str, Any]:
        """Gather arrays that aren't ragged; samples and names are checked, windows and memory aren't."""

    def _gather_ragged(
        self, indices: Indices | slice, chosen: Sequence[str], arguments: BatchArguments, form: Form
    ) -> dict[str, Any]:
        """Gather ragged arrays by themselves, the others as ever."""
        samples, out = check_indices(indices, len(self), path=self.path), arguments.out
        names = [name for name in chosen if name in self._ragged]
        others = [name for name in chosen if name not in self._ragged]
        check_no_window([self.metas[name] for name in names], arguments, path=self.path)
        memory_of_others = check_form(form, names, out, path=self.path)
        batch: dict[str, Any] = {}
        if others or memory_of_others:
            batch = self.gather(samples, others, **arguments._replace(out=memory_of_others or None)._asdict())
        else:
            check_effect([], arguments._replace(out=None), path=self.path)
        memory = out or {}
        for name in names:
            views = self._views_of(name, samples, decode=form == "views", num_threads=arguments.num_threads)
            batch[name] = views
            if form == "padded":
                targets = memory.get(name), memory.get(name + LENGTHS)
                batch[name], batch[name + LENGTHS] = padded(self.metas[name], views, *targets)
        ordered = [key for name in chosen for key in (name, name + LENGTHS) if key in batch]
        return {key: batch[key] for key in ordered}

    def _views_of(
        self, name: str, samples: Samples, *, decode: bool, num_threads: int | None = None
    ) -> list[Any]:
        """Give views of a ragged array's samples, all valid; only kinds of store that may have one do."""
        raise NotImplementedError

    def sample(self, index: int) -> dict[str, Any]:
        """Give all arrays of one sample by name, read-only; shape () for a number. Negative: from the end.

        Of a ragged array shape (rows, ...); text is `str`.

        Raises:
            SampleIndexError: Unless -N <= index < N; also an IndexError.
            NotCommittedError: If the store is under construction and the sample isn't there yet.
            TruncatedError: If another program cut the file.
            CorruptChunkError: If a chunk is damaged.
        """
        batch = self.gather([index])
        sample = {}
        for name, values in batch.items():
            if isinstance(values, np.ndarray):
                values.flags.writeable = False
                sample[name] = values[0, ...]
            else:  # of a ragged array a list
                sample[name] = values[0]
        return sample

    def lengths(self, name: str) -> Samples:
        """Give the number of rows of every sample of a ragged array, shape (N,), all checked.

        Raises:
            ArrayNotFoundError: Also a KeyError.
            SpecError: If the array isn't ragged, kind "ragged".
            CorruptChunkError: If the offsets are damaged.
        """
        self.check_open()
        if not self._sampled_meta(name).is_ragged:
            raise SpecError("it isn't ragged", kind="ragged", path=self.path, array=name)
        return self._lengths_of(name)

    def _lengths_of(self, name: str) -> Samples:
        raise NotImplementedError

    def to_xarray(self, names: Iterable[str] | None = None) -> Dataset:
        """Give the store as an xarray data set; nothing is read until values are asked for.

        Values of a mapped store are views of it, read-only; of other kinds samples are gathered when they are
        asked for, and of windows over time whole. Of a ragged array the rows of all samples are a variable,
        and `NAME.offsets`, shape (N + 1,), says where each begins; text is an array of `str`, shape (N,).
        Constants that are named like their only dimension become coordinates with an index, and are read.
        Pickling pickles the store, and closing the data set leaves it open.

        Args:
            names: Arrays and constants to take; all by default.
        Raises:
            ArrayNotFoundError: For a name that it doesn't have; also a KeyError.
            NotCommittedError: If the store is unfinished.
            SpecError: For a store in a device's memory, kind "unsupported".
            MissingExtraError: If xarray isn't installed.
        """
        dataset: Dataset = module_above("xarray").dataset_of(self, names)
        return dataset

    @property
    def has_views(self) -> bool:
        """Tell whether `store[name]` is a view of the mapped file, without a check that would read it."""
        return False

    def preload(
        self,
        mode: Mode = "auto",
        *,
        device: str | None = None,
        samples: range | None = None,
        shared: bool = False,
        lock: bool = False,
        margin: float = 0.1,
        num_threads: int | None = None,
        progress: Progress | None = None,
    ) -> PreloadReport:
        """Bring the store into memory before it is read; `docs/guides/preload.md` compares the modes.

        A packed store knows "page-cache" and "copy", which decodes everything once: it is then gathered from
        as fast as a mapped one. A remote store, and one on a device, stay as they are, by "auto" alone.

        Args:
            mode: "page-cache" reads the file, whose pages all processes of the machine then share. "copy"
                copies it to memory with huge pages, from which this store then gathers. "device" moves
                samples to a device's memory. "auto" takes "page-cache" if it fits, before it "copy" if
                `shared`, before that "device" if `device` is given; else the store stays as it is.
            device: For "device", such as "cuda:1"; "cuda" by default.
            samples: For "device" the part of the samples to move; all by default.
            shared: For "copy", have the processes of the machine share it: those that this store is pickled
                to map the same memory, which is freed when the last of them ends, however it ends.
            lock: Refused: there is no such mode any more.
            margin: Share of the available memory that must be left.
            num_threads: Reads in flight; 4 by default.
            progress: Called with the number of bytes that were read since the last call, every 64 MiB; what
                it raises ends the preload, and leaves the store as it was.
        Returns:
            Mode, reason with the numbers, bytes, seconds; for "device" what gathers there; for a store in
            partitions a report for each of them in `parts`.
        Raises:
            MemoryLimitError: If the mode needs more memory than there is.
            DeviceError: If there is no such device.
            NotCommittedError: For a store under construction.
            StoreReplacedError: If another file took the path.
            TruncatedError: If another program cut the file.
            SpecError: For arguments that have no meaning, or no effect in this mode; kind "unsupported" for
                what this kind of store can't do.
        """
        from ups_store.read.preload import Request

        self.check_open()
        request = Request(mode, device, samples, shared, margin, num_threads, progress)
        request.check(len(self), path=self.path, lock=lock)
        return self._preload(request)

    @abstractmethod
    def _preload(self, request: Request) -> PreloadReport:
        """See `preload`; the request makes sense for a store of so many samples."""

    @abstractmethod
    def residency(self) -> float:
        """Share of the store that lies in RAM, as page cache or as a copy, 0 to 1; at a URL in the cache.

        Raises:
            TruncatedError: If another program cut the file.
        """

    @abstractmethod
    def verify(
        self, *, num_threads: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Report:
        """Check every byte: payloads by checksum, all others by making them again; decode packed chunks.

        Args:
            num_threads: Threads that read and check, one per processor by default; at a URL requests under
                way at once, 16 by default.
            progress: Called with the number of bytes that were checked since the last call.
        Returns:
            A report with `.ok` and `.problems`; of a store in partitions with a report for each in `parts`.
        Raises:
            StoreReplacedError: If another file took the path, or the object at a URL is another.
            SpecError: Kind "unsupported", for a store in a device's memory, which has no checksums.
        """

    @abstractmethod
    def check_open(self) -> None:
        """Fail after `close`.

        Raises:
            StoreClosedError: If the store is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of file and memory, which go when the last view of them does. Closing twice is allowed."""

    def _reopened(self, path: str, options: dict[str, Any]) -> tuple[Any, ...]:
        """Make what `__reduce__` returns of a store that `ups_store.open` opens so."""
        reopen = module_above("open").reopen
        return reopen, (path, None if self.is_partial else self.fingerprint, self.config_hash, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        """Show in several lines: what it is, a line for each array, and what it was made from."""
        rows, lines = self._shown()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        arrays = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        )
        title = f"<{one_line(self._title())}>"
        return "\n".join([title, *(f"    {line}".rstrip() for line in arrays), *lines])

    def _repr_html_(self) -> str:
        """Give the same as a table, for notebooks, without scripts and styles."""
        from html import escape

        rows, lines = self._shown()
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        tail = "".join(f"<div>{escape(line.strip())}</div>" for line in lines)
        head = "<tr><th>array</th><th>axes</th><th>dtype</th><th></th></tr>"
        return f"<div><b>{escape(one_line(self._title()))}</b><table>{head}{table}</table>{tail}</div>"

    def _shown(self) -> tuple[list[tuple[str, ...]], list[str]]:
        """Name, axes and dtype of each array that is shown; lines about the others, and the identity."""
        ordered = sorted(self.metas.values(), key=lambda meta: meta.is_constant)
        rows: list[tuple[str, ...]] = []
        for meta in ordered[:MAX_ROWS]:
            axes = [f"{one_line(dim)}: {length:,}" for dim, length in zip(meta.dims, meta.shape, strict=True)]
            if meta.is_ragged:
                axes = [SAMPLE_DIM, f"{axes[0]} in all", *axes[1:]]
            kind = "constant" if meta.is_constant else ""
            rows.append((meta.name, f"({', '.join(axes)})", meta.dtype, kind))
        lines = []
        if more := len(ordered) - len(rows):
            lines.append(f"    and {more:,} more: `store.arrays` and `store.constants` have all")
        text = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in self.identity.items())
        text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
        return rows, [*lines, f"Identity: {one_line(text)}"] if text else lines

    def _title(self) -> str:
        summary = ", ".join([counted(len(self), "sample"), *self._summary()])
        return f"ups_store.{type(self).__name__} {self.path.name}: {summary}"

    def _summary(self) -> list[str]:
        """List what `repr` says of this kind of store beside its number of samples."""
        return []

    def _meta(self, name: str) -> ArrayMeta:
        """Give the metadata of an array; `ArrayNotFoundError` if there is none of that name."""
        try:
            return self.metas[name]
        except (KeyError, TypeError):
            expected = f"one of {', '.join(self.metas)}"
            raise ArrayNotFoundError(f"no array {name!r}", path=self.path, expected=expected) from None

    def _sampled_meta(self, name: str) -> ArrayMeta:
        """Give the metadata of an array with a sample axis."""
        meta = self._meta(name)
        if meta.is_constant:
            raise SpecError("it has no sample axis", path=self.path, array=name, hint="use store[name]")
        return meta

    def _unsupported(self, problem: str, hint: str, *, array: str | None = None) -> SpecError:
        """Make the error for what this kind of store can't do."""
        return SpecError(problem, kind="unsupported", path=self.path, array=array, hint=hint)


def spec_of(meta: ArrayMeta, num_samples: int | None) -> ArraySpec:
    """Make what `create` is given for an array with a sample axis; without the lengths of a ragged one."""
    rows = (None,) if meta.is_ragged else ()
    shape = (num_samples, *rows, *meta.sample_shape)
    return ArraySpec(shape, dtype_of(meta.dtype), dims=meta.axes, attrs=meta.attrs, encoding=meta.encoding)
