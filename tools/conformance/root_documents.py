"""Files whose root or identity document is wrong (spec 4.3, 8 and 10); checksums and hash are right."""

from __future__ import annotations

from typing import Any

from tools.conformance.archive import Builder, Document, Edit, with_document, with_identity
from tools.conformance.defect import Defect
from tools.conformance.sample_store import CONSTANT, LARGE, SMALL
from ups_store.format.zip_records import ROOT_NAME


def _root(edit: Edit) -> Builder:
    """Edit the root group's document."""
    return with_document(ROOT_NAME, edit)


def _set(**values: Any) -> Builder:
    """Set keys of the root group's document."""
    return _root(lambda root: root.update(values))


def _root_without(key: str) -> Builder:
    return _root(lambda root: root.pop(key))


def _attributes(**values: Any) -> Builder:
    return _root(lambda root: root["attributes"].update(values))


def _ours(**values: Any) -> Builder:
    """Set keys of the attribute `ups_store`."""
    return _root(lambda root: root["attributes"]["ups_store"].update(values))


def _without(key: str) -> Builder:
    """Leave a key of the attribute `ups_store` out."""
    return _root(lambda root: root["attributes"]["ups_store"].pop(key))


def _hash(edit: Any) -> Builder:
    def change(root: Document) -> None:
        ours = root["attributes"]["ups_store"]
        ours["config_hash"] = edit(ours["config_hash"])

    return _root(change)


def _identity(**values: Any) -> Builder:
    """Set keys of the identity document."""
    return with_identity(lambda identity: identity.update(values))


def _identity_without(key: str) -> Builder:
    return with_identity(lambda identity: identity.pop(key))


def _digest(digest: str | None) -> Builder:
    """Another digest of the constant."""
    return with_identity(lambda identity: identity["constants"].update({CONSTANT: digest}))


def _array(name: str, **values: Any) -> Builder:
    """Set keys of an array in the identity."""
    return with_identity(lambda identity: identity["arrays"][name].update(values))


def _number_of_samples(identity: Document) -> None:
    for array in identity["arrays"].values():
        if array["dims"][0] == "sample":
            array["shape"] = [3, *array["shape"]]


_VERSIONS: dict[str, Any] = {
    "a_number": 1.5,
    "null": None,
    "a_list": [1, 0],
    "without_minor": "1",
    "of_three_numbers": "1.0.0",
    "with_leading_zero": "01.0",
    "with_minor_of_two_zeros": "1.00",
    "with_a_letter": "v1.0",
    "with_a_space": "1.0 ",
    "with_a_line_feed": "1.0\n",
    "of_seven_digits": "1.1234567",
    "not_ascii": "1.\u0661",
    "empty": "",
}

_REQUIRES: dict[str, tuple[Any, str]] = {
    "null": (None, "null"),
    "a_string": ("packed", "a string"),
    "an_object": ({}, "an object"),
    "of_numbers": ([1], "a list with a number"),
    "with_null": ([None], "a list with null"),
    "an_empty_name": ([""], "a list with the empty name"),
    "in_capitals": (["Ragged"], "a list with a capital"),
    "with_a_line_feed": (["ragged\n"], "a list with a line feed"),
    "a_name_of_65_characters": (["z" * 65], "a list with a name of 65 characters"),
    "65_features": ([f"z{i:02}" for i in range(65)], "a list of 65 features"),
}

_PARTITIONS: dict[str, Any] = {
    "null": None,
    "true": True,
    "an_object": {"number": 0, "of": 2},
    "of_one_number": [1],
    "of_three_numbers": [0, 2, 0],
    "of_strings": ["0", "2"],
    "of_booleans": [False, True],
    "with_a_fraction": [0.5, 2],
    "negative": [-1, 2],
    "past_the_last": [2, 2],
    "of_none": [0, 0],
    "of_100000": [99_999, 100_000],
}

ROOT: dict[str, Defect] = {
    "root_with_another_key": Defect("4.3", "The root has another key.", _set(extra=1)),
    "root_with_consolidated_metadata": Defect(
        "4.3", "The root has consolidated metadata.", _set(consolidated_metadata=None)
    ),
    "root_of_zarr_2": Defect("4.3", "zarr_format is 2.", _set(zarr_format=2)),
    "root_without_zarr_format": Defect("4.3", "zarr_format is missing.", _root_without("zarr_format")),
    "root_is_an_array": Defect("4.3", "node_type is 'array'.", _set(node_type="array")),
    "root_without_node_type": Defect("4.3", "node_type is missing.", _root_without("node_type")),
    "root_without_attributes": Defect("4.3", "attributes are missing.", _root_without("attributes")),
    "root_attributes_null": Defect("4.3", "attributes are null.", _set(attributes=None)),
    "root_attributes_a_list": Defect("4.3", "attributes are a list.", _set(attributes=[])),
    "root_without_ups_store": Defect(
        "4.3", "The attribute ups_store is missing.", _root(lambda root: root["attributes"].pop("ups_store"))
    ),
    "ups_store_a_string": Defect("4.3", "The attribute ups_store is a string.", _attributes(ups_store="1.0")),
    "ups_store_null": Defect("4.3", "The attribute ups_store is null.", _attributes(ups_store=None)),
    "ups_store_with_another_key": Defect("4.3", "ups_store has a key that 1.0 doesn't have.", _ours(extra=1)),
    "version_missing": Defect("4.3", "format_version is missing.", _without("format_version")),
    **{
        f"version_{name}": Defect("10.1", f"format_version is {value!r}.", _ours(format_version=value))
        for name, value in _VERSIONS.items()
    },
    "version_2_0": Defect("10.2", "The major version is newer.", _ours(format_version="2.0")),
    "version_0_9": Defect("10.2", "The major version is older.", _ours(format_version="0.9")),
    "version_10_0": Defect("10.2", "The major version is 10.", _ours(format_version="10.0")),
    "hash_missing": Defect("4.3", "config_hash is missing.", _without("config_hash")),
    "hash_null": Defect("8.3", "config_hash is null.", _ours(config_hash=None)),
    "hash_of_something_else": Defect("8.3", "config_hash is all zeros.", _ours(config_hash="0" * 64)),
    "hash_in_capitals": Defect("8.3", "config_hash has capitals.", _hash(str.upper)),
    "hash_of_63_digits": Defect("8.3", "config_hash lacks its last digit.", _hash(lambda text: text[:-1])),
    "hash_of_65_digits": Defect("8.3", "config_hash has a digit more.", _hash(lambda text: text + "0")),
    "hash_of_an_edited_identity": Defect(
        "8.3",
        "The identity has another content than the hash.",
        _root(lambda root: root["attributes"]["ups_store"]["identity"]["content"].update(task="other")),
    ),
    "identity_missing": Defect("4.3", "The identity is missing.", _without("identity")),
    "identity_null": Defect("8.1", "The identity is null.", _ours(identity=None)),
    "identity_a_list": Defect("8.1", "The identity is a list.", _ours(identity=[])),
    "requires_missing": Defect("4.3", "requires is missing.", _without("requires")),
    **{
        f"requires_{name}": Defect("4.3", f"requires is {why}.", _ours(requires=value))
        for name, (value, why) in _REQUIRES.items()
    },
    "requires_an_unknown_feature": Defect(
        "10.3", "A feature is required that 1.0 doesn't know.", _ours(requires=["zebra"])
    ),
    "requires_64_unknown_features": Defect(
        "10.3", "As many features as allowed, all unknown.", _ours(requires=[f"z{i:02}" for i in range(64)])
    ),
    "requires_ragged_without_need": Defect(
        "10.3", "'ragged' is required, but there is no ragged array.", _ours(requires=["ragged"])
    ),
    "requires_packed_without_key": Defect(
        "13.2", "'packed' is required, but the key is missing.", _ours(requires=["packed"])
    ),
    "packed_not_required": Defect(
        "4.3",
        "There is the key packed, but it isn't required.",
        _ours(packed={"codec": "blosc", "level": 5, "fingerprint": "0" * 64}),
    ),
    "packed_null": Defect("4.3", "There is the key packed, null, and it isn't required.", _ours(packed=None)),
}

IDENTITY: dict[str, Defect] = {
    "identity_without_arrays": Defect("8.1", "arrays are missing.", _identity_without("arrays")),
    "identity_without_constants": Defect("8.1", "constants are missing.", _identity_without("constants")),
    "identity_without_content": Defect("8.1", "content is missing.", _identity_without("content")),
    "identity_with_another_key": Defect("8.1", "There is another key.", _identity(extra=1)),
    "identity_with_format": Defect("8.1", "There is the key format of older files.", _identity(format=1)),
    "identity_arrays_null": Defect("8.1", "arrays are null.", _identity(arrays=None)),
    "identity_arrays_a_list": Defect("8.1", "arrays are a list.", _identity(arrays=[])),
    "identity_constants_null": Defect("8.1", "constants are null.", _identity(constants=None)),
    "identity_constants_a_list": Defect("8.1", "constants are a list.", _identity(constants=["x", "y"])),
    "identity_content_null": Defect("8.1", "content is null.", _identity(content=None)),
    "identity_content_a_string": Defect("8.1", "content is a string.", _identity(content="sample")),
    "identity_content_a_list": Defect("8.1", "content is a list.", _identity(content=[])),
    **{
        f"partition_{name}": Defect("8.1", f"partition is {value!r}.", _identity(partition=value))
        for name, value in _PARTITIONS.items()
    },
    "digest_of_no_constant": Defect(
        "8.1",
        "A digest is that of an array with samples.",
        with_identity(lambda identity: identity["constants"].update({LARGE: "0" * 64})),
    ),
    "digest_missing": Defect(
        "8.1",
        "The digest of a constant is missing.",
        with_identity(lambda identity: identity["constants"].pop(CONSTANT)),
    ),
    "digest_of_63_digits": Defect("8.1", "A digest has 63 digits.", _digest("0" * 63)),
    "digest_in_capitals": Defect("8.1", "A digest has capitals.", _digest("A" * 64)),
    "digest_with_a_line_feed": Defect("8.1", "A line feed follows a digest.", _digest("0" * 64 + "\n")),
    "digest_null": Defect("8.1", "A digest is null.", _digest(None)),
    "identity_lacks_an_array": Defect(
        "8.1",
        "An array of the file isn't in the identity.",
        with_identity(lambda identity: identity["arrays"].pop(SMALL)),
    ),
    "identity_has_another_array": Defect(
        "8.1",
        "The file lacks an array of the identity.",
        with_identity(lambda identity: identity["arrays"].update(z=identity["arrays"][SMALL])),
    ),
    "identity_array_null": Defect(
        "8.1", "An array is null.", with_identity(lambda identity: identity["arrays"].update({SMALL: None}))
    ),
    "identity_array_with_another_key": Defect("8.1", "An array has another key.", _array(SMALL, codecs=[])),
    "identity_array_without_dims": Defect(
        "8.1", "An array has no dims.", with_identity(lambda identity: identity["arrays"][SMALL].pop("dims"))
    ),
    "identity_with_another_dtype": Defect("8.1", "An array has another dtype.", _array(SMALL, dtype="int64")),
    "identity_with_another_shape": Defect(
        "8.1", "An array has another shape.", _array(LARGE, shape=[32, 40])
    ),
    "identity_with_other_dims": Defect(
        "8.1", "An array has other dims.", _array(LARGE, dims=["sample", "t", "x"])
    ),
    "identity_with_number_of_samples": Defect(
        "8.1", "Shapes begin with the number of samples.", with_identity(_number_of_samples)
    ),
    "identity_shape_null": Defect("8.1", "The shape of an array is null.", _array(LARGE, shape=None)),
}
