"""A source file whose links are followed here, one by one, instead of by HDF5.

So what lies in other files is seen before it is opened, and is read only where that is allowed. Virtual
datasets and external storage are put together by `pieced_datasets`: HDF5 gives the fill value wherever it
can't open a source.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups_store.errors import SourceError
from ups_store.sources.hdf5 import h5py, source_error
from ups_store.sources.outer_files import OuterFiles
from ups_store.sources.pieced_datasets import ExternalDataset, Mapping, VirtualDataset

_MAX_LINKS = 16  # on the way to one object, and of virtual datasets within each other; as HDF5's own limit


@dataclass(frozen=True)
class _Spot:
    """An object: the file that it is in, its path there by hard links only, and as what it was asked for."""

    holder: Path
    name: str
    asked: str


class LinkedFile(h5py.File):  # type: ignore[misc]  # h5py has no types
    """An open source. Items are asked for by their whole path; the groups that it gives aren't guarded.

    Args:
        file: The source as HDF5 has it.
        path: Its name.
        outer: What may be read beside it.

    Attributes:
        outer: As given.
    """

    def __init__(self, file: h5py.File, path: Path, outer: OuterFiles) -> None:
        super().__init__(file.id)
        self.outer = outer
        self._plain = file  # whose items are as HDF5 has them
        self._path = path
        self._pieced: dict[tuple[Path, str], Any] = {}  # to make one, all its sources are opened

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise KeyError(f"no object {name!r}")
        return found

    def __contains__(self, name: object) -> bool:
        return self._find(self._path, str(name), asked=str(name)) is not None

    def get(self, name: str, default: Any = None, getclass: bool = False, **others: Any) -> Any:
        """The object of a path, or its class; `default` if there is none.

        Raises:
            ExternalDataError: If its data isn't in the file alone, and that isn't allowed.
            SourceError: Kind "link_loop" or "virtual_unsupported".
        """
        spot = self._find(self._path, name, asked=name.strip("/"))
        if spot is None:
            return default
        file = self._file(spot.holder)
        if getclass:
            return h5py.Group.get(file, spot.name, default, getclass=True)
        found = h5py.Group.get(file, spot.name)
        return default if found is None else self._usable(found, spot, depth=0)

    def check_links(self, name: str) -> None:
        """Follow the links to an object without opening it; what isn't there is no matter.

        Raises:
            ExternalDataError: If one leads into another file, and that isn't allowed.
        """
        self._find(self._path, name, asked=name)

    def close(self) -> None:
        """Close it and all outer files; a second call does nothing."""
        self._pieced.clear()
        self.outer.close()
        super().close()

    def _file(self, holder: Path) -> h5py.File:
        return self._plain if holder == self._path else self.outer.hdf5(holder)

    def _find(self, holder: Path, name: str, *, asked: str) -> _Spot | None:
        """Where a path of a file leads; None if it leads nowhere."""
        file, at, left, num_links = self._file(holder), "", deque(_parts(name)), 0
        while left:
            here = f"{at}/{left.popleft()}"
            link = _link(file, here)
            if link is None:
                return None
            kind, value = link
            if kind == h5py.h5l.TYPE_HARD:
                at = here
                continue
            num_links += 1
            if num_links > _MAX_LINKS:
                raise self._bad_link("more than 16 links", "link_loop", asked)
            if kind == h5py.h5l.TYPE_SOFT:
                target = value
                at = "" if target.startswith("/") else at
            else:
                outer, target = value
                holder = self.outer.locate(outer, kind="link", holder=holder, dataset=asked)
                file, at = self._file(holder), ""
            left.extendleft(reversed(_parts(target)))
        return _Spot(holder, at or "/", asked)

    def _bad_link(self, what: str, kind: str, asked: str) -> SourceError:
        return source_error(
            f"{what} on the way to {asked!r}", kind=kind, path=self._path, dataset=asked, hint="mend the file"
        )

    def _usable(self, found: Any, spot: _Spot, *, depth: int) -> Any:
        """What reads an object: itself, unless its data lies elsewhere."""
        if not isinstance(found, h5py.Dataset):
            return found
        key = spot.holder, spot.name
        if key not in self._pieced:
            if found.is_virtual:
                if depth >= _MAX_LINKS:
                    raise self._bad_link("more than 16 virtual datasets", "link_loop", spot.asked)
                self._pieced[key] = self._virtual(found, spot, depth)
            elif found.external:
                self._pieced[key] = self._external(found, spot)
            else:
                return found
        return self._pieced[key]

    def _external(self, found: h5py.Dataset, spot: _Spot) -> ExternalDataset:
        def locate(name: str) -> Path:
            return self.outer.locate(name, kind="raw", holder=spot.holder, dataset=spot.asked)

        return ExternalDataset(found, self.outer, locate, path=self._path, asked=spot.asked)

    def _virtual(self, found: h5py.Dataset, spot: _Spot, depth: int) -> VirtualDataset:
        def source_of(mapping: Mapping) -> Any:
            """Called again for every read: of thousands of sources few are kept open."""
            holder = spot.holder
            if mapping.file != ".":
                holder = self.outer.locate(mapping.file, kind="virtual", holder=holder, dataset=spot.asked)
            source = self._find(holder, mapping.dataset, asked=spot.asked)
            item = None if source is None else h5py.Group.get(self._file(source.holder), source.name)
            if source is None or not isinstance(item, h5py.Dataset):
                missing = f"dataset {mapping.dataset!r} of {holder}"
                raise self.outer.missing(missing, kind="virtual", dataset=spot.asked)
            return self._usable(item, source, depth=depth + 1)

        return VirtualDataset(found, source_of, path=self._path, asked=spot.asked)


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _link(file: h5py.File, name: str) -> tuple[int, Any] | None:
    """Type and value of a link, whose way there is of hard links only; None if there is none."""
    encoded = name.encode("utf-8", "surrogateescape")
    try:
        kind = file.id.links.get_info(encoded).type
    except (KeyError, RuntimeError):
        # Not there, or damaged; nothing else is opened by this, and HDF5 says what is wrong.
        found = h5py.Group.get(file, name, getclass=True)
        return None if found is None else (h5py.h5l.TYPE_HARD, None)
    if kind == h5py.h5l.TYPE_HARD:
        return kind, None
    value = file.id.links.get_val(encoded)  # which refuses links of an application's own type
    if kind == h5py.h5l.TYPE_SOFT:
        return kind, value.decode("utf-8", "surrogateescape")
    return kind, tuple(each.decode("utf-8", "surrogateescape") for each in value)
