"""`ups_store.write`: a store of anything iterable, in one call that continues where it was killed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ups_store.errors import SpecError
from ups_store.printable import counted
from ups_store.read.base import AnyStore
from ups_store.system.files import real_place
from ups_store.system.memory import IN_MEMORY, num_cores
from ups_store.system.paths import check_store_name, path_of
from ups_store.write.described import described
from ups_store.write.filling import OnError, OnMismatch, Plan, write_columns, write_rows
from ups_store.write.filling_mapped import SKIPPED, write_mapped
from ups_store.write.found_store import (
    check_free,
    check_no_parts,
    gives_way,
    is_of_values,
    opened_if_same,
    other_arguments,
    other_arrays,
    unnamed_identity,
)
from ups_store.write.progress_line import ProgressLine
from ups_store.write.sample_sources import Columns, Rows, digest_of, source_of
from ups_store.write.spool import BUFFER_BYTES, SAVE_EVERY_S

ITEM_TIMEOUT_S = 300.0
_SUFFIX_NBYTES = 32  # that names of what is being written are longer than the store's


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
    return write_like(
        path,
        samples,
        None,
        identity=identity,
        names=names,
        ragged=ragged,
        constants=constants,
        dims=dims,
        attrs=attrs,
        map=map,
        inputs=inputs,
        num_workers=num_workers,
        item_timeout_s=item_timeout_s,
        retries=retries,
        on_error=on_error,
        on_mismatch=on_mismatch,
        buffer_bytes=buffer_bytes,
        save_every_s=save_every_s,
        progress=progress,
    )


def write_like(
    path: str | os.PathLike[str],
    samples: Any,
    like: AnyStore | None,
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
    """Write a store, as `write` does; of the arrays of another one where that is given."""
    _check_one_of("on_mismatch", on_mismatch, ("raise", "restart"))
    _check_one_of("on_error", on_error, ("fail", "skip"))
    _check_names(names, ragged)
    constants = {name: described(name, value) for name, value in (constants or {}).items()}
    job, source = None, None
    if map is not None or inputs is not None:
        if samples is not None or map is None or inputs is None:
            expected = "samples; or both map and inputs"
            raise SpecError("write", kind="argument", expected=expected, found="another choice of them")
        job = _job(map, inputs, num_workers, item_timeout_s, retries, names)
    else:
        _check_no_settings_of_map(num_workers, item_timeout_s, retries, on_error)
        source = source_of(samples, names)
        if ragged and isinstance(source, Columns):
            hint = "leave out `ragged`, or give lists of arrays, which may differ in length"
            found = "arrays with a sample axis, whose samples have one shape"
            raise SpecError(
                "ragged without effect", kind="no_effect", expected="samples", found=found, hint=hint
            )
    target = target_of(path)
    check_no_parts(target, on_mismatch=on_mismatch)
    known = identity
    if identity is None or (like is not None and _is_default(identity)):  # the samples of `like` are others
        known = _default_identity(source, constants or {}, attrs or {}) or identity
    plan = Plan(
        target,
        unnamed_identity() if known is None else known,
        known is not None,
        frozenset(ragged),
        constants or {},
        dims or {},
        attrs or {},
        "restart" if on_mismatch == "raise" and gives_way(target) else on_mismatch,
        buffer_bytes,
        save_every_s,
        like,
    )
    if isinstance(source, Columns):
        plan = plan.with_those_of(source)
        specs = plan.named_dims(source.specs())
        if like is not None:
            different = other_arrays(like, specs=specs, sample=None)
            different |= other_arguments(like, constants=source.constants, dims=source.constant_dims)
            for name, (expected, found) in different.items():
                problem = f"{name} isn't as in {like.path.name}"
                raise SpecError(problem, kind="mixed", expected=expected, found=found)
    if known is not None:
        store = opened_if_same(
            target,
            known,
            on_mismatch=on_mismatch,
            differing=lambda store: _differing(store, plan, source, names),
        )
        if store is not None:
            warn_skipped(store)
            return store
    else:
        check_free(target, on_mismatch=on_mismatch)
    with ProgressLine(target.name, total=source.num_samples if source else None, is_wanted=progress) as line:
        if job is not None:
            write_mapped(plan, job, on_error, line)
        elif isinstance(source, Columns):
            write_columns(plan, source, line)
        elif source is not None:
            write_rows(plan, source, line)
    store = opened_if_same(target, plan.identity, on_mismatch="raise")
    assert store is not None, target
    warn_skipped(store)
    return store


def _differing(
    store: AnyStore, plan: Plan, source: Columns | Rows | None, names: Sequence[str] | None
) -> dict[str, tuple[Any, Any]]:
    """What of a finished store of the same identity isn't as it would be now; as `differences`.

    An iterable isn't begun for that, nor a function called.
    """
    if source is not None and source.num_samples not in (None, len(store)):
        return {"number of samples": (len(store), source.num_samples)}
    is_columns = isinstance(source, Columns)
    different = other_arguments(
        store,
        constants=plan.constants,
        dims=plan.dims,
        attrs=plan.attrs,
        ragged=plan.ragged,
        names=None if is_columns else names,
    )
    if isinstance(source, Columns):
        different |= other_arrays(store, specs=plan.named_dims(source.specs()), sample=None)
    elif source is not None and source.can_skip and len(store):
        different |= other_arrays(store, specs=None, sample=next(source.begin(0)))
    return different


def target_of(path: str | os.PathLike[str]) -> Path:
    """Where `write` makes a store: behind a link, if there is one.

    Raises:
        SpecError: If that can't be; kind "path".
    """
    target = path_of(real_place(path_of(path)), suffix_nbytes=_SUFFIX_NBYTES)
    check_store_name(target)
    if os.fspath(path) == IN_MEMORY:
        hint = "`create` makes stores in memory"
        raise SpecError("path", kind="path", path=path, expected="that of a file", found=IN_MEMORY, hint=hint)
    return target


def _default_identity(
    source: Columns | Rows | None, constants: Mapping[str, npt.ArrayLike], attrs: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """What samples say of themselves, with what else there will be; None where they say nothing."""
    if isinstance(source, Columns):
        found: Mapping[str, Any] | None = source.digest() if source.is_digested else None
    else:
        found = source.default_identity() if source is not None else None
    if found is None:
        return None
    more = {"constants": digest_of(constants)} if constants else {}
    return {**found, **more, **({"attrs": dict(attrs)} if attrs else {})}


def _is_default(identity: Mapping[str, Any]) -> bool:
    """Whether an identity is one that samples had of themselves."""
    return "huggingface_fingerprint" in identity or is_of_values(identity)


def _check_one_of(argument: str, found: str, known: tuple[str, str]) -> None:
    if found not in known:
        expected = " or ".join(map(repr, known))
        raise SpecError(argument, kind="argument", expected=expected, found=repr(found))


def _check_names(names: Sequence[str] | None, ragged: Collection[str]) -> None:
    """Refuse text where a list of names goes, and a name twice: all but one of its values would be lost."""
    for argument, found in (("names", names), ("ragged", ragged)):
        if isinstance(found, str):
            raise SpecError(argument, kind="argument", expected="names in a list", found=repr(found))
    twice = next((name for name in names or () if list(names or ()).count(name) > 1), None)
    if twice is not None:
        raise SpecError("names", kind="names", expected="names that differ", found=f"{twice!r} twice")


def _check_no_settings_of_map(
    num_workers: int | None, item_timeout_s: float, retries: int, on_error: OnError
) -> None:
    """Refuse settings of worker processes where there are none."""
    given = {
        "num_workers": num_workers is not None,
        "item_timeout_s": item_timeout_s != ITEM_TIMEOUT_S,
        "retries": retries != 0,
        "on_error": on_error != "fail",
    }
    named = " and ".join(name for name, is_given in given.items() if is_given)
    if named:
        raise SpecError(
            f"{named} without effect",
            kind="no_effect",
            expected="map and inputs",
            found="samples, which this process makes itself",
            hint=f"leave out {named}, or give a function as `map` and what it takes as `inputs`",
        )


def _job(
    function: Callable[[Any], Any],
    inputs: Iterable[Any],
    num_workers: int | None,
    item_timeout_s: float,
    retries: int,
    names: Sequence[str] | None,
) -> Any:
    from ups_store.sources.readers import Patience
    from ups_store.write.mapped import MapJob, check_not_importing

    check_not_importing()
    workers = num_cores() if num_workers is None else num_workers
    for argument, found, is_valid in (
        ("num_workers", workers, workers >= 0),
        ("item_timeout_s", item_timeout_s, item_timeout_s > 0),
        ("retries", retries, retries >= 0),
    ):
        if not is_valid:
            expected = "> 0" if argument == "item_timeout_s" else ">= 0"
            raise SpecError(argument, kind="argument", expected=expected, found=found)
    return MapJob(
        function, inputs, workers, Patience(timeout_s=item_timeout_s, retries=retries), names, _warn
    )


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def warn_skipped(store: AnyStore) -> None:
    """Say it whenever a store is given back that lacks inputs."""
    skipped = store.attrs.get(SKIPPED)
    if isinstance(skipped, list) and skipped:
        _warn(
            f"{store.path.name}: {counted(len(skipped), 'input')} failed, left out; the first is "
            f"{skipped[0]['input']!r} ({skipped[0]['error']}); attrs[{SKIPPED!r}] has all"
        )
