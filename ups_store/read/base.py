"""`BaseStore`: what stores of every kind do alike: names, samples by number, closing, how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import numpy.typing as npt

from ups_store.errors import ArrayNotFoundError, SpecError
from ups_store.format.array_spec import ArraySpec
from ups_store.format.metadata import ArrayMeta, dtype_of
from ups_store.format.ragged import LENGTHS
from ups_store.format.root_metadata import RootMeta
from ups_store.printable import counted
from ups_store.read.gather import Indices, Samples, check_effect, check_indices, names_of
from ups_store.read.ragged_batch import Form, check_form, check_no_window, in_form, is_window

if TYPE_CHECKING:
    from xarray import Dataset


class BaseStore:
    """A store without its samples; a kind of store adds `gather`, `whole`, `check_open` and `close`.

    Args:
        path: Where it is, absolute.
        root: Metadata of its root group.
        metas: Its arrays, constants included.
        num_samples: N.

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
    """

    is_partial = False
    codec: str = "none"
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
        """Which samples are there, bool, shape (N,)."""
        return np.ones(len(self), bool)

    @overload
    def __getitem__(self, key: str) -> npt.NDArray[Any]: ...

    @overload
    def __getitem__(self, key: int | np.integer[Any] | slice) -> dict[str, Any]: ...

    def __getitem__(self, key: object) -> Any:
        """`store[name]` is a whole array, `store[i]` a sample, `store[a:b]` a batch; see `whole`, `sample`.

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
        found = type(key).__name__
        raise SpecError("store[...]", kind="index", path=self.path, expected=expected, found=found, hint=hint)

    def whole(self, name: str) -> npt.NDArray[Any]:
        """The whole array, read-only, where it is one piece of memory.

        Raises:
            ArrayNotFoundError: If there is none of that name; also a KeyError.
            SpecError: Kind "unsupported", if samples of this kind of store are no single array.
        """
        raise NotImplementedError

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
    ) -> dict[str, Any]:
        """Copy samples into a batch; see `Store.gather`."""
        raise NotImplementedError

    def _gather_ragged(
        self,
        indices: Indices | slice,
        chosen: Sequence[str],
        window: Mapping[str, Any],
        out: Mapping[str, Any] | None,
        num_threads: int | None,
        form: Form,
    ) -> dict[str, Any]:
        """A batch with ragged arrays: these by themselves, the others as ever."""
        samples = check_indices(indices, len(self), path=self.path)
        names = [name for name in chosen if name in self._ragged]
        others = [name for name in chosen if name not in self._ragged]
        check_no_window([self.metas[name] for name in names], window, path=self.path)
        rest = check_form(form, names, out, path=self.path)
        found: dict[str, Any] = {}
        if others or rest:
            found = self.gather(samples, others, **window, out=rest or None, num_threads=num_threads)
        else:
            check_effect([], is_window(window), None, path=self.path)
        for name in names:
            views = self._views_of(name, samples, decode=form == "views", num_threads=num_threads)
            found |= in_form(form, self.metas[name], views, out)
        names_out = [key for name in chosen for key in (name, name + LENGTHS) if key in found]
        return {key: found[key] for key in names_out}

    def _views_of(
        self, name: str, samples: Samples, *, decode: bool, num_threads: int | None = None
    ) -> list[Any]:
        """Samples of a ragged array; this kind of store has none unless it overrides this."""
        raise NotImplementedError

    def sample(self, index: int) -> dict[str, Any]:
        """All arrays of one sample by name, read-only; shape () for a number. Negative: from the end.

        Raises:
            SampleIndexError: Unless -N <= index < N; also an IndexError.
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
        """Number of rows of every sample of a ragged array, shape (N,), all checked.

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
        """The store as an xarray data set; nothing is read until values are asked for.

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
        from ups_store.read.xarray_dataset import dataset_of

        return dataset_of(self, names)  # type: ignore[arg-type]  # every kind of store is one

    @property
    def has_views(self) -> bool:
        """Whether `store[name]` is a view of the mapped file, without a check that would read it."""
        return False

    def check_open(self) -> None:
        """Fail after `close`.

        Raises:
            StoreClosedError: If the store is closed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of file and memory. Closing twice is allowed."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        from ups_store.read.shown import text_of

        return text_of(self._title(), self.metas.values(), self.identity)

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        from ups_store.read.shown import html_of

        return html_of(self._title(), self.metas.values(), self.identity)

    def _title(self) -> str:
        summary = ", ".join([counted(len(self), "sample"), *self._summary()])
        return f"ups_store.{type(self).__name__} {self.path.name}: {summary}"

    def _summary(self) -> list[str]:
        """What `repr` says of this kind of store beside its number of samples."""
        return []

    def _meta(self, name: str) -> ArrayMeta:
        """Metadata of an array; `ArrayNotFoundError` if there is none of that name."""
        try:
            return self.metas[name]
        except (KeyError, TypeError):
            expected = f"one of {', '.join(self.metas)}"
            raise ArrayNotFoundError(f"no array {name!r}", path=self.path, expected=expected) from None

    def _sampled_meta(self, name: str) -> ArrayMeta:
        """Metadata of an array with a sample axis."""
        meta = self._meta(name)
        if meta.is_constant:
            raise SpecError("it has no sample axis", path=self.path, array=name, hint="use store[name]")
        return meta

    def _asked(
        self,
        indices: Indices | slice,
        names: Sequence[str] | None,
        *,
        is_window: bool,
        out: Mapping[str, Any] | None,
    ) -> tuple[Samples, list[ArrayMeta]]:
        """The samples and arrays that arguments of `gather` mean, checked."""
        self.check_open()
        samples = check_indices(indices, self._num_samples, path=self.path)
        chosen = self._per_sample if names is None else names_of(names)
        metas = [self._sampled_meta(name) for name in chosen]
        check_effect(metas, is_window, out, path=self.path)
        return samples, metas

    def _unsupported(self, problem: str, hint: str, *, array: str | None = None) -> SpecError:
        """The error for what this kind of store can't do."""
        return SpecError(problem, kind="unsupported", path=self.path, array=array, hint=hint)


def spec_of(meta: ArrayMeta, num_samples: int | None) -> ArraySpec:
    """What `create` is given for an array with a sample axis; without the lengths of a ragged one."""
    rows = (None,) if meta.is_ragged else ()
    shape = (num_samples, *rows, *meta.sample_shape)
    return ArraySpec(shape, dtype_of(meta.dtype), dims=meta.axes, attrs=meta.attrs, encoding=meta.encoding)
