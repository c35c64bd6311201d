"""How good a prediction is: metrics in field space."""

from ups.errors import check_installed

check_installed("torch", "rich", "typer", extra="train")
