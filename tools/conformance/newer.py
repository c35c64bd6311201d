"""Files of a newer minor version: read, not verified (spec 10.3)."""

from __future__ import annotations

from collections.abc import Callable

from tools.conformance.archive import (
    Builder,
    Document,
    Part,
    edit_document,
    edit_identity,
    with_document,
    with_parts,
)
from tools.conformance.defect import Defect
from tools.conformance.sample_store import LARGE
from ups_store.format.zip_records import ROOT_NAME


def newer(parts: list[Part], version: str = "1.7") -> list[Part]:
    """The same parts, of a newer minor version."""
    return edit_document(
        parts, ROOT_NAME, lambda root: root["attributes"]["ups_store"].update(format_version=version)
    )


def with_version(version: str, change: Callable[[list[Part]], list[Part]] = list) -> Builder:
    """A builder of files of a newer version; `change` edits the parts."""
    return with_parts(lambda parts: change(newer(parts, version)))


def _with_key(parts: list[Part]) -> list[Part]:
    def edit(root: Document) -> None:
        root["attributes"]["ups_store"]["statistics"] = {LARGE: {"max": 1}}

    return edit_document(parts, ROOT_NAME, edit)


NEWER_MINOR: dict[str, Builder] = {
    "newer_minor_version": with_version("1.7"),
    "newer_minor_of_six_digits": with_version("1.999999"),
    "newer_minor_with_a_key": with_version("1.7", _with_key),
    "newer_minor_with_an_entry": with_version("1.7", lambda parts: [*parts, Part("v/zarr.json", b"{}")]),
    "newer_minor_with_aligned_data": with_version(
        "1.7", lambda parts: [*parts, Part("extra/c/0", b"\1" * 99, True)]
    ),
}


def _requiring(feature: str) -> Builder:
    def edit(root: Document) -> None:
        root["attributes"]["ups_store"].update(format_version="1.7", requires=[feature])

    return with_document(ROOT_NAME, edit)


def _entry_between(parts: list[Part]) -> list[Part]:
    return [*parts[:7], Part("extra", b"more"), *parts[7:]]


NEWER_REFUSED: dict[str, Defect] = {
    "newer_minor_requiring_a_feature": Defect(
        "10.3", "A newer file requires an unknown feature.", _requiring("zebra")
    ),
    "newer_minor_with_an_entry_between": Defect(
        "10.3",
        "A newer file has another entry before the last data entry.",
        with_version("1.7", _entry_between),
    ),
    "newer_minor_with_data_missing": Defect(
        "10.3", "A newer file lacks its last data entry.", with_version("1.7", lambda parts: parts[:-1])
    ),
    "newer_minor_with_another_root_key": Defect(
        "4.3",
        "A newer file has another key beside the attributes.",
        with_version("1.7", lambda parts: edit_document(parts, ROOT_NAME, lambda root: root.update(extra=1))),
    ),
    "newer_minor_with_another_array_key": Defect(
        "4.4",
        "A newer file has another key in the document of an array.",
        with_version(
            "1.7", lambda parts: edit_document(parts, "nu/zarr.json", lambda array: array.update(extra=1))
        ),
    ),
    "newer_minor_with_another_identity_key": Defect(
        "8.1",
        "A newer file has another key in its identity.",
        with_version("1.7", lambda parts: edit_identity(parts, lambda identity: identity.update(extra=1))),
    ),
}
