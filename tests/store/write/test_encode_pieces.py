"""Batches are cut into pieces of nearly one size, whose slots hold what the batch holds."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups_store import ArraySpec
from ups_store.format.checksum import crc32, crc32c
from ups_store.format.layout import Layout
from ups_store.system import runs
from ups_store.write.blueprint import blueprint_of
from ups_store.write.encode import MAX_SAMPLES, Scratch, Scratches, encode_piece, pieces_of

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
    found, done, scratch = [], 0, Scratch()
    for part in pieces_of(layout, num_samples, piece_bytes):
        piece = encode_piece(layout, samples[part], samples[part], values, scratch)
        assert piece.samples.tolist() == list(range(done, done + len(piece.samples)))
        slots = dict(zip([array.meta.name for array in layout.per_sample], piece.slots, strict=True))
        assert slots["u"][:, :4].copy().view("float32")[:, 0].tolist() == piece.samples.tolist()
        assert slots["nu"][:, 0].tolist() == piece.samples.tolist()
        assert piece.crcs.tolist() == [
            [crc32(rows[i].data) for rows in piece.slots] for i in range(len(piece.samples))
        ]
        done += len(piece.samples)
        found.append(len(piece.samples))
    return found


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(1, [1]), (4, [4]), (5, [5]), (7, [3, 4]), (9, [4, 5]), (11, [3, 4, 4]), (13, [4, 4, 5])],
)
def test_pieces_of_about_four_samples_leave_no_short_last_one(num_samples: int, expected: list[int]) -> None:
    assert lengths(num_samples, 4 * SAMPLE_NBYTES) == expected


@pytest.mark.parametrize("piece_bytes", [1, SAMPLE_NBYTES // 2, SAMPLE_NBYTES])
def test_samples_as_large_as_a_piece_are_pieces_by_themselves(piece_bytes: int) -> None:
    assert lengths(3, piece_bytes) == [1, 1, 1]


@given(num_samples=st.integers(1, 60), piece_bytes=st.integers(1, 20 * SAMPLE_NBYTES))
def test_pieces_hold_less_than_a_piece_and_a_half_and_one_sample(num_samples: int, piece_bytes: int) -> None:
    pieces = lengths(num_samples, piece_bytes)
    assert sum(pieces) == num_samples
    assert max(pieces) - min(pieces) <= 1
    assert max(pieces) * SAMPLE_NBYTES < 1.5 * piece_bytes + SAMPLE_NBYTES


def test_pieces_of_tiny_samples_hold_a_limited_number() -> None:
    arrays = {"nu": ArraySpec((10_000,), "int8")}
    pieces = pieces_of(blueprint_of(arrays, {}, {}, {}, {}).layout, 10_000, 1 << 20)
    assert max(part.stop - part.start for part in pieces) <= MAX_SAMPLES
    assert [part.start for part in pieces] == [0, *(part.stop for part in pieces[:-1])]
    assert pieces[-1].stop == 10_000


ODD_SAMPLES = {"u": (7,), "large": (300_001,), "wide": (3, 5000), "flag": (70,), "nu": (), "none": (0,)}


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("num", [1, 2, 3, 8, 19])
@pytest.mark.parametrize("order", ["as they lie", "backwards", "every other"])
def test_slots_are_payload_and_crc32c_and_zeros(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool, num: int, order: str
) -> None:
    if not is_compiled:
        monkeypatch.setattr(runs, "compiled", None)
    arrays = {name: ArraySpec((2 * num, *shape), "int16") for name, shape in ODD_SAMPLES.items()}
    layout = blueprint_of(arrays, {}, {}, {}, {}).layout
    rng = np.random.default_rng(num)
    values = {
        name: rng.integers(-99, 99, (2 * num, *shape)).astype("<i2") for name, shape in ODD_SAMPLES.items()
    }
    rows = {"as they lie": np.arange(num), "backwards": np.arange(num)[::-1]}.get(order, 2 * np.arange(num))
    scratch = Scratch()
    encode_piece(layout, np.arange(num), rows, {name: value * 2 for name, value in values.items()}, scratch)
    piece = encode_piece(layout, np.arange(num), rows, values, scratch)  # into memory that was used before
    for column, (array, slots) in enumerate(zip(layout.per_sample, piece.slots, strict=True)):
        for slot, crc, row in zip(slots, piece.crcs[:, column], rows, strict=True):
            payload = values[array.meta.name][row].tobytes()
            sealed = payload + crc32c(payload).to_bytes(4, "little") if array.meta.is_sharded else payload
            assert slot.tobytes() == sealed.ljust(array.stride, b"\0")
            assert crc == zlib.crc32(slot)


def test_scratch_is_used_again_and_lent_to_one_at_a_time() -> None:
    scratches = Scratches()
    with scratches.lent() as first, scratches.lent() as second:
        assert first is not second
    with scratches.lent() as again:
        assert again in (first, second)
    with pytest.raises(OSError), scratches.lent():  # noqa: PT011
        raise OSError
    with scratches.lent() as one, scratches.lent() as two:
        assert {id(one), id(two)} == {id(first), id(second)}
