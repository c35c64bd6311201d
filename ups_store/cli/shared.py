"""Verbs of shared caches: `push`, `pull`, `ls-remote`, and what `gc --remote` does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups_store.console import (
    AsJson,
    format_age,
    format_nbytes,
    interruptible,
    is_verbose,
    log,
    print_json,
    print_lines,
    progress_bar,
)
from ups_store.printable import counted, one_line

if TYPE_CHECKING:
    from ups_store.remote.shared import SharedCache

Place = Annotated[
    str,
    typer.Argument(help="shared cache: s3://, gs://, az://, https:// (read only) or a folder", metavar="URL"),
]
Timeout = Annotated[
    float, typer.Option(min=1, help="seconds for one request to a server, with all its attempts")
]

_SHORT_HASH = 12
_TIMEOUT_S = 60.0


def push(
    paths: Annotated[list[Path], typer.Argument(help="finished stores, or patterns", metavar="PATH...")],
    place: Place,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="replace what is there, such as damaged files")
    ] = False,
    timeout: Timeout = _TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per file and line")] = False,
) -> None:
    """Verify stores and copy them to a shared cache, to HASH/NAME; what is there already stays.

    Other content of the same identity that is there is an error.
    """
    from ups_store.read.open import open_any
    from ups_store.remote.transfer import push_store

    cache = _open(place, timeout)
    for path in paths:
        with open_any(path) as store:
            total = store.nbytes
        with interruptible(), progress_bar(f"pushing {path.name}", total=total, quiet=as_json) as bar:
            pushed = push_store(path, cache, replace=force, progress=_Shown(bar))
        for file in pushed:
            if as_json:
                print_json({**vars(file), "url": f"{cache.location}/{file.key}"})
            else:
                done = "pushed" if file.is_new else "there already"
                print_lines(f"{file.path}: {done}, {format_nbytes(file.nbytes)}, {cache.location}/{file.key}")


def pull(
    place: Place,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="NAME, HASH (its beginning will do) or HASH/NAME [default: all]", metavar="STORE..."
        ),
    ] = None,
    *,
    into: Annotated[Path, typer.Option(help="folder for the stores")] = Path("cache"),
    force: Annotated[bool, typer.Option("--force", help="replace other stores of these names")] = False,
    timeout: Timeout = _TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per store and line")] = False,
) -> None:
    """Copy stores from a shared cache, verified and of the identity that their place says.

    A pull that was killed goes on where it was when it is run again.
    """
    from ups_store.remote.transfer import choose_stores, pull_store

    cache = _open(place, timeout)
    for store in choose_stores(cache, names or []):
        title = f"pulling {store.name}"
        with interruptible(), progress_bar(title, total=store.nbytes, quiet=as_json) as bar:
            path = pull_store(cache, store.files, into, progress=_Shown(bar), replace=force)
        if as_json:
            print_json({**store.to_json(), "path": path})
        else:
            size = format_nbytes(store.nbytes)
            print_lines(f"{path}: {size}, {store.config_hash[:_SHORT_HASH]}, from {cache.location}")


def ls_remote(place: Place, *, timeout: Timeout = _TIMEOUT_S, as_json: AsJson = False) -> None:
    """List the stores of a shared cache."""
    from ups_store.remote.transfer import list_stores

    cache = _open(place, timeout)
    stores = list_stores(cache)
    if as_json:
        print_json({"url": cache.location, "stores": [store.to_json() for store in stores]})
        return
    if not stores:
        log(f"{one_line(cache.location)}: no store")
    for store in stores:
        config_hash = store.config_hash if is_verbose() else store.config_hash[:_SHORT_HASH]
        files = f" in {len(store.files)} files" if len(store.files) > 1 else ""
        size, age = f"{format_nbytes(store.nbytes)}{files}", format_age(time.time() - store.modified_s)
        print_lines(f"{config_hash}  {store.name}  {size}, {age}")


def gc_remote(
    place: str, *, delete: bool, unfinished: bool, older_than: float | None, timeout: float, as_json: bool
) -> None:
    """List what can go from a shared cache, and remove it on request; see `gc`."""
    from ups_store.remote.transfer import find_remote_garbage

    cache = _open(place, timeout)
    entries = find_remote_garbage(cache, older_than_s=None if older_than is None else 86400 * older_than)
    if not entries:
        log(f"{one_line(cache.location)}: nothing that can go")
    for garbage in entries:
        is_removed = delete and garbage.is_removable and (unfinished or garbage.kind != "incomplete")
        if is_removed:
            cache.remove(garbage.key)
        if as_json:
            print_json({**vars(garbage), "removed": is_removed})
            continue
        of_a_push = "left by a push" if garbage.is_removable else "of a push that may be going on, left alone"
        title = {
            "temporary": of_a_push,
            "incomplete": "some of a store's partitions: a push goes on with the others",
            "old": "store",
            "foreign": "foreign file, left alone",
        }[garbage.kind]
        size = f"{format_nbytes(garbage.nbytes)}, " if garbage.nbytes else ""
        age = f"written {format_age(garbage.age_s)}{', removed' if is_removed else ''}"
        print_lines(f"{cache.location}/{garbage.key}: {title}, {size}{age}")
    if entries and not delete:
        log(f"{counted(len(entries), 'file')}; --delete removes what isn't left alone")


def _open(place: str, timeout: float) -> SharedCache:
    from ups_store.remote.shared import open_shared

    return open_shared(place, deadline_s=timeout)


class _Shown:
    """Shows a transfer in a bar."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def doing(self, what: str) -> None:
        """See `ups_store.remote.fetch.Progress`."""

    def progressed(self, num: int = 0) -> None:
        """See `ups_store.remote.fetch.Progress`."""
        self._bar(num)
