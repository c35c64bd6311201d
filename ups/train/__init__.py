"""Training: one loop for all stages, the stages, and what a run keeps of itself."""

from ups.errors import check_installed

check_installed("torch", "rich", extra="train")
