"""Slots hold what the batch holds, by the compiled module and without it; this file runs sanitized, too."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from ups_store import ArraySpec
from ups_store.format.checksum import crc32c
from ups_store.system import runs
from ups_store.writing.encode import MAX_SAMPLES, Scratch, blocks_of, encode_block
from ups_store.writing.plan import plan_of

ODD_SAMPLES = {"u": (7,), "large": (300_001,), "wide": (3, 5000), "flag": (70,), "nu": (), "none": (0,)}


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(("num", "order"), [(1, "as they lie"), (3, "backwards"), (19, "every other")])
def test_slots_are_payload_and_crc32c_and_zeros(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool, num: int, order: str
) -> None:
    if not is_compiled:
        monkeypatch.setattr(runs, "compiled", None)
    arrays = {name: ArraySpec((2 * num, *shape), "int16") for name, shape in ODD_SAMPLES.items()}
    layout = plan_of(arrays, identity={}).layout
    rng = np.random.default_rng(num)
    values = {
        name: rng.integers(-99, 99, (2 * num, *shape)).astype("<i2") for name, shape in ODD_SAMPLES.items()
    }
    rows = {"as they lie": np.arange(num), "backwards": np.arange(num)[::-1]}.get(order, 2 * np.arange(num))
    scratch = Scratch()
    encode_block(layout, rows, {name: value * 2 for name, value in values.items()}, scratch)
    blocks, crcs = encode_block(layout, rows, values, scratch)  # into memory that was used before
    for column, (array, slots) in enumerate(zip(layout.per_sample, blocks, strict=True)):
        for slot, crc, row in zip(slots, crcs[:, column], rows, strict=True):
            payload = values[array.meta.name][row].tobytes()
            sealed = payload + crc32c(payload).to_bytes(4, "little") if array.meta.is_sharded else payload
            assert slot.tobytes() == sealed.ljust(array.stride, b"\0")
            assert crc == zlib.crc32(slot)


@pytest.mark.parametrize("block_bytes", [1, 10_000, 1 << 20])
def test_pieces_are_of_nearly_one_size_and_leave_no_short_last_one(block_bytes: int) -> None:
    arrays = {"u": ArraySpec((11, 1024), "float32"), "nu": ArraySpec((11,), "int8")}
    layout, rows = plan_of(arrays, identity={}).layout, np.arange(11)
    sample_nbytes = sum(array.stride for array in layout.per_sample)
    pieces = blocks_of(layout, rows, {}, block_bytes=block_bytes)
    lengths = [len(rows[piece]) for piece in pieces]
    assert (sum(lengths), max(lengths) - min(lengths) <= 1) == (11, True)
    assert max(lengths) * sample_nbytes < 1.5 * block_bytes + sample_nbytes


def test_pieces_of_tiny_samples_hold_a_limited_number() -> None:
    layout = plan_of({"nu": ArraySpec((10_000,), "int8")}, identity={}).layout
    lengths = [piece.stop - piece.start for piece in blocks_of(layout, np.arange(10_000), {})]
    assert sum(lengths) == 10_000
    assert max(lengths) <= MAX_SAMPLES
