"""`cached`: the store of an identity, made where it isn't there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from ups_store.errors import BuildLockedError
from ups_store.format.canonical import plain_json
from ups_store.read.base import AnyStore
from ups_store.write.filling import HOW_TO_REPLACE
from ups_store.write.found_store import (
    check_left,
    check_no_parts,
    is_being_written,
    is_unnamed,
    opened_if_same,
    other_arguments,
)
from ups_store.write.from_iterable import target_of, write
from ups_store.write.turn import Turn, remove_turn


def cached(
    path: str | os.PathLike[str],
    identity: Mapping[str, Any],
    make: Callable[[], Any],
    **options: Any,
) -> AnyStore:
    """The store at the path if it is of this identity; else it is made, and takes the place of what is there.

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
    target, is_said = target_of(path), "on_mismatch" in options
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
    with Turn(target, is_shown=options.get("progress")) as turn:
        while True:
            if (store := valid()) is not None:
                return store
            with contextlib.suppress(BuildLockedError):  # a process that calls `write` was faster
                if not is_being_written(target):
                    if not is_said:
                        check_no_parts(target, on_mismatch="raise")
                        hint = f"finish it with what it was begun with, or say {HOW_TO_REPLACE}"
                        wanted = plain_json(dict(identity), what="identity")
                        check_left(target, wanted, gives_way=is_unnamed, hint=hint)
                    return write(target, make(), identity=identity, **options)
            turn.wait()
