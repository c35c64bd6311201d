"""Layers that several models are made of."""

from ups.errors import check_installed

check_installed("torch", extra="train")
