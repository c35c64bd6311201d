"""The sources of a build on this machine: where they are, or copies of them in `data.stage_dir`.

Which files make a split is decided by where they come from, as without copies; then all that aren't there yet
are copied or fetched side by side, by reader processes, and a store's identity is the same either way.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ups_store.building.config import BuildConfig
from ups_store.building.progress import QuietWatcher, Watcher
from ups_store.console import format_nbytes
from ups_store.errors import ConfigError, SourceError
from ups_store.printable import counted
from ups_store.sources.attempts import Attempts
from ups_store.sources.copies import find_copy, num_there
from ups_store.sources.origins import (
    LocalOrigin,
    Origin,
    Version,
    is_remote,
    joined,
    names_remote,
    path_for_choosing,
)
from ups_store.sources.places import folder_of, origin_of
from ups_store.sources.readers import Patience, ReaderPool
from ups_store.sources.source_files import (
    SPLIT_NAMES,
    SourceFile,
    choose_sources,
    declared_patterns,
    files_below,
    find_sources,
    natural_key,
    no_source,
)
from ups_store.sources.staging import ListRequest, LookRequest, StageRequest, folder_of_copy
from ups_store.sources.tasks import Task
from ups_store.system import files

MAX_PARALLEL = 4  # copies at a time: more share the same network
_NUM_SLOTS = 64  # requests that a reader may have before it
_SUFFIXES = (".h5", ".hdf5")
_PATTERN = frozenset("*?[")
_Candidates = dict[Path, Origin]  # by what the files are called when a split's are chosen


@dataclass(frozen=True)
class _Wanted:
    """A source of a split, wherever it is."""

    origin: Origin
    whole: bool


class Sources:
    """Finds the sources of a configuration, and has copies of them where it says so; asks each place once.

    Args:
        config: What is built.
        watcher: Hears how it goes.
        is_dry: Whether to copy nothing: sources that have no copy are read where they are.
    Raises:
        ConfigError: If files that sources take data from would be left behind, or copies would be taken for
            sources; kind "not_together".
    """

    def __init__(self, config: BuildConfig, *, watcher: Watcher | None = None, is_dry: bool = False) -> None:
        self._config, self._watcher, self._is_dry = config, watcher or QuietWatcher(), is_dry
        self._stage_dir = config.stage_dir
        self._versions: dict[str, Version | None] = {}
        self._copies: dict[str, Path] = {}
        self._listed: _Candidates | None = None
        if self._stage_dir is not None:
            _check_together(config)
        reading = config.reading
        self._attempts = Attempts(reading.timeout_s / (2 * (reading.retries + 1)), reading.retries)

    def of(self, task: Task, split: str) -> tuple[SourceFile, ...]:
        """The files of a split, on this machine; those that have no copy yet are copied.

        Args:
            task: The task.
            split: Name of the split.
        Raises:
            SourceError: As `find_sources`, and as `download.fetch`.
            DiskFullError: If there is no room for copies.
            MissingExtraError: If a source is in S3, and obstore isn't installed.
        """
        if self._stage_dir is None:
            data = self._config.data
            return find_sources(data.root, task=task, split=split, files=data.files)
        with self._pool() as pool:
            wanted = self._wanted(task, split, pool)
            self._copy([each.origin for each in wanted], pool)
        return tuple(SourceFile(self._place(each.origin), each.whole) for each in wanted)

    def stage_all(self) -> list[Path]:
        """Have copies of the sources of every task and split, made side by side; nothing if none are wanted.

        Returns:
            The copies.
        Raises:
            SourceError: As `of`; also if a task has no training data. That there are none for validation or
                testing is noted.
        """
        if self._stage_dir is None:
            return []
        with self._pool() as pool:
            self._watcher.watch(pool)
            origins: dict[str, Origin] = {}
            for name in self._config.data.tasks:
                for split in self._config.data.split:
                    for each in self._wanted_or_none(self._config.get_task(name), split, pool):
                        origins.setdefault(each.origin.key, each.origin)
            self._copy(list(origins.values()), pool)
        return [self._place(origin) for origin in origins.values()]

    @contextlib.contextmanager
    def _pool(self) -> Iterator[ReaderPool]:
        reading = self._config.reading
        num_workers = MAX_PARALLEL if reading.num_workers == "auto" else max(1, reading.num_workers)
        patience = Patience(timeout_s=reading.timeout_s, retries=reading.retries)
        with ReaderPool(
            num_workers,
            slot_nbytes=1,
            num_slots=_NUM_SLOTS,
            patience=patience,
            note=self._watcher.note,
        ) as pool:
            yield pool

    def _wanted_or_none(self, task: Task, split: str, pool: ReaderPool) -> Sequence[_Wanted]:
        try:
            return self._wanted(task, split, pool)
        except SourceError as error:
            if error.kind != "no_source" or split == "train":
                raise
            return ()  # the build says so when it comes to that split

    def _wanted(self, task: Task, split: str, pool: ReaderPool) -> list[_Wanted]:
        data = self._config.data
        if not data.is_remote and not names_remote(task.files.values(), data.root):
            found = find_sources(data.root, task=task, split=split, files=data.files)
            wanted = [_Wanted(LocalOrigin(source.path), source.whole) for source in found]
            if not self._is_dry:
                self._look([each.origin for each in wanted], pool)
            return wanted
        candidates = self._candidates(task, split, pool)
        ordered = sorted(candidates, key=lambda path: (natural_key(path.name), str(path)))
        chosen = choose_sources(ordered, task=task, split=split, is_named=data.files is not None)
        if not chosen:
            raise no_source(data.root, task, split, ordered)
        return [_Wanted(candidates[source.path], source.whole) for source in chosen]

    def _candidates(self, task: Task, split: str, pool: ReaderPool) -> _Candidates:
        data = self._config.data
        if data.files is not None:
            return self._named(task, split, data.files, "data.files", pool)
        if task.files:
            key, patterns = declared_patterns(task, split)
            return self._named(task, split, patterns, key, pool)
        assert isinstance(data.root, str), "else nothing is remote"
        if folder_of(data.root) is None:
            return self._guessed(data.root, task, pool)
        return self._listing(data.root, pool)

    def _named(self, task: Task, split: str, names: Sequence[str], key: str, pool: ReaderPool) -> _Candidates:
        """Files that the configuration names: URLs, files below a remote root, and of this machine."""
        root = self._config.data.root
        given: dict[str, Origin] = {}
        found: _Candidates = {}
        local = []
        for name in names:
            if is_remote(name, folder=root):
                if "*" in name:
                    raise _not_listed(name, key, "give its folder as data.root, and only the pattern here")
                given[name] = origin_of(name)
            elif isinstance(root, Path) or name.startswith("/"):
                local.append(name)
            elif _PATTERN.isdisjoint(name):
                given[name] = origin_of(joined(root, name))
            else:
                found |= self._matching(root, name, key, pool)
        self._look(given.values(), pool)
        for name, origin in given.items():
            found[self._path_of(origin, name, key)] = origin
        if local:
            here = root if isinstance(root, Path) else Path("/")
            paths = files_below(here, task=task, split=split, files=local)
            self._look([LocalOrigin(path) for path in paths], pool)
            found |= {path: LocalOrigin(path) for path in paths}
        return found

    def _path_of(self, origin: Origin, text: str, key: str) -> Path:
        version = self._versions.get(origin.key)
        if version is None:
            raise _missing(origin, key)
        return path_for_choosing(text, version.name, below=folder_of_copy(Path(), origin).name)

    def _matching(self, root: str, pattern: str, key: str, pool: ReaderPool) -> _Candidates:
        if folder_of(root) is None:
            hint = "name each file, or give the folder as an rclone remote or s3://: https lists none"
            raise _not_listed(pattern, key, hint)
        wanted = PurePosixPath("/", pattern).parts[1:]
        found = {
            path: origin
            for path, origin in self._listing(root, pool).items()
            if _matches(path.parts[2:], wanted)
        }
        if not found:
            place = joined(root, pattern)
            raise SourceError("no such file", kind="missing_file", path=place, hint=f"check {key}")
        return found

    def _listing(self, root: str, pool: ReaderPool) -> _Candidates:
        """All files below a remote root that may be sources."""
        if self._listed is None:
            folder = folder_of(root)
            assert folder is not None, root
            self._listed = {}
            for path, version in pool.ask(ListRequest(folder, self._attempts)):
                origin = folder.origin(path)
                self._versions[origin.key] = version
                place = path_for_choosing(path, version.name, below=folder_of_copy(Path(), origin).name)
                self._listed[place] = origin
        return self._listed

    def _guessed(self, root: str, task: Task, pool: ReaderPool) -> _Candidates:
        """Files with the names that splits have, where nothing lists them."""
        names = [f"{task.name}_{split}{suffix}" for split in SPLIT_NAMES for suffix in _SUFFIXES]
        origins = {name: origin_of(joined(root, name)) for name in names}
        self._look(origins.values(), pool, are_guesses=True)
        return {
            self._path_of(origin, name, "data.root"): origin
            for name, origin in origins.items()
            if self._versions[origin.key] is not None
        }

    def _look(self, origins: Iterable[Origin], pool: ReaderPool, *, are_guesses: bool = False) -> None:
        """Find out what is there; whose digest is known, and has a copy, needn't be asked."""
        unknown = [origin for origin in origins if origin.key not in self._versions]
        asked = []
        for origin in unknown:
            if isinstance(origin, LocalOrigin):  # it was looked at when it was found
                self._versions[origin.key] = origin.look(stall_s=0)
            elif origin.digest and (copy := find_copy(self._folder(origin), origin)):
                self._copies[origin.key] = copy
                self._versions[origin.key] = Version(copy.stat().st_size, "", copy.name)
            else:
                asked.append(origin)
        requests = [LookRequest(origin, self._attempts, are_guesses) for origin in asked]
        for origin, version in zip(asked, pool.ask_each(requests), strict=True):
            self._versions[origin.key] = version

    def _folder(self, origin: Origin) -> Path:
        assert self._stage_dir is not None
        return folder_of_copy(self._stage_dir, origin)

    def _copy(self, origins: Sequence[Origin], pool: ReaderPool) -> None:
        """Copy or fetch those that have no copy."""
        missing = []
        for origin in origins:
            version = self._versions.get(origin.key)
            if origin.key in self._copies:
                continue
            if version is None and not self._is_dry:
                raise _missing(origin, "data.root and data.files")
            if copy := find_copy(self._folder(origin), origin, version or origin.look(stall_s=0)):
                self._copies[origin.key] = copy
            elif version is not None:
                missing.append(StageRequest(origin, version, self._folder(origin), self._attempts))
        if missing and not self._is_dry:
            missing.sort(key=lambda request: -request.version.size)  # the longest ones begin first
            self._check_room(missing)
            self._run(missing, pool)

    def _check_room(self, requests: Sequence[StageRequest]) -> None:
        """Refuse before the first byte what the disk has no room for."""
        assert self._stage_dir is not None
        files.make_folder(self._stage_dir, hint="check data.stage_dir")
        needed = sum(each.version.size - num_there(each.folder, each.version) for each in requests)
        if needed > files.free_bytes(self._stage_dir):
            with files.disk_full_as_error(self._stage_dir / "copies of sources", needed):
                raise OSError(errno.ENOSPC, "no room for copies of all sources")

    def _run(self, requests: Sequence[StageRequest], pool: ReaderPool) -> None:
        sizes = [request.version.size for request in requests]
        done = [0] * len(requests)

        def count(index: int, num_done: int) -> None:
            num_done = min(num_done, sizes[index])
            if num_done > done[index]:
                self._watcher.advance(num_done - done[index])
                done[index] = num_done

        self._watcher.stage(f"staging {counted(len(requests), 'source')}", sum(sizes), unit="bytes")
        self._watcher.waits("copies of sources")
        for index, _ in enumerate(pool.ask_each(requests, report=count)):
            count(index, sizes[index])
            request = requests[index]
            copy = find_copy(request.folder, request.origin)
            if copy is None:
                raise SourceError(
                    "its copy was changed or removed meanwhile",
                    kind="source_changed",
                    path=request.folder,
                    hint="let no other program write to data.stage_dir, and run again",
                )
            self._copies[request.origin.key] = copy

    def _place(self, origin: Origin) -> Path:
        copy = self._copies.get(origin.key)
        if copy is not None:
            return copy
        if isinstance(origin, LocalOrigin):  # nothing was to be copied
            return origin.path
        version = self._versions[origin.key]
        size = f" ({format_nbytes(version.size)})" if version else ""
        raise SourceError(
            f"it isn't fetched yet{size}, and a dry run fetches nothing",
            kind="not_fetched",
            path=origin.location,
            hint="--stage-only fetches it without building anything",
        )


def stage_sources(config: BuildConfig, *, watcher: Watcher | None = None) -> list[Path]:
    """Have copies of all sources of a configuration, where it says so; what is there already is kept.

    A build does it by itself: this is for those who want it done before.

    Args:
        config: What is going to be built.
        watcher: Hears how it goes; by default nothing is shown.
    Returns:
        The copies; none where sources are read in place.
    Raises:
        ConfigError: If nothing is to be copied; kind "nothing_to_stage".
        SourceError: As `Sources.stage_all`.
        DiskFullError: If there is no room.
    """
    if config.stage_dir is None:
        raise ConfigError(
            "sources are read where they are",
            kind="nothing_to_stage",
            expected="data.stage_dir, or sources by URL",
            hint="say data.stage_dir=FOLDER",
        )
    return Sources(config, watcher=watcher).stage_all()


def _check_together(config: BuildConfig) -> None:
    data = config.data
    if data.follow_external is not None:
        raise ConfigError(
            "copies of sources would lack the files that they take data from",
            kind="not_together",
            expected="data.stage_dir or data.follow_external",
            found="both" if data.stage_dir else "data.follow_external and sources by URL",
            hint="leave out data.stage_dir, or copy the whole folder yourself",
        )
    if data.stage_dir is None or isinstance(data.root, str):
        return
    if data.stage_dir.resolve().is_relative_to(data.root.resolve()):
        raise ConfigError(
            "data.stage_dir lies in data.root, where copies would be taken for sources",
            kind="not_together",
            path=data.stage_dir,
            expected=f"a folder outside of {data.root}",
        )


def _not_listed(pattern: str, key: str, hint: str) -> ConfigError:
    return ConfigError(key, kind="no_listing", expected="names of files", found=repr(pattern), hint=hint)


def _missing(origin: Origin, key: str) -> SourceError:
    return SourceError("no such file", kind="missing_file", path=origin.location, hint=f"check {key}")


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether names of folders and a file match patterns, as those of `glob` do."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[skip:], patterns[1:]) for skip in range(len(parts) + 1))
    if not parts or not fnmatch.fnmatchcase(parts[0], patterns[0]):
        return False
    return _matches(parts[1:], patterns[1:])
