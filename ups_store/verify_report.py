"""What checking every byte of a store found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: Stable identifier. Of chunks "chunk_crc", "slot_padding", "shard_index", "entry_crc",
            "bool_value", "constant_digest" (and what decoding a packed one raises); of metadata
            "metadata_text", "identity"; of ZIP records "local_header", "directory".
        clause: Clause of the spec that is violated.
        byte_range: `(first, past_last)` byte in the file.
        array: Array, where one is concerned.
        sample: Sample, where one can be told.
        detail: What was expected and found.
    """

    kind: str
    clause: str
    byte_range: tuple[int, int]
    array: str | None = None
    sample: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = [f"array {self.array!r}"] if self.array else []
        where += [f"sample {self.sample}"] if self.sample is not None else []
        where += [f"bytes {self.byte_range[0]}..{self.byte_range[1]}"]
        return f"{', '.join(where)}: {self.kind} {self.detail} (spec {self.clause})"


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        path: The file.
        nbytes: Bytes that were checked: all of them.
        num_chunks: Chunk checksums that were checked.
        problems: What is wrong, in file order.
    """

    path: Path
    nbytes: int
    num_chunks: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def has_wrong_identity(self) -> bool:
        """Whether the identity document isn't as spec 8.1 says: then no builder can make the store again."""
        return any(problem.kind == "identity" for problem in self.problems)

    @property
    def damaged(self) -> dict[str, list[int]]:
        """Samples with damage, by array; an array of which no sample can be told has an empty list."""
        found: dict[str, set[int]] = {}
        for problem in self.problems:
            if problem.array:
                found.setdefault(problem.array, set()).update(
                    [] if problem.sample is None else [problem.sample]
                )
        return {name: sorted(samples) for name, samples in found.items()}
