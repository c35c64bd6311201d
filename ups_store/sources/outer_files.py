"""Files that a source takes data from beside itself, and which of them may be read.

HDF5 opens them by names that the source holds: external links, external storage, virtual datasets. Here they
are looked for in the same places, but HDF5 never opens one by its name: it gets a descriptor of a file that
was seen to lie below the folder that was allowed, so a name that becomes a symbolic link meanwhile leads
nowhere else.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ups_store.errors import ConfigError, ExternalDataError
from ups_store.sources.file_state import FileState, OuterFile, changed, file_state
from ups_store.sources.hdf5 import h5py, open_hdf5

Kind = Literal["link", "virtual", "raw"]
_MAX_OPEN = 32  # HDF5 files that are kept open for the next read; a virtual dataset may have thousands
_PREFIXES = {"link": "HDF5_EXT_PREFIX", "virtual": "HDF5_VDS_PREFIX", "raw": "HDF5_EXTFILE_PREFIX"}
_WORDS = {
    "link": "is behind a link into another file",
    "virtual": "is virtual, of data in another file",
    "raw": "has its bytes in another file",
}
_ALLOW = "if you trust the file, allow those below a folder: --follow-external ROOT (data.follow_external)"
# Not waiting for the other end of a pipe, which a name may have become after it was looked at.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW


class OuterFiles:
    """The outer files of one source.

    Args:
        source: The source.
        root: Folder below which they may lie; None: there may be none.
        note: Called with the name of each that is opened.

    Attributes:
        used: Those that were needed so far: a name in a file once each, in the order of their first use.
        is_complete: Whether all are known; then another one is a sign that the source changed.
    """

    def __init__(
        self, source: Path, root: Path | None, *, note: Callable[[str], None] = lambda name: None
    ) -> None:
        self.used: list[OuterFile] = []
        self.is_complete = False
        self._source = source
        self._root = None if root is None else _real_folder(root)
        self._note = note
        self._found: dict[tuple[Path, Kind, str], Path] = {}
        self._states: dict[Path, FileState] = {}
        self._files: OrderedDict[Path, h5py.File] = OrderedDict()

    @property
    def are_allowed(self) -> bool:
        """Whether there may be any."""
        return self._root is not None

    def locate(self, name: str, *, kind: Kind, holder: Path, dataset: str) -> Path:
        """The file that a name means; it may be read.

        Args:
            name: What the file is called.
            kind: What names it.
            holder: The file that holds the name.
            dataset: HDF5 path that was asked for, for messages.

        Returns:
            The source as it was named, if that is meant; else a real path.

        Raises:
            ExternalDataError: Kind "external_data", "external_outside", "external_missing",
                "virtual_missing" or "not_a_file".
        """
        known = self._found.get((holder, kind, name))
        if known is not None:
            return known
        places = _places(name, kind, self._folders(holder))
        if holder == self._source and any(self._is_source(place) for place in places):
            return self._source
        if self._root is None:
            raise self._error(f"dataset {dataset!r} {_WORDS[kind]}", "external_data", name, dataset, _ALLOW)
        place = next((place for place in places if os.path.lexists(place)), None)
        if place is None:
            raise self.missing(name, kind=kind, dataset=dataset)
        path = self._check_place(place, name, kind, dataset)
        if self.is_complete:
            raise changed(self._source)
        with self.opened(path):
            self._found[holder, kind, name] = path
            self.used.append(OuterFile(name, path, self._states[path]))
        return path

    def missing(self, name: str, *, kind: Kind, dataset: str) -> ExternalDataError:
        """The error for a file, or a dataset of it, that isn't there."""
        what = "a source of the virtual" if kind == "virtual" else "a file with data of"
        return self._error(
            f"{what} dataset {dataset!r} is missing",
            "virtual_missing" if kind == "virtual" else "external_missing",
            name,
            dataset,
            "fetch or mount it, or make the dataset without it",
        )

    def hdf5(self, path: Path) -> h5py.File:
        """An outer HDF5 file, which stays open for a while.

        Raises:
            SourceError: As `open_hdf5` and `opened`.
        """
        if path not in self._files:
            with self.opened(path) as fd:
                self._files[path] = open_hdf5(path, at=f"/proc/self/fd/{fd}")
            if len(self._files) > _MAX_OPEN:
                self._files.popitem(last=False)  # closed once no dataset of it is in use
        self._files.move_to_end(path)
        return self._files[path]

    @contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """A descriptor of an outer file, which is the one that was located.

        Args:
            path: Real path, by `locate`.

        Raises:
            SourceError: Kind "source_changed", or "unreadable".
        """
        self._note(os.fsencode(path).decode(errors="replace"))
        fd = self._open(path)
        try:
            status = os.fstat(fd)
            state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            is_same = os.readlink(f"/proc/self/fd/{fd}") == os.fspath(path) and stat.S_ISREG(status.st_mode)
            if not is_same or self._states.setdefault(path, state) != state:
                raise changed(path)
            yield fd
        finally:
            os.close(fd)

    def _open(self, path: Path) -> int:
        try:
            return os.open(path, _OPEN_FLAGS)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOENT, errno.ENOTDIR):
                raise changed(path) from error
            hint = "raise `ulimit -n`" if error.errno == errno.EMFILE else "check its permissions (`ls -l`)"
            raise self._error(f"can't be opened ({error.strerror})", "unreadable", path, "", hint) from error

    def changed_one(self) -> Path | None:
        """An outer file that isn't what it was when it was opened first, if there is one."""
        return next((path for path, state in self._states.items() if file_state(path) != state), None)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _folders(self, holder: Path) -> Sequence[Path]:
        if holder != self._source:
            return (holder.parent,)
        return Path(os.path.abspath(holder)).parent, Path(os.path.realpath(holder)).parent

    def _is_source(self, place: Path) -> bool:
        """Whether a place is the source's own; names of other files aren't even looked for."""
        try:
            return place.name == self._source.name and os.path.samefile(place, self._source)
        except OSError:
            return False

    def _check_place(self, place: Path, name: str, kind: Kind, dataset: str) -> Path:
        assert self._root is not None
        path = Path(os.path.realpath(place))
        if not path.is_relative_to(self._root):
            error = self._error(
                f"dataset {dataset!r} {_WORDS[kind]}, beyond the folder that is allowed",
                "external_outside",
                path,
                dataset,
                "move the file there, or allow another folder: --follow-external (data.follow_external)",
            )
            error.expected = f"a file below {self._root}"
            raise error
        if not path.exists():
            raise self.missing(name, kind=kind, dataset=dataset)
        if not path.is_file():
            problem = f"data of dataset {dataset!r} isn't in a regular file"
            raise self._error(problem, "not_a_file", path, dataset, "copy the data into one")
        return path

    def _error(self, problem: str, kind: str, outer: object, dataset: str, hint: str) -> ExternalDataError:
        error = ExternalDataError(problem, kind=kind, path=self._source, found=outer, hint=hint)
        error.dataset, error.outer = dataset, str(outer)
        return error


def _real_folder(root: Path) -> Path:
    if not root.is_dir():
        raise ConfigError("data.follow_external", expected="a folder", found=root)
    return Path(os.path.realpath(root))


def _places(name: str, kind: Kind, folders: Sequence[Path]) -> list[Path]:
    """Where HDF5 looks for a file, in its order; of raw bytes also beside the source, where it doesn't."""
    named, places = Path(name), list[Path]()
    if named.is_absolute():
        if kind == "raw":
            return [named]
        places, named = [named], Path(named.name)  # it may have moved together with the file that names it
    prefixes = os.environ.get(_PREFIXES[kind], "")
    for prefix in [prefixes] if kind == "raw" else prefixes.split(os.pathsep):
        if prefix not in ("", "."):
            places.append(Path.cwd() / prefix.replace("${ORIGIN}", str(folders[0])) / named)
    beside = [folder / named for folder in folders]
    here = Path.cwd() / named
    return [*places, here, *beside] if kind == "raw" else [*places, *beside, here]
