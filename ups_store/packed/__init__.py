"""Packed stores: the same Zarr arrays with compressed chunks (`docs/format/packed.md`)."""
