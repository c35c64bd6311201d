"""Which files make a split, and which of their samples.

Names are sorted as people expect, numbers by their value. Also here is how much memory reading takes, on
which a reader and those that count on it have to agree.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

from ups_store.errors import ConfigError, SourceError, did_you_mean
from ups_store.sources.tasks import Task
from ups_store.system.paths import check_local

_SUFFIXES = (".h5", ".hdf5")
_MAX_DEPTH = 4  # PDEBench's own tree is 1D/CFD/Test/ShockTube
_SHOWN_NAMES = 8
SPLITS = ("train", "val", "test")
# What files, folders and configurations may call them.
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
# Of one hyperslab: a published file has up to 88 GB, one NS_incom sample 3.1 GB. Below 32 MiB the C library
# gives every hyperslab the memory of the one before (`readers`), which costs no page faults.
BLOCK_BYTES = 24 << 20
USUAL_SLOTS = 2  # of a reader: it fills one while the caller works with the other
USUAL_SLOT_NBYTES = 33 << 20  # a batch of 32 MiB, and what lies between its arrays


@dataclass(frozen=True)
class SourceFile:
    """A file that contributes to a split.

    Attributes:
        path: The file, as it was named or found.
        whole: Whether all its samples are of the split; otherwise `split_range` shares them out.
    """

    path: Path
    whole: bool

    def samples_of(
        self, num_samples: int, *, split: str, fractions: SplitFractions, test_part: Literal["first", "last"]
    ) -> SourceSamples:
        """Give the samples of this file that are of the split, given how many it has; may be none."""
        indices = range(num_samples)
        if not self.whole:
            indices = split_range(num_samples, split=split, fractions=fractions, test_part=test_part)
        return SourceSamples(self.path, indices)


@dataclass(frozen=True)
class SourceSamples:
    """Samples of one file."""

    path: Path
    indices: range


@dataclass(frozen=True)
class SplitFractions:
    """How the samples of each file are shared out where PDEBench's rule decides; at most 1 in sum."""

    train: float = 0.8
    val: float = 0.1
    test: float = 0.1

    def __post_init__(self) -> None:
        fractions = astuple(self)
        if not all(0 <= fraction <= 1 for fraction in fractions) or sum(fractions) > 1 + 1e-9:
            raise ConfigError(
                "split fractions train, val, test",
                kind="bad_fractions",
                expected="three numbers within 0..1 that add up to at most 1",
                found=fractions,
            )


def find_sources(
    root: str | os.PathLike[str], *, task: Task, split: str, files: Sequence[str] | None = None
) -> tuple[SourceFile, ...]:
    """Find the files of a split, sorted with numbers by value, each real file once.

    Of the HDF5 files under `root`, to four folders deep, the first kind that is there:

    1. `<task>_<split>.h5`, the split as a whole ("valid" and "validation" mean "val");
    2. shards `<task>_<split>_*.h5`, or the files of a folder `<task>/<split>` or `<task>/data/<split>`,
       likewise;
    3. files with a name that PDEBench gives the task, shared out by the rule. Files published for testing
       only are left out: they have other grids.

    Once any split of the task is a file of its own, so is every other: kind 3 isn't mixed in, since its
    samples may be the same ones. A task that a configuration declares may name its files instead, of each
    split or of all, which the rule then shares out.

    Args:
        root: Folder to look in.
        task: The task.
        split: Name of the split.
        files: Instead of looking: paths and glob patterns, relative to `root` or absolute. A file named
            as in 1 or 2 is of its split as a whole, one published for testing only of test.

    Raises:
        SourceError: Kind "missing_root", "missing_file" (of `files`), "not_a_file" (a pipe, a device, a link
            to nowhere), "ambiguous_source" (two files under `root` that could be the same one) or
            "no_source", with what was looked for and what is there.
        ConfigError: If the split is unknown.
    """
    split = canonical_split(split)
    check_local(root)
    root = Path(root)
    if not os.path.isdir(root):  # unlike Path.is_dir, False for names that can't exist
        raise _bad_root(root, "not a folder" if os.path.lexists(root) else "no such folder")
    candidates = files_below(root, task=task, split=split, files=files)
    sources = choose_sources(candidates, task=task, split=split, is_named=files is not None)
    if not sources:
        raise no_source(root, task, split, candidates)
    for source in sources:  # pipes, sockets and devices would be waited for
        path, is_there = source.path, source.path.exists()
        if path.is_file():
            continue
        if is_there:
            kind = "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"
        else:
            is_link = path.is_symlink()
            kind = f"a link to {os.readlink(path)}, which isn't there" if is_link else "nothing any more"
        raise SourceError(
            "not a regular file",
            kind="not_a_file",
            path=path,
            expected="an HDF5 file",
            found=kind,
            hint="copy the data into a file" if is_there else "fetch or mount what is missing",
        )
    return sources


def files_below(root: Path, *, task: Task, split: str, files: Sequence[str] | None) -> list[Path]:
    """List what `choose_sources` chooses from: each real file once, naturally sorted."""
    if files is None and not task.files:
        paths = _hdf5_files(root)
    else:
        key, patterns = ("data.files", tuple(files)) if files is not None else declared_patterns(task, split)
        paths = [path for pattern in patterns for path in _named_files(root, pattern, key=key)]
    by_real_path: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (natural_key(path.name), str(path))):
        by_real_path.setdefault(os.path.realpath(path), path)
    return list(by_real_path.values())


def declared_patterns(task: Task, split: str) -> tuple[str, tuple[str, ...]]:
    """Give the key of a task's own files of a split, and its patterns."""
    key = split if split in task.files else "all"
    return f"tasks.{task.name}.files.{key}", tuple(task.files.get(key, ()))


def _hdf5_files(root: Path) -> list[Path]:
    paths = []

    def refuse(error: OSError) -> None:
        if error.filename == os.fspath(root):  # other folders, such as lost+found, needn't be ours to see
            raise _bad_root(root, f"folder can't be listed ({error.strerror})") from error

    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        if len(Path(folder).relative_to(root).parts) >= _MAX_DEPTH:
            folders.clear()  # also what ends a loop of links
        paths += [Path(folder, name) for name in names if name.endswith(_SUFFIXES)]
    return [path for path in paths if _may_be_source(path)]


def _named_files(root: Path, pattern: str, *, key: str) -> list[Path]:
    check_local(pattern)
    as_path = Path(root, pattern)  # an absolute pattern stays itself
    is_one = os.path.lexists(as_path)
    names = [pattern] if is_one else glob.glob(pattern, root_dir=root, recursive=True)
    paths = [path for name in names if _may_be_source(path := Path(root, name))]
    if not paths:
        hint = f"check {key}; relative paths and patterns start from data.root"
        raise SourceError("no such file", kind="missing_file", path=as_path, hint=hint)
    return paths


def _may_be_source(path: Path) -> bool:
    # Pipes, devices and links to nowhere count until they are chosen: refused by name rather than not seen.
    return os.path.lexists(path) and not path.is_dir()


def choose_sources(
    candidates: Sequence[Path], *, task: Task, split: str, is_named: bool
) -> tuple[SourceFile, ...]:
    """Choose those that make a split, see `find_sources`, by their names and folders alone."""
    if task.files and not is_named:
        return tuple(SourceFile(path, whole=split in task.files) for path in candidates)
    splits = {path: _named_split(path, task) for path in candidates}
    if is_named:
        sources = []
        for path, (named_split, _) in splits.items():
            named_split = named_split or ("test" if task.is_benchmark(path.name) else "")
            if named_split in ("", split):
                sources.append(SourceFile(path, whole=bool(named_split)))
        return tuple(sources)
    whole = [path for path, named_split in splits.items() if named_split == (split, False)]
    if len(whole) > 1:
        raise _ambiguous(whole[0], whole[1])
    is_split = any(named_split for named_split, _ in splits.values())
    chosen = whole or [path for path, named_split in splits.items() if named_split == (split, True)]
    if not is_split:
        chosen = [p for p in candidates if task.matches(p.name) and not task.is_benchmark(p.name)]
    by_stem: dict[str, Path] = {}
    for path in chosen:  # two that look like copies of one file would count its samples twice
        if by_stem.setdefault(path.stem, path) is not path:
            raise _ambiguous(by_stem[path.stem], path)
    return tuple(SourceFile(path, whole=is_split) for path in chosen)


def samples_by_split(
    path: str | os.PathLike[str], num_samples: int, *, task: Task, fractions: SplitFractions
) -> dict[str, range]:
    """Say which samples of one file a build takes for which split; splits without any are left out.

    Args:
        path: The file; its name and folder decide, as for `find_sources`.
        num_samples: How many it has.
        task: The task.
        fractions: How a file is shared out that is of no split as a whole.
    """
    path = Path(path)
    named = {split for split, patterns in task.files.items() if any(map(path.match, patterns))} - {"all"}
    indices = {}
    for split in SPLITS:
        if named:
            sources = [SourceFile(path, whole=True)] if split in named else []
        else:
            sources = [*choose_sources([path], task=task, split=split, is_named=True)]
        for source in sources:
            of_split = source.samples_of(
                num_samples, split=split, fractions=fractions, test_part=task.test_part
            )
            if len(of_split.indices):
                indices[split] = of_split.indices
    return indices


def _named_split(path: Path, task: Task) -> tuple[str, bool]:
    """Tell the split that a file or its folder is named after, "" if none, and whether it is a shard."""
    match = re.fullmatch(rf"{task.name}_({'|'.join(SPLIT_NAMES)})(_.+)?\.(h5|hdf5)", path.name)
    if match:
        return SPLIT_NAMES[match[1]], match[2] is not None
    *_, set_folder, data, folder = ("", "", *Path(os.path.abspath(path)).parts[:-1])
    if folder in SPLIT_NAMES and task.name in (data, set_folder if data == "data" else ""):
        return SPLIT_NAMES[folder], True
    return "", False


def _ambiguous(one: Path, other: Path) -> SourceError:
    hint = "remove one, or use data.files to choose"
    kind = "ambiguous_source"
    return SourceError("two files could be the same source", kind=kind, path=one, found=other, hint=hint)


def _bad_root(root: Path, problem: str) -> SourceError:
    return SourceError(problem, kind="missing_root", path=root, hint="check data.root or PDEBENCH_ROOT")


def no_source(root: Path | str, task: Task, split: str, candidates: Sequence[Path]) -> SourceError:
    """Return the error for a split that no file is of."""
    there = [path.name for path in candidates[:_SHOWN_NAMES]]
    if len(candidates) > _SHOWN_NAMES:
        there.append(f"... ({len(candidates)} files)")
    name = task.name
    expected = [f"{name}_{split}.h5", f"{name}_{split}_*.h5", f"a folder {name}/data/{split}"]
    expected += ["or PDEBench's names for the task"] if task.file_patterns else []
    if task.files:
        expected = [f"tasks.{name}.files.{split}"]
    return SourceError(
        f"no source for {name} {split}",
        kind="no_source",
        path=root,
        expected=", ".join(expected),
        found=", ".join(there) or "no .h5 or .hdf5 file",
        hint="check data.root, or use data.files to name the files",
    )


def canonical_split(name: str) -> str:
    """Return the split of a name; "valid" and "validation" mean "val"."""
    if name not in SPLIT_NAMES:
        raise ConfigError(
            "unknown split",
            kind="unknown_split",
            expected="train, val or test",
            found=repr(name),
            hint=did_you_mean(name, SPLITS),
        )
    return SPLIT_NAMES[name]


def split_range(
    num_samples: int, *, split: str, fractions: SplitFractions, test_part: Literal["first", "last"]
) -> range:
    """Give the samples of one file that are of a split.

    Test is the first, or last, floor(n * test) of the file, as PDEBench has it; validation the last
    floor(n * val) of the remaining ones; train what is left, or its first floor(n * train) where the
    fractions add up to less than 1. Every file is cut alike: PDEBench's files of different parameters
    start from the same initial conditions, which so stay within one split.
    """
    # 100 * 0.29 is 28.999999999999996
    num_train, num_val, num_test = (math.floor(num_samples * f + 1e-9) for f in astuple(fractions))
    every = range(num_samples)
    test, others = every[:num_test], every[num_test:]
    if test_part == "last":
        test, others = every[num_samples - num_test :], every[: num_samples - num_test]
    train, val = others[: len(others) - num_val], others[len(others) - num_val :]
    if sum(astuple(fractions)) < 1 - 1e-9:
        train = train[:num_train]
    return {"train": train, "val": val, "test": test}[canonical_split(split)]


def natural_key(name: str) -> list[str | float]:
    """Cut into text and numbers by turns, so that Nu0.001 < Nu0.01 < Nu0.1, 1.e-8 is small and 2 < 10."""
    words = re.split(r"(\d+\.?\d*(?:e[+-]?\d+)?)", name)
    return [float(word) if i % 2 else word for i, word in enumerate(words)]
