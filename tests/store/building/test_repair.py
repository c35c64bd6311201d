"""`verify --repair`: the repaired store is the undamaged one, and only damaged samples are read again."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from build_helpers import BURGERS, Recorder, build, settings
from command_line import Done, run_ups_store
from pdebench_files import coordinate, write
from small_stores import begin, flip, mixed_values
from small_stores import build as build_small

import ups_store
from tools.conformance import REFUSED
from ups_store import AccessError, ConfigError, FormatError, IdentityMismatchError
from ups_store.building import fill, repair
from ups_store.building.repair import repair_store
from ups_store.check.doctor import Status, examine
from ups_store.format.layout import Layout
from ups_store.read.recovery import building_path
from ups_store.system import files

NAME = "burgers1d_train.zarr.zip"


def write_source(path: Path, fields: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)
    coordinates = {"x-coordinate": coordinate(64), "t-coordinate": coordinate(22)}
    write(path, {"tensor": fields, **coordinates}, {"Nu": 0.01})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration file, whose store is built: 16 samples of 4 kB or more."""
    return write_config(tmp_path, num_samples=20)


def write_config(tmp_path: Path, *, num_samples: int) -> Path:
    """The same, of a source of so many samples."""
    source, file = tmp_path / "source" / BURGERS, tmp_path / "build.yaml"
    write_source(source, np.random.default_rng(0).random((num_samples, 21, 64), np.float32))
    cache = tmp_path / "cache"
    file.write_text(
        f"data: {{task: burgers1d, split: train, root: {source.parent}}}\ncache: {{dir: {cache}}}\n"
    )
    build(settings(tmp_path, split="train"))
    return file


@pytest.fixture
def path(config: Path) -> Path:
    return config.parent / "cache" / NAME


def layout_of(path: Path) -> Layout:
    with ups_store.open(path) as store:
        return store._catalog.layout


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the samples that are read from the sources."""
    read, samples = fill.read_batches, []

    def noting(plan: object, wanted: np.ndarray, **options: object) -> object:
        samples.extend(wanted.tolist())
        return read(plan, wanted, **options)

    monkeypatch.setattr(fill, "read_batches", noting)
    return samples


@pytest.mark.parametrize("damaged", [[3], [0, 7, 15]])
def test_only_damaged_samples_are_read_again(
    path: Path, config: Path, rebuilt: list[int], damaged: list[int]
) -> None:
    good, layout = path.read_bytes(), layout_of(path)
    flip(path, *(layout.arrays["fields"].slot(sample)[0] + 11 for sample in damaged))
    done = repair_store(path, config, watcher=Recorder())
    assert (done.num_copied, done.num_rebuilt, rebuilt) == (16 - len(damaged), len(damaged), damaged)
    assert path.read_bytes() == good


@pytest.mark.parametrize("place", ["directory", "padding", "index", "header", "constant"])
def test_damage_outside_the_samples_reads_none_again(
    path: Path, config: Path, rebuilt: list[int], place: str
) -> None:
    good, layout = path.read_bytes(), layout_of(path)
    fields = layout.arrays["fields"]
    offsets = {
        "directory": layout.directory_offset + 50,
        "padding": fields.slot(1)[0] - 1,
        "index": fields.slot(16)[0] + 3,
        "header": fields.entry.offset + 10 if fields.entry else 0,
        "constant": layout.arrays["x"].offset,
    }
    flip(path, offsets[place])
    repair_store(path, config, watcher=Recorder())
    assert (rebuilt, path.read_bytes()) == ([], good)


def test_damaged_small_array_is_read_for_all_samples(path: Path, config: Path, rebuilt: list[int]) -> None:
    good = path.read_bytes()
    flip(path, layout_of(path).arrays["nu"].offset)
    repair_store(path, config, watcher=Recorder())
    assert (rebuilt, path.read_bytes()) == (list(range(16)), good)


def test_truncated_store_is_repaired(path: Path, config: Path) -> None:
    good, layout = path.read_bytes(), layout_of(path)
    with path.open("r+b") as file:
        file.truncate(layout.arrays["fields"].slot(9)[0] + 100)
    repair_store(path, config, watcher=Recorder())
    assert path.read_bytes() == good


def test_store_with_bytes_behind_its_end_is_repaired(path: Path, config: Path, rebuilt: list[int]) -> None:
    good = path.read_bytes()
    with path.open("ab") as file:
        file.write(bytes(70_000))
    repair_store(path, config, watcher=Recorder())
    assert (rebuilt, path.read_bytes()) == ([], good)


EVERY = [
    pytest.param(997, id="every 997th"),
    pytest.param(1, id="every one", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


@pytest.mark.no_cover  # traced it takes twice as long, and finds no other lines
@pytest.mark.parametrize("step", EVERY)
def test_flipped_byte_is_repaired_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """A store of two samples; what is refused is left as it was."""
    for name in ("sync", "sync_data", "sync_folder"):  # a repair syncs a dozen times
        monkeypatch.setattr(files, name, lambda *place: None)
    file = write_config(tmp_path, num_samples=3)
    with file.open("a") as more:
        more.write("reading: {num_workers: 0}\n")  # no process for each of the repairs
    path = tmp_path / "cache" / NAME
    good, end_of_metadata = path.read_bytes(), layout_of(path).metadata[-1].end
    for offset in range(0, len(good), step):
        path.write_bytes(good)
        flip(path, offset)
        damaged = path.read_bytes()
        if offset < end_of_metadata and examine(path).status is not Status.DAMAGED:
            with pytest.raises(FormatError, match="can't be repaired"):
                repair_store(path, file, watcher=Recorder())
            assert path.read_bytes() == damaged, offset
        else:
            assert repair_store(path, file, watcher=Recorder()).is_needed, offset
            assert path.read_bytes() == good, offset


def test_sound_store_is_left_alone(path: Path, config: Path) -> None:
    before = path.stat()
    assert not repair_store(path, config, watcher=Recorder()).is_needed
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_open_store_keeps_its_memory_through_a_repair(path: Path, config: Path) -> None:
    with ups_store.open(path) as store:
        view, expected = store["fields"], store["fields"].copy()
        flip(path, layout_of(path).directory_offset + 50)
        repair_store(path, config, watcher=Recorder())
        assert np.array_equal(view, expected)


def test_other_configuration_is_refused_and_changes_nothing(path: Path, config: Path) -> None:
    flip(path, layout_of(path).arrays["fields"].slot(3)[0])
    damaged = path.read_bytes()
    with pytest.raises(IdentityMismatchError) as caught:
        repair_store(path, config, overrides=["data.reduce_time=2"], watcher=Recorder())
    assert "content.reduce_time" in caught.value.differences
    assert path.read_bytes() == damaged
    assert [file.name for file in path.parent.glob("*.zarr.zip*")] == [NAME]


def test_changed_source_is_refused(path: Path, config: Path) -> None:
    flip(path, layout_of(path).arrays["fields"].slot(3)[0])
    write_source(config.parent / "source" / BURGERS, np.ones((20, 21, 64), np.float32))
    with pytest.raises(IdentityMismatchError):
        repair_store(path, config, watcher=Recorder())


def test_interrupted_repair_is_continued(path: Path, config: Path, rebuilt: list[int]) -> None:
    good, layout = path.read_bytes(), layout_of(path)
    flip(path, layout.arrays["fields"].slot(3)[0])

    def interrupt(watcher: Recorder) -> None:
        if watcher.stages[-1][2] == "samples":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repair_store(path, config, watcher=Recorder(on_advance=interrupt))
    assert path.read_bytes() != good
    done = repair_store(path, config, watcher=Recorder())
    assert (done.num_copied, rebuilt) == (0, [3])
    assert path.read_bytes() == good


def test_store_that_no_configuration_made_is_refused(tmp_path: Path, config: Path) -> None:
    path = build_small(tmp_path / "a.zarr.zip", mixed_values())
    flip(path, layout_of(path).arrays["fields"].slot(0)[0])
    with pytest.raises(ConfigError, match="salvage"):
        repair_store(path, config, watcher=Recorder())


def test_foreign_file_is_refused(tmp_path: Path, config: Path) -> None:
    (tmp_path / "a.zarr.zip").write_text("hello")
    with pytest.raises(FormatError, match="can't be repaired"):
        repair_store(tmp_path / "a.zarr.zip", config, watcher=Recorder())


@pytest.mark.parametrize("is_damaged_too", [False, True])
def test_wrong_identity_is_not_repaired_and_salvage_is_advised(
    path: Path, config: Path, is_damaged_too: bool
) -> None:
    """No configuration gives such an identity, so reading the sources again would be in vain."""
    sample = layout_of(path).arrays["fields"].slot(3)[0]
    path.write_bytes(REFUSED["identity_with_another_key"].build(path.read_bytes()))
    if is_damaged_too:
        flip(path, sample)
    before = path.read_bytes()
    with pytest.raises(FormatError, match="can't be repaired") as caught:
        repair_store(path, config, watcher=Recorder())
    assert (caught.value.kind, caught.value.found) == ("not_repairable", "identity_lost")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("`doctor --salvage OUT`")
    assert path.read_bytes() == before


def test_unfinished_store_of_something_else_in_the_way_of_a_repair_is_said(path: Path, config: Path) -> None:
    begin(path, mixed_values(2)).close()
    flip(path, layout_of(path).arrays["fields"].slot(3)[0])
    with pytest.raises(IdentityMismatchError) as caught:
        repair_store(path, config, watcher=Recorder())
    assert caught.value.hint == "finish that build first, or move its file away"


def test_what_may_not_be_written_says_what_helps(
    path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(path, layout_of(path).arrays["fields"].slot(3)[0])
    path.chmod(0o444)
    with pytest.raises(AccessError) as caught:
        repair_store(path, config, watcher=Recorder())
    assert (caught.value.kind, caught.value.hint) == ("read_only", "make it writable with chmod u+w first")
    path.chmod(0o644)

    def refuse(*arguments: object) -> None:
        raise files.opening_error(path.parent, PermissionError(errno.EACCES, "Permission denied"))

    monkeypatch.setattr(repair, "create_file", refuse)
    with pytest.raises(AccessError) as caught:
        repair_store(path, config, watcher=Recorder())
    assert (caught.value.kind, "of its folders" in str(caught.value.hint)) == ("access", True)


def test_damaged_unfinished_store_in_the_way_of_a_repair_is_said(path: Path, config: Path) -> None:
    building_path(path).write_bytes(b"no store")
    flip(path, layout_of(path).arrays["fields"].slot(3)[0])
    with pytest.raises(FormatError) as caught:
        repair_store(path, config, watcher=Recorder())
    assert caught.value.hint == "finish that build first, or move its file away"


# --- the verb -------------------------------------------------------------------------------------------


def run(*arguments: object) -> Done:
    return run_ups_store("verify", *arguments)


def test_verify_repair_rebuilds_and_verifies(path: Path, config: Path) -> None:
    good = path.read_bytes()
    flip(path, layout_of(path).arrays["fields"].slot(3)[0])
    done = run(path, "data.on_nan=keep", "--repair", config)
    assert done.exit_code == 0, done.stderr
    assert "1 of 16 samples rebuilt" in done.stderr
    assert ": ok" in done.stdout
    assert path.read_bytes() == good


def test_verify_repair_of_another_identity_exits_with_7(path: Path, config: Path) -> None:
    flip(path, layout_of(path).arrays["fields"].slot(3)[0])
    assert run(path, "cache.dtype=float64", "--repair", config).exit_code == 7


@pytest.mark.parametrize("damaged", [False, True])
def test_verify_repair_complains_about_a_bad_configuration(path: Path, config: Path, damaged: bool) -> None:
    if damaged:
        flip(path, layout_of(path).arrays["fields"].slot(3)[0])
    missing = config.with_name("missing.yaml")
    done = run(path, "--repair", missing)
    assert (done.exit_code, done.stdout) == (2, "")
    assert str(missing) in done.stderr
    done = run(path, "data.no_such_key=1", "--repair", config)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no_such_key" in done.stderr


def test_verify_repair_of_a_sound_store_verifies_it(path: Path, config: Path) -> None:
    done = run(path, "--repair", config)
    assert done.exit_code == 0
    assert "nothing to repair" in done.stderr
    assert ": ok" in done.stdout


@pytest.mark.parametrize("damage", ["root", "array metadata"])
def test_repair_of_damaged_metadata_says_what_helps(path: Path, config: Path, damage: str) -> None:
    entry = layout_of(path).metadata[damage == "array metadata"]
    flip(path, entry.data_offset + 20)
    with pytest.raises(FormatError, match="can't be repaired") as caught:
        repair_store(path, config, watcher=Recorder())
    assert "--repair" not in str(caught.value)
    assert caught.value.hint
