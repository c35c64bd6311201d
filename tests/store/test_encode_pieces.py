"""Batches are cut into pieces of nearly one size, whose slots hold what the batch holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups_store import ArraySpec
from ups_store.blueprint import blueprint_of
from ups_store.encode import Scratch, encode_pieces
from ups_store.layout import Layout

NUM_ELEMENTS = 1024  # 4096 bytes and a checksum in a slot


def layout_for(num_samples: int) -> Layout:
    arrays = {"u": ArraySpec((num_samples, NUM_ELEMENTS), "float32"), "nu": ArraySpec((num_samples,), "int8")}
    return blueprint_of(arrays, {}, {}, {}, {}).layout


SAMPLE_NBYTES = sum(array.stride for array in layout_for(1).per_sample)


def lengths(num_samples: int, piece_bytes: int) -> list[int]:
    """Numbers of samples of the pieces, after a look at what they hold."""
    layout, samples = layout_for(num_samples), np.arange(num_samples)
    numbers = np.repeat(samples[:, None], NUM_ELEMENTS, axis=1).astype("float32")
    values = {"u": numbers, "nu": samples.astype("int8")}
    pieces, done = [], 0
    for piece in encode_pieces(layout, samples, samples, values, piece_bytes=piece_bytes, scratch=Scratch()):
        assert piece.samples.tolist() == list(range(done, done + len(piece.samples)))
        slots = dict(zip([array.meta.name for array in layout.per_sample], piece.slots, strict=True))
        assert slots["u"][:, :4].copy().view("float32")[:, 0].tolist() == piece.samples.tolist()
        done += len(piece.samples)
        pieces.append(len(piece.samples))
    return pieces


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(1, [1]), (4, [4]), (5, [5]), (7, [4, 3]), (9, [5, 4]), (11, [4, 4, 3]), (13, [5, 5, 3])],
)
def test_pieces_of_about_four_samples_leave_no_short_last_one(num_samples: int, expected: list[int]) -> None:
    assert lengths(num_samples, 4 * SAMPLE_NBYTES) == expected


@pytest.mark.parametrize("piece_bytes", [1, SAMPLE_NBYTES // 2, SAMPLE_NBYTES])
def test_samples_as_large_as_a_piece_are_pieces_by_themselves(piece_bytes: int) -> None:
    assert lengths(3, piece_bytes) == [1, 1, 1]


@given(num_samples=st.integers(1, 60), piece_bytes=st.integers(1, 20 * SAMPLE_NBYTES))
def test_pieces_hold_less_than_a_piece_and_a_half_and_one_sample(num_samples: int, piece_bytes: int) -> None:
    *full, last = lengths(num_samples, piece_bytes)
    assert sum(full) + last == num_samples
    assert len(set(full)) <= 1
    assert 1 <= last <= max(full, default=last)
    assert max(full, default=last) * SAMPLE_NBYTES < 1.5 * piece_bytes + SAMPLE_NBYTES
