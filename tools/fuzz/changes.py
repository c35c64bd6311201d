"""Changes of files: blind ones, which must all be noticed, and of JSON documents."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

NUMBERS = (
    0,
    1,
    2,
    3,
    0x7F,
    0xFF,
    0xFFFF,
    1 << 16,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 60,
    (1 << 63) - 1,
    1 << 63,
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 1.5, 1 << 53, 1 << 60, 1 << 64, math.inf, "", "sample", "x", "\ud800",
    "float64", "int8", [], [0], [1 << 40], [[]], {}, {"name": "bytes"},
)  # fmt: skip

Chance = random.Random
Change = Callable[[bytes, Chance], bytes]


# --- blind changes --------------------------------------------------------------------------------------


def flip_bits(good: bytes, chance: Chance) -> bytes:
    changed = bytearray(good)
    for _ in range(chance.choice((1, 1, 2, 8))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def overwrite_number(good: bytes, chance: Chance) -> bytes:
    layout = chance.choice(("<B", "<H", "<I", "<Q"))
    nbytes = struct.calcsize(layout)
    at, number = chance.randrange(len(good) - nbytes), chance.choice(NUMBERS)
    return good[:at] + struct.pack(layout, number & ((1 << 8 * nbytes) - 1)) + good[at + nbytes :]


def cut(good: bytes, chance: Chance) -> bytes:
    first = chance.randrange(len(good))
    return good[:first] if chance.random() < 0.5 else good[first:]


def splice(good: bytes, chance: Chance) -> bytes:
    nbytes = int(2 ** chance.uniform(0, 13))
    source, target = chance.randrange(len(good)), chance.randrange(len(good))
    piece, kept = good[source : source + nbytes], chance.choice((0, nbytes))
    return good[:target] + piece + good[target + kept :]


def erase(good: bytes, chance: Chance) -> bytes:
    first, nbytes = chance.randrange(len(good)), int(2 ** chance.uniform(0, 13))
    middle = bytes(len(good[first : first + nbytes])) if chance.random() < 0.5 else b""
    return good[:first] + middle + good[first + nbytes :]


BLIND: tuple[Change, ...] = (flip_bits, overwrite_number, cut, splice, erase)


# --- changes of JSON documents --------------------------------------------------------------------------


def change_value(document: Any, chance: Chance) -> None:
    """Replace, remove or add one value somewhere in a JSON document."""
    places = list(_places_in(document))
    if not places:  # an earlier change took all of them away
        return
    holder, key = chance.choice(places)
    action = chance.random()
    if action < 0.15:
        del holder[key]
    elif action < 0.3 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(chance.choice(VALUES)))
    elif action < 0.5 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] = chance.choice((holder[key] + 1, holder[key] - 1, -holder[key], holder[key] << 32))
    elif action < 0.6:
        other, other_key = chance.choice(places)
        holder[key] = json.loads(json.dumps(other[other_key]))
    else:
        holder[key] = copy.deepcopy(chance.choice(VALUES))


def _places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places_in(inner)
