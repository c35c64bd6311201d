"""Processes that train one model together: which rank each has, and parameters that are sharded over them."""

from ups.errors import check_installed

check_installed("torch", extra="train")
