"""Malformed files for those who test readers of the format: this package's, and others (spec 7, 11).

`MALFORMED` files are refused when they are opened, `DAMAGED` ones open and `verify` says what is wrong,
`NEWER_MINOR` ones are read. Each maps a name, which says the defect, to a pure function from the bytes of
`write_sample_store`'s file to the bytes of the other one. `python tools/make_malformed.py FOLDER` writes
them all.
"""

from ups_store.testing.archive import Builder
from ups_store.testing.documents import DOCUMENT_DEFECTS
from ups_store.testing.payloads import DAMAGED, NEWER_MINOR
from ups_store.testing.records import RECORD_DEFECTS, truncations
from ups_store.testing.sample_store import write_sample_store

MALFORMED: dict[str, Builder] = {**RECORD_DEFECTS, **DOCUMENT_DEFECTS}

__all__ = ["DAMAGED", "MALFORMED", "NEWER_MINOR", "truncations", "write_sample_store"]
