"""`cached` and `cached_in`: the store of an identity, made where it isn't there."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec

from ups_store.errors import BuildLockedError, SpecError
from ups_store.format.canonical import canonical_json, plain_json
from ups_store.read.base import AnyStore
from ups_store.system import files
from ups_store.system.paths import path_of
from ups_store.write.filling import HOW_TO_REPLACE
from ups_store.write.found_store import (
    check_left,
    is_being_written,
    is_unnamed,
    opened_if_same,
    other_arguments,
)
from ups_store.write.from_iterable import target_of, write
from ups_store.write.turn import Turn

Arguments = ParamSpec("Arguments")

_NAME_DIGITS = 12


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
        return store
    with Turn(target, is_shown=options.get("progress")) as turn:
        while True:
            if (store := valid()) is not None:
                return store
            with contextlib.suppress(BuildLockedError):  # a process that calls `write` was faster
                if not is_being_written(target):
                    if not is_said:
                        hint = f"finish it with what it was begun with, or say {HOW_TO_REPLACE}"
                        wanted = plain_json(dict(identity), what="identity")
                        check_left(target, wanted, gives_way=is_unnamed, hint=hint)
                    return write(target, make(), identity=identity, **options)
            turn.wait()


def cached_in(
    folder: str | os.PathLike[str], *, identity: Mapping[str, Any] | None = None, **options: Any
) -> Callable[[Callable[Arguments, Any]], Callable[Arguments, AnyStore]]:
    """Have a function that gives samples give the store of them instead, made when it is first called.

    ```python
    @ups_store.cached_in("cache")
    def waves(num, seed=0):
        for i in range(num):
            yield {"u": solve(seed + i)}

    store = waves(1000)  # cache/waves-3f0a9c12b7d4.zarr.zip
    ```

    The identity is the function's name, its source (comments and form don't count), its arguments, and
    `identity`. What it calls and global values are not: have a version of those in `identity`. Other
    arguments are other files; nothing is removed.

    Args:
        folder: Where the stores lie; made if need be.
        identity: What else decides the samples, such as `{"version": 2}`.
        options: As for `write`.
    Returns:
        A decorator. The function that it gives takes the same arguments, which have to be JSON values or
        paths, and raises `SpecError` of kind "arguments" for others.
    Raises:
        SpecError: When it decorates, if the function's source can't be found, or it uses variables of a
            function around it, which no identity would have.
    """

    def decorate(function: Callable[Arguments, Any]) -> Callable[Arguments, AnyStore]:
        signature, source = inspect.signature(function), _source_of(function)

        @functools.wraps(function)
        def stored(*args: Arguments.args, **kwargs: Arguments.kwargs) -> AnyStore:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            whole = {
                "function": f"{function.__module__}.{function.__qualname__}",
                "source": source,
                "arguments": _arguments(function, bound.arguments),
                **(identity or {}),
            }
            place = path_of(folder)
            files.make_folder(place, hint="choose another folder")
            digits = hashlib.sha256(canonical_json(whole, what="identity")).hexdigest()[:_NAME_DIGITS]
            path = place / f"{function.__name__}-{digits}.zarr.zip"
            return cached(path, whole, lambda: function(*args, **kwargs), **options)

        return stored

    return decorate


def _source_of(function: Callable[..., Any]) -> str:
    """Digest of a function's source, its form and comments left out."""
    name = getattr(function, "__qualname__", repr(function))
    variables = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if variables:
        raise SpecError(
            f"{name} uses {variables[0]!r} of the function around it, which its identity wouldn't have",
            kind="closure",
            hint="make it an argument",
        )
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        problem = f"{name}: its source, which is part of the identity, can't be found"
        hint = "define it in a file, or use `ups_store.cached`"
        raise SpecError(problem, kind="source", found=error, hint=hint) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def _arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = plain_json(
            {name: os.fspath(value) if isinstance(value, Path) else value for name, value in given.items()},
            what="arguments",
        )
    except SpecError as error:
        error.kind, error.hint = "arguments", f"give {function.__name__} names and numbers, not objects"
        raise
    return plain
