"""What is known of a solution without knowing it: conserved quantities, its equation, its boundary values."""

from ups.errors import check_installed

check_installed("torch", extra="train")
