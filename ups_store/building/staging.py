"""The sources of a build on this machine: where they are, or copies of them in `data.stage_dir`.

Which files make a split is decided by where they come from, as without copies; then all that aren't there yet
are copied or fetched side by side, by reader processes, and a store's identity is the same either way.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from ups_store.building.config import BuildConfig
from ups_store.building.progress import Watcher
from ups_store.console import format_nbytes
from ups_store.errors import ConfigError, SourceError, check_installed
from ups_store.printable import counted
from ups_store.remote.client import DEADLINE_S, Version
from ups_store.remote.fetch import (
    LocalFile,
    Original,
    RemoteFile,
    checked_url,
    fetch,
    find_copy,
    folder_of_copy,
    list_sources,
    look,
    num_there,
    original_of,
)
from ups_store.sources.reader_pool import Patience, ReaderPool
from ups_store.sources.reader_process import Call
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
from ups_store.sources.tasks import Task
from ups_store.system import files
from ups_store.system.paths import Url, instead_of_rclone, is_remote

MAX_PARALLEL = 4  # copies at a time: more share the same network
_NUM_SLOTS = 64  # requests that a reader may have before it
_SUFFIXES = (".h5", ".hdf5")
_PATTERN = frozenset("*?[")
_Sources = list[tuple[Original, bool]]  # of a split, and whether they are of it as a whole
_Candidates = dict[Path, Original]  # by what the files are called when a split's are chosen


class Sources:
    """Finds the sources of a configuration, and has copies of them where it says so; asks each server once.

    In a dry run nothing is copied: sources that have no copy are read where they are.
    """

    def __init__(self, config: BuildConfig, *, watcher: Watcher | None = None, is_dry: bool = False) -> None:
        self._config, self._watcher, self._is_dry = config, watcher or Watcher(), is_dry
        self._versions: dict[str, Version | None] = {}
        self._copies: dict[str, Path] = {}
        self._listed: _Candidates | None = None
        self._pool: ReaderPool  # while one is needed
        _check_keys(config)
        if config.is_fetched:
            check_installed("obstore", extra="s3")
        self._deadline_s = min(DEADLINE_S, config.reading.timeout_s / 2)

    def of(self, task: Task, split: str) -> tuple[SourceFile, ...]:
        """Give the files of a split, on this machine; those that have no copy yet are copied."""
        if self._config.stage_dir is None:
            data = self._config.data
            return find_sources(data.root, task=task, split=split, files=data.files)
        with self._readers():
            sources = self._sources(task, split)
            self._copy([original for original, _ in sources])
        return tuple(SourceFile(self._path_here(original), whole) for original, whole in sources)

    def stage_all(self) -> list[Path]:
        """Have copies of the sources of every task and split, made side by side; nothing if none are wanted.

        That a task has no training data is an error; the build notes the lack of others.
        """
        if self._config.stage_dir is None:
            return []
        originals: dict[str, Original] = {}
        with self._readers():
            self._watcher.watch(self._pool)
            for name in self._config.data.tasks:
                for split in self._config.data.split:
                    try:
                        sources = self._sources(self._config.get_task(name), split)
                    except SourceError as error:
                        if error.kind != "no_source" or split == "train":
                            raise
                        continue  # the build says so when it comes to that split
                    originals |= {original.key: original for original, _ in sources}
            self._copy(list(originals.values()))
        return [self._path_here(original) for original in originals.values()]

    @contextlib.contextmanager
    def _readers(self) -> Iterator[None]:
        reading = self._config.reading
        num_workers = MAX_PARALLEL if reading.num_workers == "auto" else max(1, reading.num_workers)
        patience = Patience(timeout_s=reading.timeout_s, retries=reading.retries)
        note = self._watcher.note
        with ReaderPool(
            num_workers, slot_nbytes=1, num_slots=_NUM_SLOTS, patience=patience, note=note
        ) as self._pool:
            yield

    # --- which files make a split ----------------------------------------------------------------------

    def _sources(self, task: Task, split: str) -> _Sources:
        data = self._config.data
        if not data.is_remote and not any(is_remote(name) for names in task.files.values() for name in names):
            local = find_sources(data.root, task=task, split=split, files=data.files)
            sources: _Sources = [(LocalFile(source.path), source.whole) for source in local]
            if not self._is_dry:
                self._look([original for original, _ in sources])
            return sources
        candidates = self._candidates(task, split)
        ordered = sorted(candidates, key=lambda path: (natural_key(path.name), str(path)))
        chosen = choose_sources(ordered, task=task, split=split, is_named=data.files is not None)
        if not chosen:
            raise no_source(data.root, task, split, ordered)
        return [(candidates[source.path], source.whole) for source in chosen]

    def _candidates(self, task: Task, split: str) -> _Candidates:
        data = self._config.data
        if data.files is not None:
            return self._named(task, split, data.files, "data.files")
        if task.files:
            key, patterns = declared_patterns(task, split)
            return self._named(task, split, patterns, key)
        assert isinstance(data.root, str), "else nothing is remote"
        root = checked_url(data.root)
        if not root.is_http:
            return self._listing(root)
        # Where nothing is listed, there may be files with the names that splits have.
        names = [f"{task.name}_{name}{suffix}" for name in SPLIT_NAMES for suffix in _SUFFIXES]
        guesses = {name: original_of(root.below(name).text, deadline_s=self._deadline_s) for name in names}
        self._look(guesses.values(), are_guesses=True)
        there = {name: guess for name, guess in guesses.items() if self._versions[guess.key] is not None}
        return {self._path_for_choosing(guess, name): guess for name, guess in there.items()}

    def _named(self, task: Task, split: str, names: Sequence[str], key: str) -> _Candidates:
        """Find files that the configuration names: URLs, files below a remote root, and of this machine."""
        root = self._config.data.root
        remote_root = checked_url(root) if isinstance(root, str) else None
        urls: dict[str, str] = {}
        candidates: _Candidates = {}
        local = []
        for name in names:
            if is_remote(name):
                if "*" in name:
                    raise _not_listed(name, key, "give its folder as data.root, and only the pattern here")
                urls[name] = name
            elif remote_root is None or name.startswith("/"):
                local.append(name)
            elif _PATTERN.isdisjoint(name):
                path, hash_, fragment = name.partition("#")
                urls[name] = f"{remote_root.below(path).text}{hash_}{fragment}"
            elif remote_root.is_http:
                hint = "name each file, or give the folder as s3://: https lists none"
                raise _not_listed(name, key, hint)
            else:
                patterns = PurePosixPath("/", name).parts[1:]
                listing = self._listing(remote_root)
                matching = {at: file for at, file in listing.items() if _matches(at.parts[2:], patterns)}
                if not matching:
                    raise _missing(f"{remote_root.path}/{name}", key)
                candidates |= matching
        originals = {name: original_of(url, deadline_s=self._deadline_s) for name, url in urls.items()}
        self._look(originals.values())
        for name, original in originals.items():
            if self._versions.get(original.key) is None:
                raise _missing(original.location, key)
            candidates[self._path_for_choosing(original, name)] = original
        if local:
            here = root if isinstance(root, Path) else Path("/")
            paths = files_below(here, task=task, split=split, files=local)
            self._look([LocalFile(path) for path in paths])
            candidates |= {path: LocalFile(path) for path in paths}
        return candidates

    def _path_for_choosing(self, original: Original, text: str) -> Path:
        """Give the path whose folders and name decide of which split a remote file is.

        Below a folder of its own, as two places may have equal paths.
        """
        version = self._versions[original.key]
        assert version is not None, text
        folders = PurePosixPath("/", Url(text).key if is_remote(text) else text.partition("#")[0]).parts[1:-1]
        return Path("/", folder_of_copy(Path(), original).name, *folders, version.name)

    def _listing(self, root: Url) -> _Candidates:
        """List all files below a remote root that may be sources."""
        if self._listed is None:
            call = Call(list_sources, (root, self._deadline_s), str(root.path), "its files")
            self._listed = {}
            for path, version in self._pool.ask(call):
                name = PurePosixPath(path).name
                original = RemoteFile(root.below(path), name=name, deadline_s=self._deadline_s)
                self._versions[original.key] = Version(version.nbytes, version.tag, name)
                self._listed[self._path_for_choosing(original, path)] = original
        return self._listed

    def _look(self, originals: Iterable[Original], *, are_guesses: bool = False) -> None:
        """Find out what is there; whose digest is known, and has a copy, needn't be asked."""
        unknown = []
        for original in originals:
            if original.key in self._versions:
                continue
            if isinstance(original, LocalFile):  # it was looked at when it was found
                self._versions[original.key] = original.look()
            elif original.digest and (copy := find_copy(self._folder(original), original)):
                self._copies[original.key] = copy
                self._versions[original.key] = Version(copy.stat().st_size, "", copy.name)
            else:
                unknown.append(original)
        calls = [Call(look, (original, are_guesses), original.location, "its size") for original in unknown]
        for original, version in zip(unknown, self._pool.ask_each(calls), strict=True):
            self._versions[original.key] = version

    # --- their copies ----------------------------------------------------------------------------------

    def _folder(self, original: Original) -> Path:
        assert self._config.stage_dir is not None
        return folder_of_copy(self._config.stage_dir, original)

    def _copy(self, originals: Sequence[Original]) -> None:
        """Copy or fetch those that have no copy, once the disk has room for all of them."""
        missing = []
        for original in originals:
            version = self._versions.get(original.key)
            if original.key in self._copies:
                continue
            if version is None and not self._is_dry:
                raise _missing(original.location, "data.root and data.files")
            if copy := find_copy(self._folder(original), original, version or original.look()):
                self._copies[original.key] = copy
            elif version is not None:
                missing.append((original, version))
        if not missing or self._is_dry:
            return
        missing.sort(key=lambda pair: -pair[1].nbytes)  # the longest ones begin first
        stage_dir = self._config.stage_dir
        assert stage_dir is not None
        files.make_folder(stage_dir, hint="check data.stage_dir")
        needed = sum(version.nbytes - num_there(self._folder(file), version) for file, version in missing)
        if needed > files.free_bytes(stage_dir):
            with files.disk_full_as_error(stage_dir / "copies of sources", needed):
                raise OSError(errno.ENOSPC, "no room for copies of all sources")
        sizes = [version.nbytes for _, version in missing]
        done = [0] * len(missing)

        def count(index: int, num_done: int) -> None:
            num_done = min(num_done, sizes[index])
            if num_done > done[index]:
                self._watcher.advance(num_done - done[index])
                done[index] = num_done

        self._watcher.stage(f"staging {counted(len(missing), 'source')}", sum(sizes), unit="bytes")
        self._watcher.waits("copies of sources")
        retries = self._config.reading.retries
        calls = [
            Call(fetch, (original, version, self._folder(original), retries), original.location, "its copy")
            for original, version in missing
        ]
        for index, _ in enumerate(self._pool.ask_each(calls, report=count)):
            count(index, sizes[index])
            original = missing[index][0]
            copy = find_copy(self._folder(original), original)
            if copy is None:
                raise SourceError(
                    "its copy was changed or removed meanwhile",
                    kind="source_changed",
                    path=self._folder(original),
                    hint="let no other program write to data.stage_dir, and run again",
                )
            self._copies[original.key] = copy

    def _path_here(self, original: Original) -> Path:
        if (copy := self._copies.get(original.key)) is not None:
            return copy
        if isinstance(original, LocalFile):  # nothing was to be copied
            return original.path
        version = self._versions[original.key]
        size = f" ({format_nbytes(version.nbytes)})" if version else ""
        problem = f"it isn't fetched yet{size}, and a dry run fetches nothing"
        hint = "--stage-only fetches it without building anything"
        raise SourceError(problem, kind="not_fetched", path=original.location, hint=hint)


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
    sources = Sources(config, watcher=watcher)
    if config.stage_dir is None:
        raise ConfigError(
            "sources are read where they are",
            kind="nothing_to_stage",
            expected="data.stage_dir, or sources by URL",
            hint="say data.stage_dir=FOLDER",
        )
    return sources.stage_all()


def _check_keys(config: BuildConfig) -> None:
    """Refuse keys that don't go together, and names of rclone remotes, which nothing here fetches from."""
    data = config.data
    for name in config.source_names:
        if hint := instead_of_rclone(name, folder=data.root if isinstance(data.root, Path) else ""):
            raise ConfigError("no rclone remote is read", kind="rclone", path=name, hint=hint)
    if config.stage_dir is not None and data.follow_external is not None:
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


def _missing(location: str, key: str) -> SourceError:
    return SourceError("no such file", kind="missing_file", path=location, hint=f"check {key}")


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Say whether names of folders and a file match patterns, as those of `glob` do."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(parts[skip:], patterns[1:]) for skip in range(len(parts) + 1))
    if not parts or not fnmatch.fnmatchcase(parts[0], patterns[0]):
        return False
    return _matches(parts[1:], patterns[1:])
