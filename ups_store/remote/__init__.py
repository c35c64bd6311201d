"""Stores in object stores, read in place: `ups_store.open("s3://bucket/NAME.zarr.zip")`.

`ups_store.open` loads this package, and `obstore` with it, only for a URL.
"""
