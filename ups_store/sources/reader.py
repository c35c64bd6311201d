"""`Reader`: where requests run, in a process of its own; and what a request is."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from ups_store.sources.contents import Selection
from ups_store.sources.file_state import FileState, changed, file_state, outer_state
from ups_store.sources.slots import Activity

if TYPE_CHECKING:
    from ups_store.sources.source import Source
    from ups_store.sources.tasks import Task

_MAX_OPEN = 8  # files that are kept open

Allocate = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
_SourceKey = tuple[Path, str | None, Selection, Path | None]


class Request(Protocol):
    """Something to be done by a reader with one file."""

    @property
    def path(self) -> Path | str:
        """The file, or another place that a source has, for messages."""
        ...

    @property
    def subject(self) -> str:
        """What of the file is concerned, for messages, such as "samples 4..7"."""
        ...

    @property
    def first_sample(self) -> int | None:
        """First sample concerned, numbered as in the file, for messages."""
        ...

    def run(self, reader: Reader) -> object:
        """Do it; arrays go where `reader.place` says.

        A small result may be returned (pickled).

        Raises:
            SourceError: Passed on to the process that asked.
        """
        ...


class Reader:
    """Where requests run: keeps files open, provides room for arrays, and says what is being done.

    Args:
        report: Called with the status each time it changes.

    Attributes:
        status: What is being done.
    """

    def __init__(self, report: Callable[[Activity], None] = lambda status: None) -> None:
        self.status = Activity(-1, 0.0, 0.0, "starting")
        self._report = report
        self._sources: OrderedDict[_SourceKey, tuple[Source, FileState]] = OrderedDict()
        self._place: Allocate

    def run(self, request: Request, *, request_id: int, place: Allocate) -> object:
        """Run a request whose arrays go where `place` says."""
        self._place = place
        now = time.monotonic()
        self._tell(Activity(request_id, now, now, "beginning"))
        try:
            return request.run(self)
        finally:
            self.doing("idle")

    def doing(self, what: str) -> None:
        """Say what is being done from now on, such as "reading"."""
        self._tell(replace(self.status, since_s=time.monotonic(), doing=what, dataset=""))

    def reading(self, dataset: str) -> None:
        """Say that a dataset is read from now on, or still is and gets on: the deadline starts again."""
        now = time.monotonic()
        self._tell(replace(self.status, progressed_s=now, since_s=now, doing="reading", dataset=dataset))

    def progressed(self, num: int = 0) -> None:
        """Say that a long request gets on, by `num` of its own units: its deadline starts again."""
        status = self.status
        self._tell(replace(status, progressed_s=time.monotonic(), num_done=status.num_done + num))

    def place(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Room for an array of the result, to be filled by the request."""
        return self._place(name, shape, dtype)

    @contextmanager
    def opened(
        self,
        path: Path,
        *,
        task: Task | None,
        selection: Selection,
        follow: Path | None = None,
        state: FileState | None = None,
    ) -> Iterator[Source]:
        """A source, which is opened unless it still is, for the duration of a block.

        Raises:
            SourceError: As `open_source`; kind "source_changed", if the path isn't the file that was opened,
                as it was then, or as `state` says: HDF5 reads zeros where an open file was cut off, and a
                reader may be younger than a change.
        """
        source, found = self._source((path, task.name if task else None, selection, follow), task)
        if state not in (None, found + outer_state(source.info.outer)):
            self.close()
            raise changed(path)
        try:
            yield source
        except BaseException:
            self._check_unchanged(source, path, found)
            self.close()
            raise
        self._check_unchanged(source, path, found)

    def _check_unchanged(self, source: Source, path: Path, found: FileState) -> None:
        where = path if file_state(path) != found else source.changed_file()
        if where is not None:
            self.close()
            raise changed(where) from None

    def _source(self, key: _SourceKey, task: Task | None) -> tuple[Source, FileState]:
        if key not in self._sources:
            from ups_store.sources.source import open_source  # HDF5, which other requests don't need

            self.doing("opening")
            path, _, selection, follow = key
            state = file_state(path)
            source = open_source(
                path,
                task=task,
                selection=selection,
                follow=follow,
                is_mapped=True,
                note=self.reading,  # there may be thousands
            )
            self._sources[key] = source, state
            if len(self._sources) > _MAX_OPEN:
                oldest, _ = self._sources.popitem(last=False)[1]
                oldest.close()
        self._sources.move_to_end(key)
        return self._sources[key]

    def close(self) -> None:
        """Close all files."""
        for source, _ in self._sources.values():
            source.close()
        self._sources.clear()

    def _tell(self, status: Activity) -> None:
        self.status = status
        self._report(status)
