"""What is wrong with a broken file: the clause, a sentence, and how it is made from a good one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.conformance.archive import Builder, overwrite

Find = Callable[[bytes], int]  # where a record begins in a good file


@dataclass(frozen=True)
class Defect:
    """One clause that a file breaks; everything else about it is right.

    Attributes:
        clause: Of the specification.
        why: What is wrong, a short sentence.
        build: The broken file from the good one.
    """

    clause: str
    why: str
    build: Builder


@dataclass(frozen=True)
class Field:
    """A field of a record.

    Attributes:
        name: In the table of the specification.
        offset: Bytes from the beginning of the record.
        nbytes: Its length.
    """

    name: str
    offset: int
    nbytes: int


def changed_fields(
    prefix: str, fields: list[Field], find: Find, clause: str, record: str
) -> dict[str, Defect]:
    """A defect for each field of a record: its lowest bit is flipped."""
    return {
        f"{prefix}_{field.name.replace(' ', '_')}": Defect(
            clause, f"{record}: another value in the field '{field.name}'.", _flipped(field, find)
        )
        for field in fields
    }


def _flipped(field: Field, find: Find) -> Builder:
    def build(good: bytes) -> bytes:
        at = find(good) + field.offset
        return overwrite(good, at, "B", good[at] ^ 1)

    return build
