"""Issue 32, 30: the rate of a trial of `--batch-size auto` counts no batch too many."""

from __future__ import annotations

import pytest

from ups_store.building.fill import rate_of

SAMPLES, SECONDS = 8, 0.5  # of a batch, which encoding takes


@pytest.mark.parametrize("num", range(3, 9))
def test_rate_of_encoded_batches_is_that_of_encoding(num: int) -> None:
    """A batch is committed when the one behind it is encoded, the last one at once."""
    ends = [min(i + 2, num) * SECONDS for i in range(num)]
    progress = [(100.0 + end, SAMPLES) for end in ends]
    assert rate_of(progress, seconds=60.0) == pytest.approx(SAMPLES / SECONDS)


@pytest.mark.parametrize("num", range(3, 9))
def test_rate_of_fields_is_that_of_reading(num: int) -> None:
    progress = [(100.0 + i * SECONDS, SAMPLES) for i in range(num)]
    assert rate_of(progress, seconds=60.0) == pytest.approx(SAMPLES / SECONDS)
