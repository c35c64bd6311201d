"""The conformance corpus: valid files, and broken ones that break one clause each.

`REFUSED` files are refused when they are opened, `DAMAGED` ones open and verifying says what is wrong,
`NEWER_MINOR` ones are read. Each is made from the bytes of `write_sample_store`'s file.
`tools.conformance.corpus` has all files; see docs/format/conformance.md.
"""

from tools.conformance.archive import Builder
from tools.conformance.array_documents import ARRAYS, NAMES
from tools.conformance.damage import DAMAGED
from tools.conformance.defect import Defect
from tools.conformance.newer import NEWER_MINOR
from tools.conformance.records import DIRECTORY, END_RECORDS, ENTRIES, NOT_A_STORE, TRUNCATED, truncations
from tools.conformance.root_documents import IDENTITY, ROOT
from tools.conformance.sample_store import write_sample_store
from tools.conformance.texts import TEXTS

REFUSED: dict[str, Defect] = {
    **NOT_A_STORE,
    **END_RECORDS,
    **TRUNCATED,
    **DIRECTORY,
    **ENTRIES,
    **TEXTS,
    **ROOT,
    **IDENTITY,
    **ARRAYS,
    **NAMES,
}

__all__ = ["DAMAGED", "NEWER_MINOR", "REFUSED", "Builder", "Defect", "truncations", "write_sample_store"]
