"""`Fuzzer`: tries inputs one by one and notes what should not have happened."""

from __future__ import annotations

import resource
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import ups_store
from ups.errors import UpsError

MAX_SECONDS = 1.0  # of processor time: other work of the machine must not count


@dataclass
class Outcome:
    """What the fuzzing did and found.

    Attributes:
        num_inputs: Inputs that were read.
        num_opened: Inputs that opened as a store.
        num_sound: Inputs that opened and verified.
        max_seconds: The longest that one input took.
        peak_memory_mib: Largest resident memory of a process.
        failures: What should not have happened, by input number.
        kinds: Refusals by kind of error.
        seconds: How long it took.
    """

    num_inputs: int = 0
    num_opened: int = 0
    num_sound: int = 0
    max_seconds: float = 0.0
    peak_memory_mib: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        """Count another process's inputs too."""
        self.num_inputs += other.num_inputs
        self.num_opened += other.num_opened
        self.num_sound += other.num_sound
        self.max_seconds = max(self.max_seconds, other.max_seconds)
        self.peak_memory_mib = max(self.peak_memory_mib, other.peak_memory_mib)
        self.failures |= other.failures
        self.kinds += other.kinds


class Fuzzer(ABC):
    """One process's share.

    Attributes:
        outcome: What was found so far.
    """

    def __init__(self) -> None:
        self.outcome = Outcome()

    def try_input(self, number: int) -> None:
        """Make one input and read it."""
        read = self.prepare(number)
        started = time.process_time()
        try:
            read()
        except (ups_store.StoreError, UpsError) as error:
            self.outcome.kinds[error.kind] += 1
            str(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.outcome.failures[number] = f"{type(error).__name__}: {error}"[:300]
        seconds = time.process_time() - started
        if seconds > MAX_SECONDS:
            self.outcome.failures[number] = f"took {seconds:.2f} s"
        self.outcome.max_seconds = max(self.outcome.max_seconds, seconds)
        self.outcome.num_inputs += 1

    @abstractmethod
    def prepare(self, number: int) -> Callable[[], None]:
        """Make an input; returns what reads it."""

    def close(self) -> None:
        """End what was begun, and note the largest memory."""
        self.outcome.peak_memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
