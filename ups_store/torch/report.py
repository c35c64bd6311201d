"""`EpochReport`: what an epoch moved, and what the training loop waited for."""

from __future__ import annotations

from dataclasses import dataclass

WAIT_SHARE = 0.05  # a loop that waits less than this is not held up by its data
FAULTS_PER_S = 100.0  # major page faults, each a read from the disk


@dataclass(frozen=True)
class EpochReport:
    """One epoch of a loader, or what there has been of it so far.

    Attributes:
        epoch: Its number.
        num_steps: Batches that the loop was given.
        num_samples: Samples in them on this rank, those that only fill up the last batch included.
        nbytes: Bytes of them.
        seconds: From the first `next` on.
        waited_s: Of those, what the loop waited for batches.
        assembled_s: What the background threads spent on making them, added up.
        major_faults: Page faults of those threads that read from the disk.
        resident: Share of the stores that lay in RAM at the end, 0 to 1.
    """

    epoch: int
    num_steps: int
    num_samples: int
    nbytes: int
    seconds: float
    waited_s: float
    assembled_s: float
    major_faults: int
    resident: float

    @property
    def wait_share(self) -> float:
        """Share of the time that the loop waited, 0 to 1."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second on this rank."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def bound(self) -> str:
        """What a faster epoch needs: "model", "storage" or "cpu" (copying batches)."""
        if self.wait_share < WAIT_SHARE:
            return "model"
        reads_disk = self.assembled_s > 0 and self.major_faults / self.assembled_s > FAULTS_PER_S
        return "storage" if reads_disk else "cpu"

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}: {self.num_steps} steps, {self.num_samples} samples, "
            f"{self.nbytes / 1e6:,.1f} MB in {self.seconds:.2f} s ({self.samples_per_s:,.0f} samples/s); "
            f"waited {self.wait_share:.1%} of it, {self.bound}-bound; "
            f"{self.major_faults} major page faults, {self.resident:.0%} resident"
        )
