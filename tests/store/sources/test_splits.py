from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pdebench_files import REAL_FILES

from ups_store.errors import ConfigError, SourceError
from ups_store.sources.source_files import (
    SPLITS,
    SourceFile,
    SourceSamples,
    SplitFractions,
    find_sources,
    samples_by_split,
    split_range,
)
from ups_store.sources.tasks import Task, get_task

BURGERS = get_task("burgers1d")
CFD = get_task("cfd1d")


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def found(root: Path, split: str = "train", *, task=BURGERS, files=None) -> list[tuple[str, bool]]:
    sources = find_sources(root, task=task, split=split, files=files)
    return [(source.path.relative_to(root).as_posix(), source.whole) for source in sources]


def error_of(root: Path, split: str = "train", *, task=BURGERS, files=None) -> SourceError:
    with pytest.raises(SourceError) as caught:
        find_sources(root, task=task, split=split, files=files)
    return caught.value


# --- ranges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "test_part", "train", "val", "test"),
    [
        (64, "first", (6, 58), (58, 64), (0, 6)),
        (64, "last", (0, 52), (52, 58), (58, 64)),
        (9, "first", (0, 9), (9, 9), (0, 0)),
        (0, "first", (0, 0), (0, 0), (0, 0)),
    ],
)
def test_split_range_follows_the_rule(num_samples: int, test_part, train, val, test) -> None:
    ranges = {
        split: split_range(num_samples, split=split, fractions=SplitFractions(), test_part=test_part)
        for split in SPLITS
    }
    assert ranges == {"train": range(*train), "val": range(*val), "test": range(*test)}


@pytest.mark.parametrize("test_part", ["first", "last"])
@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.1), (0.7, 0.29, 0.01), (0, 0, 1)])
def test_splits_share_no_sample_and_leave_none_out(fractions, test_part) -> None:
    for num_samples in range(0, 230, 7):
        parts = [
            split_range(num_samples, split=s, fractions=SplitFractions(*fractions), test_part=test_part)
            for s in SPLITS
        ]
        assert sorted(i for part in parts for i in part) == list(range(num_samples))


def test_fraction_is_not_lost_to_rounding_of_binary_numbers() -> None:
    fractions = SplitFractions(train=0.0, val=0.0, test=0.29)
    assert 100 * 0.29 < 29
    assert len(split_range(100, split="test", fractions=fractions, test_part="first")) == 29


def test_fractions_below_one_leave_samples_out_of_train() -> None:
    fractions = SplitFractions(train=0.3, val=0.1, test=0.2)
    assert split_range(100, split="train", fractions=fractions, test_part="first") == range(20, 50)
    assert split_range(100, split="val", fractions=fractions, test_part="first") == range(90, 100)
    assert split_range(100, split="train", fractions=fractions, test_part="last") == range(0, 30)


@pytest.mark.parametrize(
    "fractions",
    [(0.8, 0.2, 0.1), (-0.1, 0.1, 0.1), (float("nan"), 0.1, 0.1)],
)
def test_impossible_fractions_are_refused(fractions) -> None:
    with pytest.raises(ConfigError) as caught:
        SplitFractions(*fractions)
    assert caught.value.kind == "bad_fractions"


def test_fractions_may_miss_one_by_rounding() -> None:
    assert SplitFractions(0.7, 0.2, 0.1).train == 0.7  # their sum is 0.9999999999999999


def test_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_sources(tmp_path, task=BURGERS, split="dev")
    assert (caught.value.kind, caught.value.found) == ("unknown_split", "'dev'")


def test_part_of_whole_file_is_all_of_it_and_else_follows_the_rule(tmp_path: Path) -> None:
    rule = {"split": "valid", "fractions": SplitFractions(), "test_part": "first"}
    assert SourceFile(tmp_path, whole=True).samples_of(20, **rule) == SourceSamples(tmp_path, range(20))
    assert SourceFile(tmp_path, whole=False).samples_of(20, **rule) == SourceSamples(tmp_path, range(18, 20))


# --- finding files ------------------------------------------------------------------------------------


def test_published_files_are_found_by_name_and_sorted_by_number(tmp_path: Path) -> None:
    names = [f"1D_Burgers_Sols_Nu{nu}.hdf5" for nu in ("0.001", "0.002", "0.01", "0.1", "1.0", "4.0")]
    touch(tmp_path, *reversed(names), "1D_Advection_Sols_beta0.4.hdf5", "notes.txt")
    assert found(tmp_path) == [(name, False) for name in names]


def test_shards_are_sorted_by_number(tmp_path: Path) -> None:
    touch(tmp_path, *(f"burgers1d_train_{i}.h5" for i in (10, 9, 1, 100)))
    assert [name for name, _ in found(tmp_path)] == [f"burgers1d_train_{i}.h5" for i in (1, 9, 10, 100)]


@pytest.mark.parametrize("folder", ["1D/Burgers/Train", "1D/CFD/Test/ShockTube"])
def test_folders_of_pdebench_tree_are_searched(folder: str, tmp_path: Path) -> None:
    touch(tmp_path, f"{folder}/1D_Burgers_Sols_Nu0.01.hdf5")
    assert found(tmp_path) == [(f"{folder}/1D_Burgers_Sols_Nu0.01.hdf5", False)]


def test_folders_deeper_than_pdebench_tree_are_not_searched(tmp_path: Path) -> None:
    touch(tmp_path, "1/2/3/4/5/1D_Burgers_Sols_Nu0.01.hdf5")
    assert error_of(tmp_path).kind == "no_source"


@pytest.mark.parametrize(
    ("split", "name"),
    [
        ("train", "burgers1d_train.h5"),
        ("val", "burgers1d_val.hdf5"),
        ("validation", "burgers1d_validation.h5"),
    ],
)
def test_file_of_a_split_is_taken_as_a_whole_before_anything_else(split, name, tmp_path: Path) -> None:
    stem, suffix = name.split(".")
    touch(tmp_path, name, f"{stem}_0.{suffix}", "1D_Burgers_Sols_Nu0.01.hdf5")
    assert found(tmp_path, split) == [(name, True)]


def test_splits_of_their_own_files_are_not_mixed_with_published_files(tmp_path: Path) -> None:
    touch(tmp_path, "burgers1d_train.h5", "1D_Burgers_Sols_Nu0.01.hdf5")
    assert error_of(tmp_path, "test").kind == "no_source"


def test_files_published_for_testing_are_left_out_unless_named(tmp_path: Path) -> None:
    train = "1D_CFD_Rand_Eta0.1_Zeta0.1_periodic_Train.hdf5"
    touch(tmp_path, train, "Sod1.hdf5", "Sod2.hdf5")
    assert found(tmp_path, "test", task=CFD) == [(train, False)]
    assert found(tmp_path, "test", task=CFD, files=["Sod*.hdf5"]) == [
        ("Sod1.hdf5", True),
        ("Sod2.hdf5", True),
    ]
    assert error_of(tmp_path, "train", task=CFD, files=["Sod*.hdf5"]).kind == "no_source"


def test_links_to_one_file_count_once(tmp_path: Path) -> None:
    touch(tmp_path, "data/1D_Burgers_Sols_Nu0.01.hdf5")
    (tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5").symlink_to("data/1D_Burgers_Sols_Nu0.01.hdf5")
    (tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5").symlink_to("data/1D_Burgers_Sols_Nu0.01.hdf5")
    (tmp_path / "again").symlink_to("data")
    assert found(tmp_path) == [("1D_Burgers_Sols_Nu0.01.hdf5", False)]


def test_loop_of_links_ends(tmp_path: Path) -> None:
    touch(tmp_path, "1D_Burgers_Sols_Nu0.01.hdf5")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert found(tmp_path) == [("1D_Burgers_Sols_Nu0.01.hdf5", False)]


@pytest.mark.parametrize(
    ("one", "other", "split"),
    [
        ("1D_Burgers_Sols_Nu0.01.hdf5", "copy/1D_Burgers_Sols_Nu0.01.hdf5", "train"),
        ("1D_Burgers_Sols_Nu0.01.h5", "1D_Burgers_Sols_Nu0.01.hdf5", "train"),
        ("burgers1d_val.h5", "burgers1d_valid.h5", "val"),
        ("burgers1d_train_0.h5", "burgers1d_train_0.hdf5", "train"),
    ],
)
def test_two_files_that_may_be_one_are_refused(one: str, other: str, split: str, tmp_path: Path) -> None:
    touch(tmp_path, one, other)
    error = error_of(tmp_path, split)
    assert error.kind == "ambiguous_source"
    assert {error.path, str(error.found)} == {str(tmp_path / one), str(tmp_path / other)}


def test_missing_root_is_named(tmp_path: Path) -> None:
    error = error_of(tmp_path / "gone")
    assert (error.kind, error.path) == ("missing_root", str(tmp_path / "gone"))
    assert "PDEBENCH_ROOT" in str(error)


def test_nothing_found_says_what_was_looked_for_and_what_is_there(tmp_path: Path) -> None:
    assert error_of(tmp_path).found == "no .h5 or .hdf5 file"
    touch(tmp_path, *(f"a{i}.h5" for i in range(20)))
    error = error_of(tmp_path, "valid")
    assert error.exit_code == 3
    assert "burgers1d_val.h5" in str(error.expected)
    assert error.found == "a0.h5, a1.h5, a2.h5, a3.h5, a4.h5, a5.h5, a6.h5, a7.h5, ... (20 files)"


# --- files from the configuration ---------------------------------------------------------------------


def test_named_files_and_patterns_replace_the_search(tmp_path: Path) -> None:
    touch(
        tmp_path, "a/run2.h5", "a/run10.h5", "b/other.h5", "1D_Burgers_Sols_Nu0.01.hdf5", "burgers1d_train.h5"
    )
    expected = [("b/other.h5", False), ("a/run2.h5", False), ("a/run10.h5", False)]
    assert found(tmp_path, files=["a/*.h5", "b/other.h5", "a/run2.h5"]) == expected
    assert found(tmp_path, files=[str(tmp_path / "a/*.h5"), str(tmp_path / "b/other.h5")]) == expected
    assert len(found(tmp_path, files=["**/*.h5"])) == 4


def test_named_file_is_found_from_a_relative_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "data/a/run2.h5")
    monkeypatch.chdir(tmp_path)
    assert found(Path("data"), files=["a/run*.h5"]) == [("a/run2.h5", False)]


@pytest.mark.parametrize("files", [None, ["burgers1d_train_*.h5"]])
def test_link_to_nowhere_is_refused_and_not_left_out(files: list[str] | None, tmp_path: Path) -> None:
    touch(tmp_path, "burgers1d_train_0.h5", "burgers1d_val.h5")
    (tmp_path / "burgers1d_train_1.h5").symlink_to("gone.h5")
    error = error_of(tmp_path, files=files)
    assert (error.kind, error.path) == ("not_a_file", str(tmp_path / "burgers1d_train_1.h5"))
    assert "gone.h5" in str(error.found)
    assert found(tmp_path, "val") == [("burgers1d_val.h5", True)]


def test_named_file_of_a_split_is_whole_and_of_no_other(tmp_path: Path) -> None:
    touch(tmp_path, "x/burgers1d_train.h5", "x/burgers1d_valid.h5", "x/more.h5")
    files = ["x/*.h5"]
    assert found(tmp_path, "train", files=files) == [("x/burgers1d_train.h5", True), ("x/more.h5", False)]
    assert found(tmp_path, "val", files=files) == [("x/burgers1d_valid.h5", True), ("x/more.h5", False)]


def test_named_file_with_pattern_characters_in_its_name_is_found(tmp_path: Path) -> None:
    touch(tmp_path, "run[1].h5")
    assert found(tmp_path, files=["run[1].h5"]) == [("run[1].h5", False)]


@pytest.mark.parametrize("files", [["*.gone"], ["folder"]])
def test_named_file_that_is_missing_is_refused(files: list[str], tmp_path: Path) -> None:
    touch(tmp_path, "folder/a.h5", "b.h5")
    error = error_of(tmp_path, files=["b.h5", *files])
    assert (error.kind, error.path) == ("missing_file", str(tmp_path / files[0]))


def test_empty_list_of_files_finds_nothing(tmp_path: Path) -> None:
    touch(tmp_path, "burgers1d_train.h5")
    assert error_of(tmp_path, files=[]).kind == "no_source"


@pytest.mark.skipif(not REAL_FILES.is_dir(), reason="no ../shared/data/pdebench")
def test_files_by_pdebench_are_found_for_their_tasks() -> None:
    names = [name for name, _ in found(REAL_FILES)]
    assert names == ["1D_Burgers_Sols_Nu0.001.hdf5", "1D_Burgers_Sols_Nu0.01.hdf5"]
    assert len(found(REAL_FILES, task=get_task("navier_stokes2d"))) == 1


# --- a folder per split, and files that a configuration declares ---------------------------------------

MATTER = get_task("active_matter")


def test_files_in_a_folder_named_after_the_split_are_shards_of_it(tmp_path: Path) -> None:
    folder = "sets/active_matter/data"
    touch(tmp_path, f"{folder}/train/L_10.hdf5", f"{folder}/train/L_2.hdf5", f"{folder}/valid/L_2.hdf5")
    touch(tmp_path, f"{folder}/test/L_1.h5", f"{folder}/train/README.md", "sets/MHD_64/data/train/a.hdf5")
    assert found(tmp_path, task=MATTER) == [
        (f"{folder}/train/L_2.hdf5", True),
        (f"{folder}/train/L_10.hdf5", True),
    ]
    assert found(tmp_path, "val", task=MATTER) == [(f"{folder}/valid/L_2.hdf5", True)]
    assert found(tmp_path, "test", task=MATTER) == [(f"{folder}/test/L_1.h5", True)]


@pytest.mark.parametrize("root", ["", "active_matter/data/train"])
def test_folder_of_a_split_is_found_from_anywhere_above_it(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "active_matter/data/train/a.hdf5")
    monkeypatch.chdir(tmp_path / root)
    sources = find_sources(".", task=MATTER, split="train")
    assert [(source.path.name, source.whole) for source in sources] == [("a.hdf5", True)]


@pytest.mark.parametrize("folder", ["data/train", "active_matter/data/dev"])
def test_folder_of_no_task_or_split_is_none(folder: str, tmp_path: Path) -> None:
    touch(tmp_path, f"{folder}/a.hdf5")
    error = error_of(tmp_path, task=MATTER)
    assert error.kind == "no_source"
    assert "a folder active_matter/data/train" in str(error.expected)
    assert "PDEBench" not in str(error.expected)


def declared(**files: tuple[str, ...]) -> Task:
    return Task(name="flow", ndim=1, channels=(), boundary={}, test_part="last", files=files)


def test_declared_files_of_a_split_are_all_of_it(tmp_path: Path) -> None:
    touch(tmp_path, "a.h5", "b1.h5", "b2.h5")
    task = declared(train=("b*.h5",), test=("a.h5",))
    assert found(tmp_path, task=task) == [("b1.h5", True), ("b2.h5", True)]
    assert found(tmp_path, "test", task=task) == [("a.h5", True)]
    error = error_of(tmp_path, "val", task=task)
    assert (error.kind, error.expected) == ("no_source", "tasks.flow.files.val")


def test_declared_file_that_is_not_there_names_its_key(tmp_path: Path) -> None:
    error = error_of(tmp_path, task=declared(train=("gone_*.h5",)))
    assert error.kind == "missing_file"
    assert str(error.hint).startswith("check tasks.flow.files.train;")


def test_files_given_to_a_build_win_over_declared_ones(tmp_path: Path) -> None:
    touch(tmp_path, "a.h5", "b.h5")
    assert found(tmp_path, task=declared(all=("a.h5",)), files=("b.h5",)) == [("b.h5", False)]


def test_declared_task_without_files_looks_for_its_own_names(tmp_path: Path) -> None:
    touch(tmp_path, "flow_train.h5", "flow_test_1.h5")
    assert found(tmp_path, task=declared()) == [("flow_train.h5", True)]
    assert found(tmp_path, "test", task=declared()) == [("flow_test_1.h5", True)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("1D_Burgers_Sols_Nu0.01.hdf5", {"train": range(1, 9), "val": range(9, 10), "test": range(1)}),
        ("burgers1d_valid.h5", {"val": range(10)}),
        ("burgers1d/train/a.h5", {"train": range(10)}),
    ],
)
def test_samples_of_one_file_by_split_are_those_of_a_build(path: str, expected: dict[str, range]) -> None:
    fractions = SplitFractions(0.8, 0.1, 0.1)
    assert samples_by_split(path, 10, task=BURGERS, fractions=fractions) == expected


def test_samples_of_a_file_that_its_task_declares_are_of_that_split() -> None:
    task = replace(BURGERS, files={"train": ("runs/*.h5",), "test": ("held_out.h5",)})
    fractions = SplitFractions(0.8, 0.1, 0.1)
    assert samples_by_split("/data/runs/a.h5", 4, task=task, fractions=fractions) == {"train": range(4)}
    assert samples_by_split("held_out.h5", 4, task=task, fractions=fractions) == {"test": range(4)}
