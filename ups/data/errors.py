"""The errors of stores, for those outside `ups.data` who tell people about them."""

from ups_store.errors import StoreError

__all__ = ["StoreError"]
