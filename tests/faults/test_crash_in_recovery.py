"""A crash while an unfinished build is resumed, and a crash while that is resumed, several times over.

A crash is the death of the process, after which the system still has what it wrote, or a power loss, after
which the disk may have any of it. What was acknowledged in any life of the build must be there in the last.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crash_builds import N, Run, booted, check_image, damaged_build, undisturbed
from lossy_disk import Disk, PowerLoss, installed

from ups_store.read.recovery import building_path, read_building_file
from ups_store.system import files

MAX_CRASHES = 6
NUM_OPERATIONS = 40  # of a build that is begun and ended without a crash, about


def crashed(disk: Disk, run: Run, at: int) -> bool:
    """Whether a build, begun or resumed, crashed before so many more operations; else it is finished."""
    disk.lose_power_at = disk.num_changes + at
    try:
        run.to_the_end()
    except PowerLoss:
        return True
    return False


def left_by_crashes(
    path: Path, before: dict[Path, bytes], durability: str, seed: int
) -> tuple[Run, Disk, int]:
    """A build that crashes up to `MAX_CRASHES` times, every time at another operation."""
    chance, run, num = random.Random(seed), Run(path, durability), 0
    disk = Disk(before)
    for boot in range(MAX_CRASHES):
        with installed(disk), booted(bytes([boot + 1] * 16)):
            if not crashed(disk, run, chance.randrange(NUM_OPERATIONS)):
                break
        num += 1
        if chance.random() < 0.5:
            disk.go_on()
        else:
            disk = Disk(chance.choice(list(disk.after_power_loss(seed=seed))))
            run.acknowledged = set() if durability == "lazy" else run.acknowledged
        if disk.exists(path):
            break
    return run, disk, num


def check_walks(path: Path, before: dict[Path, bytes], durability: str, num_walks: int) -> None:
    expected, num_crashes, num_images, deepest = undisturbed(path), 0, 0, 0
    for seed in range(num_walks):
        run, disk, num = left_by_crashes(path, before, durability, seed)
        for names in random.Random(seed).sample(list(disk.after_power_loss(seed=seed)), 1):
            try:
                check_image(path, names, run, expected=expected)
            except BaseException as error:
                error.add_note(f"seed {seed}, {num} crashes")
                raise
            num_images += 1
        num_crashes, deepest = num_crashes + num, max(deepest, num)
    print(f"{num_walks} builds, {num_crashes} crashes, {num_images} images, up to {deepest} crashes each")
    assert deepest == MAX_CRASHES
    assert num_crashes > 1.5 * num_walks


@pytest.mark.parametrize("durability", ["durable", "lazy"])
def test_crashes_in_recovery_after_recovery_lose_no_committed_sample(
    tmp_path: Path, durability: str, request: pytest.FixtureRequest
) -> None:
    num_walks = 300 if request.config.getoption("--run-slow") else 25
    check_walks(tmp_path / "a.zarr.zip", {}, durability, num_walks)


def test_crashes_while_damage_is_made_good_publish_none_of_it(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Checking is left out once damage was said: what is taken back must stay so."""
    path = tmp_path / "a.zarr.zip"
    num_walks = 300 if request.config.getoption("--run-slow") else 25
    check_walks(path, damaged_build(path), "durable", num_walks)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_second_crash_at_every_operation_of_a_recovery_loses_nothing(tmp_path: Path) -> None:
    """Every operation of the first life, one of its images each, every operation of the second, two."""
    path = tmp_path / "a.zarr.zip"
    expected, num_images, first, was_crash = undisturbed(path), 0, 0, True
    while was_crash:
        chance, run, disk = random.Random(first), Run(path), Disk()
        with installed(disk):
            was_crash = crashed(disk, run, first)
        image = chance.choice(list(disk.after_power_loss(seed=first)))
        second, again = 0, path not in image  # else it was published, and there is nothing to resume
        while again:
            left, resumed = Disk(image), Run(path, acknowledged=set(run.acknowledged))
            with installed(left):
                again = crashed(left, resumed, second)
            images = list(left.after_power_loss(seed=second))
            for names in chance.sample(images, min(2, len(images))):
                check_image(path, names, resumed, expected=expected)
                num_images += 1
            second += 1
        first += 1
    print(f"{num_images} images")
    assert first > NUM_OPERATIONS // 2
    assert num_images > 1_000


def test_damaged_build_that_the_tests_begin_with_is_resumable(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    disk = Disk(damaged_build(path))
    with installed(disk):
        found = read_building_file(files.open_existing(building_path(path)), building_path(path))
        assert found.header is not None
        run = Run(path)
        with run.create() as writer:
            assert writer.missing().tolist() == [1, 3, 4]
        assert len(run.noted) == 2
    assert N == 5
