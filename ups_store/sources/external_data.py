"""Data that a source has in other files: refused unless a folder is allowed, and read there by HDF5.

External links, external storage and virtual datasets name other files. Each name on the way to an object is
looked at before HDF5 follows it, where HDF5 looks for it; it has to lead to a regular file below the folder,
symbolic links resolved. Once HDF5 has opened an object, the files that it really opened are compared with
those, as a name may have become a link meanwhile. Of a virtual dataset it gives the fill value where it can't
open a source, without a word: so every source is opened with the dataset, and stays open until both close.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ups_store.errors import ConfigError, SourceError
from ups_store.sources.contents import FileState, OuterFile, changed, file_state
from ups_store.sources.hdf5 import (
    Box,
    VirtualDataset,
    check_written,
    h5py,
    open_hdf5,
    source_error,
    translated,
)
from ups_store.system.memory import free_descriptors

Kind = Literal["link", "virtual", "raw"]
_MAX_LINKS = 16  # on the way to one object, as HDF5's own limit
_MAX_OPEN = 32  # outer files that are kept open to look at their links; groups of samples may have thousands
_PREFIXES = {"link": "HDF5_EXT_PREFIX", "virtual": "HDF5_VDS_PREFIX", "raw": "HDF5_EXTFILE_PREFIX"}
_WORDS = {
    "link": "is behind a link into another file",
    "virtual": "is virtual, of data in another file",
    "raw": "has its bytes in another file",
}


class _Spot(NamedTuple):
    """An object: the file that it is in, and its path there by hard links only."""

    holder: Path
    name: str


class CheckedFile(h5py.File):  # type: ignore[misc]  # h5py has no types
    """An open source whose objects are checked when they are asked for by their whole path.

    The groups that it gives aren't guarded. Other files may lie below `root`; with None there may be none.
    `note` is called with the name of each that is looked at.
    """

    def __init__(
        self, path: Path, root: Path | None = None, note: Callable[[str], None] = lambda name: None
    ) -> None:
        if root is not None and not root.is_dir():
            raise ConfigError("data.follow_external", expected="a folder", found=root)
        self._plain = open_hdf5(path)  # whose items are as HDF5 has them
        super().__init__(self._plain.id)
        self.outer: list[OuterFile] = []  # that were needed so far, in the order of their first use
        self.is_complete = False  # whether all are known; another one is then a sign that the source changed
        self.may_have_outer = root is not None
        self._path, self._note = path, note
        self._root = None if root is None else Path(os.path.realpath(root))
        self._located: dict[tuple[Path, Kind, str], Path] = {}
        self._states: dict[Path, tuple[Path, FileState]] = {}  # real path: as it was named, and its state
        self._looked_at: OrderedDict[Path, h5py.File] = OrderedDict()
        self._datasets: dict[_Spot, h5py.Dataset] = {}  # which hold the sources of virtual ones open

    def __getitem__(self, name: str) -> Any:
        item = self.get(name)
        if item is None:
            raise KeyError(f"no object {name!r}")
        return item

    def __contains__(self, name: object) -> bool:
        return self._find(self._path, str(name), str(name)) is not None

    def get(self, name: str, default: Any = None, getclass: bool = False, **others: Any) -> Any:
        """Give the object of a path, or its class; `default` if there is none."""
        dataset = name.strip("/")
        spot = self._find(self._path, name, dataset)
        if spot is None:
            return default
        if spot in self._datasets and not getclass:
            return self._datasets[spot]
        item = self._plain.get(name, default, getclass=getclass)
        if item is default or getclass:
            return item
        if spot.holder != self._path:
            opened_path = os.readlink(f"/proc/self/fd/{item.file.id.get_vfd_handle()}")
            if opened_path != os.fspath(spot.holder):
                raise changed(self._path)  # the name has become a link since it was followed here
        if isinstance(item, h5py.Dataset) and item.external:
            access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
            access.set_efile_prefix(os.fsencode(self._check_raw(item, spot.holder, dataset)))
            del item  # HDF5 takes one folder for all that have a dataset open
            stored_name = name.encode(errors="surrogateescape")
            item = h5py.Dataset(h5py.h5d.open(self._plain.id, stored_name, access))
        elif isinstance(item, h5py.Dataset) and item.is_virtual:
            item = self._datasets[spot] = self._check_virtual(item, spot.holder, dataset)
        return item

    def check_links(self, name: str) -> None:
        """Follow the links to an object without opening it; what isn't there is no matter."""
        self._find(self._path, name, name)

    def changed_one(self) -> Path | None:
        """Give an outer file that isn't what it was, or isn't where its name leads any more, if there is."""
        for path, (named, state) in self._states.items():
            if os.path.realpath(named) != os.fspath(path) or file_state(path) != state:
                return path
        return None

    def close(self) -> None:
        """Close it and all outer files; a second call does nothing."""
        self._datasets.clear()
        self._close_looked_at()
        super().close()

    def _close_looked_at(self) -> None:
        for file in self._looked_at.values():
            file.close()
        self._looked_at.clear()

    def _file(self, holder: Path) -> h5py.File:
        """Open a file as HDF5 itself would: where it can't, there would be fill values."""
        if holder == self._path:
            return self._plain
        if holder not in self._looked_at:
            with translated("can't open the other file", holder):
                self._looked_at[holder] = h5py.File(holder, "r")
            if len(self._looked_at) > _MAX_OPEN:
                self._looked_at.popitem(last=False)[1].close()
        self._looked_at.move_to_end(holder)
        return self._looked_at[holder]

    def _find(self, holder: Path, name: str, dataset: str) -> _Spot | None:
        """Follow the links of a path; None if they lead nowhere."""
        file, at, ahead, num_links = self._file(holder), "", deque(_steps(name)), 0
        while ahead:
            here = f"{at}/{ahead.popleft()}"
            link = _link(file, here)
            if link is None:
                return None
            if isinstance(link, h5py.HardLink):
                at = here
                continue
            num_links += 1
            if num_links > _MAX_LINKS:
                problem = f"more than 16 links on the way to {dataset!r}"
                raise source_error(problem, "link_loop", self._path, dataset, hint="mend the file")
            if isinstance(link, h5py.ExternalLink):
                holder = self._locate(link.filename, "link", holder, dataset)
                file, at = self._file(holder), ""
            elif link.path.startswith("/"):
                at = ""
            ahead.extendleft(reversed(_steps(link.path)))
        return _Spot(holder, at or "/")

    def _locate(self, name: str, kind: Kind, holder: Path, dataset: str) -> Path:
        """Find the file that HDF5 opens for a name, if it may: the source as it was named, or a real path."""
        if (holder, kind, name) in self._located:
            return self._located[holder, kind, name]
        places = self._places(name, kind, holder)
        for path_there in places if holder == self._path else ():
            if path_there.name == self._path.name:  # else names of other files aren't even looked for
                with contextlib.suppress(OSError):
                    if os.path.samefile(path_there, self._path):
                        return self._path
        if self._root is None:
            hint = "if you trust the file, allow those below a folder: --follow-external ROOT"
            problem = f"dataset {dataset!r} {_WORDS[kind]}"
            raise self._error(problem, "external_data", name, dataset, f"{hint} (data.follow_external)")
        named = next((path_there for path_there in places if os.path.lexists(path_there)), None)
        if named is None:
            raise self._missing(name, kind, dataset)
        path = Path(os.path.realpath(named))
        if not path.is_relative_to(self._root):
            hint = "move the file there, or allow another folder: --follow-external (data.follow_external)"
            problem = f"dataset {dataset!r} {_WORDS[kind]}, beyond the folder that is allowed"
            expected = f"a file below {self._root}"
            raise self._error(problem, "external_outside", path, dataset, hint, expected=expected)
        if not path.exists():
            raise self._missing(name, kind, dataset)
        if not path.is_file():
            problem = f"data of dataset {dataset!r} isn't in a regular file"
            raise self._error(problem, "not_a_file", path, dataset, "copy the data into one")
        if self.is_complete:
            raise changed(self._path)
        _, state = self._states.setdefault(path, (named, file_state(path)))
        self._note(os.fsencode(path).decode(errors="replace"))
        self._located[holder, kind, name] = path
        self.outer.append(OuterFile(name, path, state))
        return path

    def _places(self, name: str, kind: Kind, holder: Path) -> list[Path]:
        """List where HDF5 looks for a file, in its order; for raw bytes also beside the source."""
        folders = [holder.parent]
        if holder == self._path:
            folders = [Path(os.path.abspath(holder)).parent, Path(os.path.realpath(holder)).parent]
        named, places = Path(name), list[Path]()
        if named.is_absolute():
            if kind == "raw":
                return [named]
            places.append(named)
            named = Path(named.name)  # it may have moved with the file that names it
        prefixes = os.environ.get(_PREFIXES[kind], "")
        for prefix in [prefixes] if kind == "raw" else prefixes.split(os.pathsep):
            if prefix not in ("", "."):
                places.append(Path.cwd() / prefix.replace("${ORIGIN}", str(folders[0])) / named)
        here, beside = Path.cwd() / named, [folder / named for folder in folders]
        return [*places, here, *beside] if kind == "raw" else [*places, *beside, here]

    def _check_raw(self, item: h5py.Dataset, holder: Path, dataset: str) -> Path:
        """Check the files with a dataset's bytes; gives the folder that their relative names start from."""
        done, total, folders = 0, math.prod(item.shape) * item.dtype.itemsize, set[Path]()
        for name, offset, size in item.external:
            length = min(size, total - done)
            if not length:
                continue
            path = self._locate(name, "raw", holder, dataset)
            if not os.path.isabs(name):
                folders.add(Path(str(self._states[path][0]).removesuffix(name)))
            if len(folders) > 1:
                raise self._missing(name, "raw", dataset)
            if path.stat().st_size < offset + length:
                needed = f"{offset + length} bytes in {path}"
                raise self._truncated(dataset, needed, path.stat().st_size)
            done += length
        if done < total:
            raise self._truncated(dataset, total, done)
        return folders.pop() if folders else Path.cwd()

    def _check_virtual(self, item: h5py.Dataset, holder: Path, dataset: str) -> VirtualDataset:
        """Check the sources of a virtual dataset, have HDF5 open them, and see that they are."""
        plist = item.id.get_create_plist()
        count = plist.get_virtual_count()
        num_files, num_free = len({plist.get_virtual_filename(i) for i in range(count)}), free_descriptors()
        if num_files > num_free:
            raise SourceError(
                f"too few file descriptors for the sources of the virtual dataset {dataset!r}",
                kind="no_descriptors",
                path=self._path,
                expected=num_files,
                found=f"{num_free} free",
                hint="raise `ulimit -n`",
            )
        filled, starts, files = list[Box](), list[tuple[int, ...]](), set[Path]()
        for i in range(count):
            names = plist.get_virtual_filename(i), plist.get_virtual_dsetname(i)
            if any("%b" in name.replace("%%", "") for name in names):
                problem = "virtual dataset of numbered sources: a missing last one couldn't be noticed"
                facts = {"expected": "names without %b", "found": f"{names[1]} of {names[0]}"}
                raise self._unsupported(problem, dataset, **facts)
            file, name = (text.replace("%%", "%") for text in names)
            space = plist.get_virtual_vspace(i)
            start, box = self._selected(space, space.shape, dataset)
            if box is None and count > 1:
                raise self._unsupported("virtual dataset of several sources without end", dataset)
            where = holder if file == "." else self._locate(file, "virtual", holder, dataset)
            files.add(self._check_source(where, name, plist.get_virtual_srcspace(i), box, dataset))
            filled += [box] if box else []
            starts.append(start)
        virtual = VirtualDataset(item.id)
        if filled and sum(math.prod(map(len, box)) for box in filled) < item.size:
            virtual.filled = filled
        for start in starts:  # a value of each source, whose file HDF5 then keeps open
            self._note(dataset)
            with translated("can't read", self._path, dataset):
                if all(first < n for first, n in zip(start, virtual.shape, strict=True)):
                    virtual[start]
        self._close_looked_at()
        for path in sorted(files - {self._path} - _open_paths()) if virtual.size else ():
            raise changed(path) if path.exists() else self._missing(str(path), "virtual", dataset)
        return virtual

    def _check_source(self, holder: Path, name: str, space: Any, target: Box | None, dataset: str) -> Path:
        """Check the source of a mapping to a box, None without end; gives the file that it is in."""
        spot = self._find(holder, name, dataset)
        source = None if spot is None else self._file(spot.holder).get(spot.name)
        if spot is None or not isinstance(source, h5py.Dataset):
            raise self._missing(f"dataset {name!r} of {holder}", "virtual", dataset)
        if source.is_virtual:
            raise self._unsupported("virtual dataset of virtual ones", dataset)
        if source.external:
            self._check_raw(source, spot.holder, dataset)
        is_all = space.get_select_type() == h5py.h5s.SEL_ALL
        start, taken = self._selected(space, source.shape, dataset)
        if (target is None) != (taken is None):
            raise self._unsupported("virtual dataset without end, of sources that have one", dataset)
        fits = len(start) == source.ndim
        if fits and target is not None and taken is not None:
            fits = all(not axis or axis[-1] < n for axis, n in zip(taken, source.shape, strict=True))
            lengths = [[len(axis) for axis in box if len(axis) != 1] for box in (target, taken)]
            if lengths[0] != lengths[1]:
                if not is_all:
                    raise self._unsupported("virtual dataset of boxes that are reshaped", dataset)
                fits = False
        if not fits:
            problem = f"dataset {name!r} of {holder} isn't what its virtual dataset is made of"
            room = f"room for {tuple(map(len, target or ())) if is_all else space.shape}"
            shape_text = f"shape {source.shape}"
            raise source_error(problem, "shapes_differ", self._path, dataset, expected=room, found=shape_text)
        check_written(source, name, (slice(None),) * source.ndim, path=spot.holder)
        return spot.holder

    def _selected(
        self, space: Any, shape: tuple[int, ...], dataset: str
    ) -> tuple[tuple[int, ...], Box | None]:
        """Give start and indices of what a dataspace selects of a shape; no indices where it has no end."""
        if space.get_select_type() == h5py.h5s.SEL_ALL:
            return (0,) * len(shape), tuple(map(range, shape))
        if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
            raise self._unsupported("virtual dataset of single points or irregular boxes", dataset)
        start, stride, count, block = space.get_regular_hyperslab()
        if any(c > 1 and b not in (1, s) for s, c, b in zip(stride, count, block, strict=True)):
            raise self._unsupported("virtual dataset of blocks with gaps between them", dataset)
        if h5py.h5s.UNLIMITED in (*count, *block):
            return start, None
        box = []
        for first, s, c, b in zip(start, stride, count, block, strict=True):
            step = s if b == 1 else 1
            box.append(range(first, first + c * b * step, step))
        return start, tuple(box)

    def _missing(self, name: str, kind: Kind, dataset: str) -> SourceError:
        subject = "a source of the virtual" if kind == "virtual" else "a file with data of"
        missing_kind = "virtual_missing" if kind == "virtual" else "external_missing"
        hint = "fetch or mount it, or make the dataset without it"
        return self._error(f"{subject} dataset {dataset!r} is missing", missing_kind, name, dataset, hint)

    def _error(
        self, problem: str, kind: str, outer: object, dataset: str, hint: str, **facts: object
    ) -> SourceError:
        facts |= {"found": outer, "outer": str(outer), "hint": hint}
        return source_error(problem, kind, self._path, dataset, **facts)

    def _truncated(self, dataset: str, expected: object, found: object) -> SourceError:
        facts: dict[str, Any] = {"expected": expected, "found": found, "hint": "copy the file again"}
        return source_error("data in another file ends too early", "truncated", self._path, dataset, **facts)

    def _unsupported(self, problem: str, dataset: str, **facts: object) -> SourceError:
        hint = "make it again, of blocks of its sources, all by their names"
        return source_error(problem, "virtual_unsupported", self._path, dataset, hint=hint, **facts)


def _steps(name: str) -> list[str]:
    return [step for step in name.split("/") if step not in ("", ".")]


def _link(file: h5py.File, name: str) -> h5py.HardLink | h5py.SoftLink | h5py.ExternalLink | None:
    """Look at a link, whose way there is of hard links only; None if there is none."""
    try:  # five times as fast as h5py's own look at a link
        info = file.id.links.get_info(name.encode("utf-8", "surrogateescape"))
    except (KeyError, RuntimeError):
        # Not there, or damaged; nothing else is opened by this, and HDF5 says what is wrong.
        return None if file.get(name, getclass=True) is None else h5py.HardLink()
    return h5py.HardLink() if info.type == h5py.h5l.TYPE_HARD else file.get(name, getlink=True)


def _open_paths() -> set[Path]:
    paths = set[Path]()
    for fd in os.listdir("/proc/self/fd"):
        try:
            paths.add(Path(os.readlink(f"/proc/self/fd/{fd}")))
        except OSError:  # of the listing itself
            continue
    return paths
