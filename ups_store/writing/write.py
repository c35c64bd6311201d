"""`write`: a store of anything iterable, in one call that continues where it was killed; `cached`, `save`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ups_store.errors import BuildLockedError, SpecError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.format.canonical import plain_json
from ups_store.printable import counted
from ups_store.read.base import AnyStore
from ups_store.read.open import open_any
from ups_store.read.recovery import building_path
from ups_store.system import files, locks
from ups_store.system.memory import IN_MEMORY
from ups_store.writing.create import store_path_of
from ups_store.writing.described import described
from ups_store.writing.existing import (
    Differences,
    check_left,
    check_no_parts,
    is_of_values,
    is_unnamed,
    left_gives_way,
    opened_if_same,
    other_arguments,
    other_sample,
    other_specs,
)
from ups_store.writing.filling import (
    HOW_TO_REPLACE,
    SKIPPED,
    Arguments,
    OnError,
    OnMismatch,
    write_columns,
    write_rows,
)
from ups_store.writing.samples import Columns, Rows, digest_of, source_of
from ups_store.writing.spool import BUFFER_BYTES, SAVE_EVERY_S
from ups_store.writing.wait_for_maker import MakerTurn, ProgressLine, remove_turn
from ups_store.writing.writer import warn

ITEM_TIMEOUT_S = 300.0


def write(
    path: str | os.PathLike[str],
    samples: Any = None,
    *,
    identity: Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    ragged: Collection[str] = (),
    constants: Mapping[str, npt.ArrayLike] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    attrs: Mapping[str, Any] | None = None,
    map: Callable[[Any], Any] | None = None,
    inputs: Iterable[Any] | None = None,
    num_workers: int | None = None,
    item_timeout_s: float = ITEM_TIMEOUT_S,
    retries: int = 0,
    on_error: OnError = "fail",
    on_mismatch: OnMismatch = "raise",
    buffer_bytes: int = BUFFER_BYTES,
    save_every_s: float = SAVE_EVERY_S,
    progress: bool | None = None,
) -> AnyStore:
    """Write a store of samples, and open it; if there is one of this identity, just open that.

    `samples` is an iterable of dicts of arrays, tensors, numbers, `str` or `bytes`: a generator of unknown
    length, a list, a torch data set, one of Hugging Face. Or arrays whose first axis is the sample: one of
    NumPy or torch, a dict of them, a Zarr group, an xarray data set (its dimension "sample", else the first
    one). Dtypes, shapes, and which arrays are ragged are found from the first 32 samples.

    Killed at any moment, the same call continues: what was committed stays. For that an iterable has to give
    the same samples in the same order whenever it is iterated; those that are there are compared. What can
    be asked for by number (a list, a data set, arrays) is asked for what is missing only. The store appears
    under its name in one rename when all of it is there; until then `open` with `partial=True` reads what is
    committed. Where the number of samples, or of the rows of each, isn't known, the disk needs room for them
    twice: at the end they are copied from the unfinished file into the store.

    **Identity.** A store is given back only if its identity is equal to `identity`, so that has to name
    everything that decides the samples: files and their versions, parameters, a version of the code. Without
    `identity`, arrays in memory have a digest of their values, and Hugging Face's data sets their
    fingerprint; any other samples have none: then nothing is ever reused, an interrupted call begins
    again, and a store that is there is an error.

    Args:
        path: Where the store will be, usually `NAME.zarr.zip`.
        samples: See above; not with `map`.
        identity: JSON values.
        names: Of the values where samples are tuples or one array each; of arrays and columns those to take.
            Samples that are dicts have names of their own.
        ragged: Arrays whose first axis differs in length from sample to sample though not among the first;
            arrays with a sample axis have none.
        constants: Arrays without a sample axis.
        dims: Names of dimensions by array, the sample's left out.
        attrs: Attributes of the root group.
        map: Function of one of `inputs`, called in worker processes; returns a sample, or gives several as a
            generator, or None for none. Workers import it: it stands at the top level of a module or script.
        inputs: File names, numbers: what can be pickled. Samples are in their order.
        num_workers: Processes; by default one per processor; 0 calls the function here, without deadlines.
            Like the next three arguments only with `map`.
        item_timeout_s: For one input, since it was begun or gave its last sample.
        retries: How often an input is tried again whose worker was late or died.
        on_error: Whether an input that fails, hangs or crashes its worker is an error, or left out ("skip"),
            noted in the attribute `skipped_inputs`, and warned about whenever the store is given back.
        on_mismatch: Whether a store, or what an interrupted call left, of another identity is an error, or
            gives way ("restart") once the new one is whole.
        buffer_bytes: Bytes of samples that wait in memory, and are committed together, where their number, or
            that of their rows, isn't known.
        save_every_s: Likewise: after so many seconds those that wait are committed, and all is made durable,
            so that neither a kill nor a power loss loses more.
        progress: Whether to show a line on stderr; by default if that is a terminal.
    Returns:
        The store, open.
    Raises:
        SpecError: If a sample contradicts the ones before it, names both, or what else can't be stored; if
            there is a store and no identity, kind "exists"; for an argument without effect, kind "no_effect".
        IdentityMismatchError: If what is there was made from something else.
        SourceError: With `map`, if an input fails; names it. `ReadTimeoutError` if it hangs.
        BuildLockedError: If another process writes it.
        DiskFullError: If there is no room; what was committed stays.
        CommitError: If the file system fails.
    """
    _check_arguments(names, ragged, on_mismatch=on_mismatch, on_error=on_error)
    constants = {name: described(name, value) for name, value in (constants or {}).items()}
    like = None
    if isinstance(samples, Alike):
        like, samples = samples.store, samples.samples
    job, source = None, None
    if map is not None or inputs is not None:
        from ups_store.writing.mapped import job_of, write_mapped

        if samples is not None or map is None or inputs is None:
            expected = "samples; or both map and inputs"
            raise SpecError("write", kind="argument", expected=expected, found="another choice of them")
        job = job_of(map, inputs, num_workers, item_timeout_s, retries, names)
    else:
        only_of_map = {
            "num_workers": num_workers is not None,
            "item_timeout_s": item_timeout_s != ITEM_TIMEOUT_S,
            "retries": retries != 0,
            "on_error": on_error != "fail",
        }
        if settings := " and ".join(name for name, is_set in only_of_map.items() if is_set):
            raise SpecError(
                f"{settings} without effect",
                kind="no_effect",
                expected="map and inputs",
                found="samples, which this process makes itself",
                hint=f"leave out {settings}, or give a function as `map` and what it takes as `inputs`",
            )
        source = source_of(samples, names)
    columns = source if isinstance(source, Columns) else None
    if ragged and columns:
        raise SpecError(
            "ragged without effect",
            kind="no_effect",
            expected="samples",
            found="arrays with a sample axis, whose samples have one shape",
            hint="leave out `ragged`, or give lists of arrays, which may differ in length",
        )
    target = _file_of(path)
    check_no_parts(target, on_mismatch=on_mismatch)
    content = identity
    # That of the store that these samples are like may be a digest of its own.
    if identity is None or (
        like is not None and ("huggingface_fingerprint" in identity or is_of_values(identity))
    ):
        default = source.default_identity() if source is not None else None
        if default is not None:
            more = {"constants": digest_of(constants)} if constants else {}
            content = {**default, **more, **({"attrs": dict(attrs)} if attrs else {})}
    arguments = Arguments(
        target,
        {"unnamed": files.build_id().hex()} if content is None else content,  # equal to no other
        content is not None,
        frozenset(ragged),
        {**(columns.constants if columns else {}), **constants},
        {**(columns.constant_dims if columns else {}), **(dims or {})},
        {**(columns.attrs if columns else {}), **(attrs or {})},
        "restart" if on_mismatch == "raise" and left_gives_way(target) else on_mismatch,
        buffer_bytes,
        save_every_s,
        like,
    )
    if columns and like is not None:
        different = other_specs(like, arguments.named_dims(columns.specs()))
        different |= other_arguments(like, constants=columns.constants, dims=columns.constant_dims)
        for name, (expected, now) in different.items():
            problem = f"{name} isn't as in {like.path.name}"
            raise SpecError(problem, kind="mixed", expected=expected, found=now)
    if content is None and on_mismatch == "raise" and files.exists(target):
        hint = f"say identity={{...}}, so that it can be told, or {HOW_TO_REPLACE} to replace it"
        problem = "it exists, and nothing says whether it holds these samples"
        raise SpecError(problem, kind="exists", path=target, hint=hint)

    store = None
    if content is not None:
        store = opened_if_same(
            target,
            content,
            on_mismatch=on_mismatch,
            differing=lambda store: _differing(store, arguments, source, names),
        )
    if store is None:
        total = source.num_samples if source else None
        with ProgressLine(target.name, total=total, is_wanted=progress) as line:
            if job is not None:
                write_mapped(arguments, job, on_error, line)
            elif columns:
                write_columns(arguments, columns, line)
            elif isinstance(source, Rows):
                write_rows(arguments, source, line)
        store = opened_if_same(target, arguments.identity, on_mismatch="raise")
        assert store is not None, target
    warn_skipped(store)
    return store


def _check_arguments(
    names: Sequence[str] | None, ragged: Collection[str], *, on_mismatch: str, on_error: str
) -> None:
    """Refuse unknown words, text where a list of names goes, and names that occur twice."""
    for argument, word, known in (
        ("on_mismatch", on_mismatch, ("raise", "restart")),
        ("on_error", on_error, ("fail", "skip")),
    ):
        if word not in known:
            expected = " or ".join(map(repr, known))
            raise SpecError(argument, kind="argument", expected=expected, found=repr(word))
    for argument, listed in (("names", names), ("ragged", ragged)):
        if isinstance(listed, str):
            raise SpecError(argument, kind="argument", expected="names in a list", found=repr(listed))
    for name in names or ():
        if list(names or ()).count(name) > 1:
            raise SpecError("names", kind="names", expected="names that differ", found=f"{name!r} twice")


def _differing(
    store: AnyStore, arguments: Arguments, source: Columns | Rows | None, names: Sequence[str] | None
) -> Differences:
    """Name what of a store of the same identity would be another now.

    An iterable isn't begun for that, nor a function called.
    """
    if source is not None and source.num_samples not in (None, len(store)):
        return {"number of samples": (len(store), source.num_samples)}
    facts: dict[str, Any] = {"constants": arguments.constants, "dims": arguments.dims}
    facts |= {"attrs": arguments.attrs, "ragged": arguments.ragged}
    different = other_arguments(store, **facts, names=None if isinstance(source, Columns) else names)
    if isinstance(source, Columns):
        different |= other_specs(store, arguments.named_dims(source.specs()))
    elif source is not None and source.can_skip and len(store):
        different |= other_sample(store, next(source.begin(0)))
    return different


@dataclass(frozen=True)
class Alike:
    """Samples for `write` that have to have the arrays of a store, as those that `append` is given."""

    samples: Any
    store: AnyStore


def _file_of(path: str | os.PathLike[str]) -> Path:
    """Return where `write` makes a store; `SpecError` for one in memory."""
    if os.fspath(path) == IN_MEMORY:
        hint = "`create` makes stores in memory"
        raise SpecError("path", kind="path", path=path, expected="that of a file", found=IN_MEMORY, hint=hint)
    return store_path_of(path)


def warn_skipped(store: AnyStore) -> None:
    """Warn whenever a store is given back that lacks inputs."""
    skipped = store.attrs.get(SKIPPED)
    if isinstance(skipped, list) and skipped:
        warn(
            f"{store.path.name}: {counted(len(skipped), 'input')} failed, left out; the first is "
            f"{skipped[0]['input']!r} ({skipped[0]['error']}); attrs[{SKIPPED!r}] has all"
        )


def cached(
    path: str | os.PathLike[str],
    identity: Mapping[str, Any],
    make: Callable[[], Any],
    **options: Any,
) -> AnyStore:
    """Open the store at the path if it is of this identity; else make it in the place of what is there.

    If another process makes it, this one waits: of many that call this at a time one does the work. One that
    shows no sign of life for ten minutes, as it is stopped, is an error.

    Args:
        path: Where it is, or will be.
        identity: Everything that decides the samples, as for `write`.
        make: Called only where there is no such store; gives samples as `write` takes them.
        options: As for `write`; `on_mismatch` is "restart" unless it is said, but only where it is said are
            samples removed that an interrupted call of another identity committed.
    Returns:
        The store, open.
    Raises:
        IdentityMismatchError: If there are such samples.
        BuildLockedError: If the process that makes it is stopped.
        SpecError: As `write`; so do its other errors.
    """
    target, is_explicit = _file_of(path), "on_mismatch" in options
    options = {"on_mismatch": "restart", **options}

    def valid() -> AnyStore | None:
        return opened_if_same(
            target,
            identity,
            on_mismatch=options["on_mismatch"],
            differing=lambda store: other_arguments(store, **options),
        )

    if (store := valid()) is not None:
        remove_turn(target)
        return store
    with MakerTurn(target, is_shown=options.get("progress")) as turn:
        while True:
            if (store := valid()) is not None:
                return store
            with contextlib.suppress(BuildLockedError):  # a process that calls `write` was faster
                if not locks.is_held(building_path(target), BUILDER_LOCK):
                    if not is_explicit:
                        check_no_parts(target, on_mismatch="raise")
                        hint = f"finish it with what it was begun with, or say {HOW_TO_REPLACE}"
                        content = plain_json(dict(identity), what="identity")
                        check_left(target, content, gives_way=is_unnamed, hint=hint)
                    return write(target, make(), identity=identity, **options)
            turn.wait()


def save(
    path: str | os.PathLike[str],
    /,
    *,
    constants: Mapping[str, npt.ArrayLike] | None = None,
    attrs: Mapping[str, Any] | None = None,
    **arrays: Any,
) -> Path:
    """Write arrays whose first axis is the sample; what is there is replaced once the new store is whole.

    Nothing happens if the store that is there holds the same values already.

    Args:
        path: Where, usually `NAME.zarr.zip`.
        constants: Arrays without a sample axis, such as coordinates.
        attrs: Attributes of the root group.
        arrays: Arrays or tensors by name, all of the same number of samples; lists of `str`, of `bytes`, or
            of arrays whose first axes differ in length become ragged.
    Returns:
        Absolute path of the store.
    Raises:
        SpecError: If an array has another number of samples, or can't be stored.
        IdentityMismatchError: If an interrupted call that named its samples, by `identity`, left some here.
        DiskFullError: If there is no room.
    """
    gives_way = lambda content: is_unnamed(content) or is_of_values(content)  # noqa: E731
    hint = "finish that call, or remove them with `ups-store gc --delete`"
    check_left(_file_of(path), None, gives_way=gives_way, hint=hint)
    with write(path, arrays, constants=constants, attrs=attrs, on_mismatch="restart") as store:
        return store.path


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Give all arrays and constants of a store by name: views of the mapped file, nothing is read yet.

    A ragged array is a `RaggedArray`, whose samples are `[i]`. `ups_store.open` gives the store itself, which
    knows its identity and batches.

    Raises:
        StoreNotFoundError: If there is no store.
        FormatError: If it isn't one.
        SpecError: If its samples are no single arrays: packed, or in partitions; kind "unsupported".
    """
    store = open_any(path)  # the views keep the mapping
    return {name: store[name] for name in store.metas}
