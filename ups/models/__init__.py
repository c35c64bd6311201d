"""Architectures: encoder and decoder of fields. They don't know each other:
`ups.trained.autoencoder` joins them.
"""

from ups.errors import check_installed

check_installed("torch", extra="train")
