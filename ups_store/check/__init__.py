"""What stores hold and whether it is sound: info, doctor, salvage, statistics, preview, garbage."""

from ups_store.lazy import attach

__getattr__, __all__ = attach(__name__, __file__)
