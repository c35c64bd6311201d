"""Stores to and from other formats, each written in bounded memory and published whole."""

from ups_store.convert.export import FORMATS, export_store

__all__ = ["FORMATS", "export_store"]
