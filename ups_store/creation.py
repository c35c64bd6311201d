"""`create` and `join`: from arguments to a building file that is ours to write."""

from __future__ import annotations

import math
import operator
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ups_store import files
from ups_store.array_spec import ArraySpec
from ups_store.build_tail import GATE_LOCK, Owner, TailHeader
from ups_store.building import (
    LOCK_TIMEOUT_S,
    BuildingFile,
    create_building,
    take_builder_lock,
    write_owner,
)
from ups_store.encode import as_payload
from ups_store.errors import (
    FormatError,
    IdentityMismatchError,
    SpecError,
    StoreNotFoundError,
    StoreReplacedError,
)
from ups_store.identity import (
    config_hash,
    constant_digest,
    describe_differences,
    differences,
    identity_document,
)
from ups_store.layout import FORMAT_VERSION, Layout, plan
from ups_store.metadata import (
    DTYPE_NAMES,
    MAX_ARRAYS,
    MAX_ELEMENTS,
    MAX_JSON_BYTES,
    MAX_RANK,
    SAMPLE_DIM,
    ArrayMeta,
    RootMeta,
    check_name,
    dtype_name,
)
from ups_store.recovery import Building, State, building_path, read_building_file
from ups_store.writer import Committer, StoreWriter
from ups_store.zip_records import END_BYTES, MAX_LOCAL_HEADER_BYTES, may_be_store

MAX_FILE_BYTES = 2**63 - 1  # largest offset of a file
_MAX_ROUNDS = 8  # each is lost only to another process that created, published or removed the file


def create(
    path: str | os.PathLike[str],
    arrays: Mapping[str, ArraySpec],
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    identity: Mapping[str, Any],
    attrs: Mapping[str, Any] | None = None,
    durability: Literal["durable", "lazy"] = "durable",
    on_mismatch: Literal["raise", "restart"] = "raise",
) -> StoreWriter:
    """Start a store, or continue the unfinished one at the path if its identity is the same.

    The room for the whole store is reserved here. Nothing is visible at `path` before `finish`. A finished
    store that is there already, of whatever identity, stays as it is until then and is replaced: to reuse
    one, `open` it first and compare, as `python -m ups_store.build` does. A file that is no store is replaced
    with `on_mismatch="restart"` only.

    Args:
        path: Where the store will be published, usually `<task>_<split>.zarr.zip`.
        arrays: Arrays with a sample axis, all of the same N.
        constants: Arrays without a sample axis, such as coordinates; copied.
        dims: Dimension names of constants; a 1-D constant is named after itself where not given.
        identity: Everything that decides the bytes, JSON values; kept and compared.
        attrs: Attributes of the root group; not part of the identity.
        durability: "durable" syncs every commit; "lazy" leaves that to the system: a killed process loses
            nothing, and after a power loss every recorded sample is checked before it counts.
        on_mismatch: What to do with an unfinished file of another identity or a damaged one.
    Raises:
        SpecError: If no store can be made from these arguments.
        IdentityMismatchError: If an unfinished file was made from something else.
        BuildLockedError: If it is being built already, by another process or this one.
        FormatError: If there is a folder or another program's file at the path.
        DiskFullError: If there is no room for the whole store.
    """
    if durability not in ("durable", "lazy") or on_mismatch not in ("raise", "restart"):
        found = f"durability={durability!r}, on_mismatch={on_mismatch!r}"
        raise SpecError("argument", expected="durable or lazy; raise or restart", found=found)
    target = Path(path).absolute()  # the process may change its folder before it finishes
    planned = _planned(arrays, constants or {}, dims or {}, identity, attrs or {})
    if not target.parent.is_dir():
        raise StoreNotFoundError("no such folder", path=target.parent, hint="create it first")
    _check_replaceable(target, force=on_mismatch == "restart")
    for _ in range(_MAX_ROUNDS):
        try:
            writer = _create_or_resume(target, planned, durability == "lazy", on_mismatch == "restart")
        except (FileExistsError, FileNotFoundError, StoreReplacedError):
            continue
        if not writer.is_finished:  # then there is no tail, and the file must keep its length
            write_owner(writer.building, Owner(os.getpid(), socket.gethostname()))
        return writer
    raise StoreReplacedError("other processes keep replacing the building file", path=building_path(target))


def join(path: str | os.PathLike[str], *, identity: Mapping[str, Any]) -> Committer:
    """Attach another committing process of the same machine to an unfinished store.

    Args:
        path: As given to `create`.
        identity: As given to `create`; compared with the file's.
    Raises:
        StoreNotFoundError: If nothing is being built there.
        IdentityMismatchError: If it is made from something else.
    """
    store_path = Path(path).absolute()
    target = building_path(store_path)
    fd = files.open_existing(target, writable=True)
    try:
        found = read_building_file(fd, target)
        if found.header is None:
            raise StoreNotFoundError("the store is finished", path=target, hint="run its builder again")
        content = identity_document([], {}, identity)["content"]
        _check_same(found.catalog.root.identity.get("content"), content, target)
    except BaseException:
        files.close(fd)
        raise
    return Committer(_building_file(store_path, fd, found, is_lazy=True))


def identity_of(
    arrays: Mapping[str, ArraySpec],
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """The identity document that `create` would give a store; nothing is written (spec 8.1)."""
    return _planned(arrays, constants or {}, dims or {}, identity, {}).root.identity


@dataclass(frozen=True)
class _Planned:
    """Everything that `create`'s arguments decide."""

    root: RootMeta
    documents: tuple[bytes, ...]
    constants: dict[str, bytes]
    layout: Layout


def _check_replaceable(path: Path, *, force: bool) -> None:
    """Refuse to take the place of a folder, and unless forced of anything but a store, whole or damaged."""
    for place in (path, building_path(path)):
        if place.is_dir():
            raise FormatError("there is a folder", path=place, kind="not_a_file", hint="choose another name")
    if force or not path.exists():
        return
    fd = files.open_existing(path)
    try:
        start = files.read_at(fd, 0, MAX_LOCAL_HEADER_BYTES)
        end = files.read_at(fd, max(0, files.size(fd) - END_BYTES), END_BYTES)
    finally:
        files.close(fd)
    if not may_be_store(start, end):
        raise FormatError(
            "there is another program's file",
            path=path,
            kind="foreign",
            clause="2.2",
            found=start[:8].hex(" ") or "an empty file",
            hint="move it away, choose another name, or say on_mismatch='restart' or --overwrite",
        )


def _create_or_resume(path: Path, planned: _Planned, is_lazy: bool, restart: bool) -> StoreWriter:
    target = building_path(path)
    try:
        fd = files.open_existing(target, writable=True)
    except StoreNotFoundError:
        return StoreWriter(_create(path, planned, is_lazy, replace=False))
    try:
        take_builder_lock(fd, target)
        files.lock(fd, GATE_LOCK, timeout_s=LOCK_TIMEOUT_S, path=target)
        if not files.is_file_at(fd, target):
            raise StoreReplacedError("replaced while waiting for it", path=target)
        try:
            return _resume(path, fd, planned, is_lazy)
        except (FormatError, IdentityMismatchError):
            if not restart:
                raise
        replacing = _create(path, planned, is_lazy, replace=True)
        files.close(fd)
        return StoreWriter(replacing)
    except BaseException:
        files.close(fd)
        raise


def _create(path: Path, planned: _Planned, is_lazy: bool, *, replace: bool) -> BuildingFile:
    return create_building(
        path,
        planned.layout,
        documents=planned.documents,
        constants=planned.constants,
        is_lazy=is_lazy,
        replace=replace,
    )


def _resume(path: Path, fd: int, planned: _Planned, is_lazy: bool) -> StoreWriter:
    """Continue a building file whose builder lock and gate are held; the gate is released (spec 6.9)."""
    target = building_path(path)
    found = read_building_file(fd, target)
    _check_same(found.catalog.root.identity, planned.root.identity, target)
    files.sync_data(fd)  # a record in the page cache only must not count before it is durable
    files.unlock(fd, GATE_LOCK)
    building = _building_file(path, fd, found, is_lazy=is_lazy)
    return StoreWriter(building, is_finished=found.state is State.FINISHED)


def _building_file(path: Path, fd: int, found: Building, *, is_lazy: bool) -> BuildingFile:
    layout, crcs = found.catalog.layout, found.catalog.crcs[: len(found.catalog.layout.metadata)]
    header = found.header or TailHeader.for_layout(
        layout, build_id=bytes(16), boot_id=bytes(16), is_lazy=False
    )
    return BuildingFile(path, fd, layout, header, crcs, is_lazy=is_lazy and header.is_lazy)


def _check_same(found: Any, expected: Any, path: Path) -> None:
    differing = differences(found, expected)
    if not differing:
        return
    error = IdentityMismatchError(
        f"the unfinished file was made from something else (found -> asked for):\n"
        f"{describe_differences(differing)}\n",
        path=path,
        hint="finish it with its own configuration, or replace it: on_mismatch='restart', --overwrite",
    )
    error.differences = differing
    raise error


def _planned(
    arrays: Mapping[str, ArraySpec],
    constants: Mapping[str, npt.ArrayLike],
    dims: Mapping[str, Sequence[str]],
    identity: Mapping[str, Any],
    attrs: Mapping[str, Any],
) -> _Planned:
    given = {"arrays": arrays, "constants": constants, "identity": identity, "attrs": attrs}
    for argument, mapping in given.items():
        _expect_type(mapping, Mapping, "a mapping by name", argument=argument)
    metas = [_array_meta(name, spec) for name, spec in arrays.items()]
    payloads: dict[str, bytes] = {}
    for name, value in constants.items():
        meta, payload = _constant(name, np.asarray(value), dims.get(name))
        metas.append(meta)
        payloads[name] = payload
    metas.sort(key=lambda meta: meta.name)
    num_samples = _check_together(metas, arrays, constants, dims)
    digests = {name: constant_digest(payload) for name, payload in payloads.items()}
    document = identity_document(metas, digests, identity)
    if "ups_store" in attrs:
        raise SpecError("attribute 'ups_store' is the format's own", kind="attrs", clause="4.3")
    root = RootMeta(FORMAT_VERSION, config_hash(document), document, dict(attrs))
    documents = (root.to_json(), *(meta.to_json() for meta in metas))
    if max(map(len, documents)) > MAX_JSON_BYTES:
        raise SpecError("a zarr.json would be too long", kind="limits", clause="9.1", expected=MAX_JSON_BYTES)
    sizes = [(meta, len(text)) for meta, text in zip(metas, documents[1:], strict=True)]
    layout = plan(len(documents[0]), sizes, num_samples)
    if layout.building_nbytes > MAX_FILE_BYTES:
        found = layout.building_nbytes
        raise SpecError("the file would be too long", kind="limits", expected=MAX_FILE_BYTES, found=found)
    return _Planned(root, documents, payloads, layout)


def _expect_type(value: object, wanted: type, expected: str, *, argument: str) -> None:
    if not isinstance(value, wanted):
        raise SpecError(f"argument {argument}", kind="argument", expected=expected, found=repr(value))


def _array_meta(name: str, spec: ArraySpec) -> ArrayMeta:
    _expect_type(spec, ArraySpec, "ups_store.ArraySpec(shape, dtype)", argument=f"arrays[{name!r}]")
    shape = _shape(name, spec.shape)
    defaults = (SAMPLE_DIM, *(f"{name}_dim_{i}" for i in range(1, len(shape))))
    dims = tuple(spec.dims) if spec.dims is not None else defaults
    if not shape or min(shape) < 0 or len(shape) > MAX_RANK or not _num_elements_ok(shape):
        expected = f"1 to {MAX_RANK} axes, N first, fewer than {MAX_ELEMENTS} elements"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=shape)
    if len(dims) != len(shape) or dims[0] != SAMPLE_DIM or SAMPLE_DIM in dims[1:]:
        expected = f"{len(shape)} names, the first and no other {SAMPLE_DIM!r}"
        raise SpecError("dims", kind="dims", clause="4.5", array=name, expected=expected, found=dims)
    return ArrayMeta(check_name(name), shape, _dtype_name(name, spec.dtype), dims, dict(spec.attrs or {}))


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(n) for n in shape)
    except TypeError as error:
        expected = "a sequence of integers"
        raise SpecError("shape", kind="shape", array=name, expected=expected, found=shape) from error


def _dtype_name(name: str, dtype: Any) -> str:
    try:
        return dtype_name(dtype)
    except (TypeError, SpecError) as error:
        expected = f"one of {', '.join(DTYPE_NAMES)}"
        raise SpecError(
            "unsupported dtype", kind="dtype", array=name, expected=expected, found=dtype
        ) from error


def _constant(name: str, value: npt.NDArray[Any], dims: Sequence[str] | None) -> tuple[ArrayMeta, bytes]:
    defaults = (name,) if value.ndim == 1 else tuple(f"{name}_dim_{i}" for i in range(value.ndim))
    names = tuple(dims) if dims is not None else defaults
    if len(names) != value.ndim or SAMPLE_DIM in names:
        expected = f"{value.ndim} names other than {SAMPLE_DIM!r}"
        raise SpecError("dims", kind="dims", clause="4.5", array=name, expected=expected, found=names)
    meta = ArrayMeta(check_name(name), value.shape, _dtype_name(name, value.dtype), names)
    return meta, as_payload(value, meta, value.shape).tobytes()


def _check_together(
    metas: list[ArrayMeta], arrays: Iterable[str], constants: Iterable[str], dims: Iterable[str]
) -> int:
    """Check what arrays must have in common; returns N."""
    twice, unknown = set(arrays) & set(constants), set(dims) - set(constants)
    if twice or unknown or len(metas) > MAX_ARRAYS:
        found = f"both: {sorted(twice)}, dims of no constant: {sorted(unknown)}, {len(metas)} arrays"
        expected = f"names of arrays or constants, at most {MAX_ARRAYS}"
        raise SpecError("array names", kind="arrays", expected=expected, found=found)
    lengths: dict[str, tuple[int, str]] = {}
    for meta in metas:
        if len(set(meta.dims)) < len(meta.dims) or not all(isinstance(d, str) and d for d in meta.dims):
            raise SpecError("dims", kind="dims", array=meta.name, expected="distinct names", found=meta.dims)
        for dim, length in zip(meta.dims, meta.shape, strict=True):
            other = lengths.setdefault(dim, (length, meta.name))
            if other[0] != length:
                raise SpecError(
                    f"dimension {dim!r}",
                    kind="dims",
                    clause="4.5",
                    array=meta.name,
                    expected=f"length {other[0]}, as in array {other[1]!r}",
                    found=length,
                    hint="give it another name",
                )
    return lengths[SAMPLE_DIM][0] if SAMPLE_DIM in lengths else 0


def _num_elements_ok(shape: tuple[int, ...]) -> bool:
    return math.prod(max(1, n) for n in shape) < MAX_ELEMENTS
