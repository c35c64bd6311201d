"""Files whose `zarr.json` documents are wrong, their CRC-32s right (spec 4, 8, 9 and 10)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ups_store.format.zip_records import ROOT_NAME
from ups_store.testing.archive import (
    Builder,
    Document,
    Edit,
    Part,
    data_offset,
    edit_document,
    edit_shape,
    overwrite,
    put_together,
    read_document,
    take_apart,
    with_data,
    with_identity,
)
from ups_store.testing.sample_store import EMPTY, FLAGS, LARGE, SMALL

_ARRAY = f"{SMALL}/{ROOT_NAME}"
_LARGE_ARRAY = f"{LARGE}/{ROOT_NAME}"
_MIB = 1 << 20


def _root(edit: Edit) -> Builder:
    """Edit the root group's document."""
    return lambda good: put_together(edit_document(take_apart(good), ROOT_NAME, edit))


def _ours(**values: Any) -> Builder:
    """Set keys of the attribute `ups_store`."""
    return _root(lambda root: root["attributes"]["ups_store"].update(values))


def _edited(name: str, edit: Edit) -> Builder:
    """Edit an array's document."""
    return lambda good: put_together(edit_document(take_apart(good), name, edit))


def _array(name: str = _ARRAY, **values: Any) -> Builder:
    """Set keys of an array's document."""
    return _edited(name, lambda array: array.update(values))


def _without(key: str) -> Builder:
    """Leave a key out of an array's document."""
    return _edited(_ARRAY, lambda array: array.pop(key))


def _shape(array: str, *shape: int) -> Builder:
    """Another shape in metadata and identity; the records follow, the data don't."""
    return lambda good: put_together(edit_shape(take_apart(good), array, shape))


def _root_text(found: bytes, replaced: bytes) -> Builder:
    """Replace text in the root's document; the hash doesn't follow."""
    return with_data(ROOT_NAME, lambda raw: raw.rstrip().replace(found, replaced).ljust(4096))


def _codec(edit: Edit) -> Builder:
    """Edit the sharding codec of the large array."""
    return _edited(_LARGE_ARRAY, lambda array: edit(array["codecs"][0]["configuration"]))


def _flipped(name: str) -> Builder:
    """Change a byte of a metadata entry; its CRC-32 stays."""

    def build(good: bytes) -> bytes:
        at = data_offset(good, name) + 100
        return overwrite(good, at, "B", good[at] ^ 1)

    return build


def _huge(good: bytes) -> list[Part]:
    """2^40 samples in metadata, identity, hash and directory; only the length of the file knows better."""
    parts, samples = take_apart(good), 1 << 40
    for array in (LARGE, SMALL, FLAGS, EMPTY):
        shape = read_document(parts, f"{array}/{ROOT_NAME}")["shape"]
        parts = edit_shape(parts, array, (samples, *shape[1:]))
    sample_nbytes = {f"{LARGE}/c/0/0/0": 5184 + 16, f"{SMALL}/c/0": 8, f"{FLAGS}/c/0/0": 4}
    return [
        replace(part, claimed_nbytes=samples * sample_nbytes[part.name] + 4)
        if part.name in sample_nbytes
        else part
        for part in parts
    ]


def _huge_in_newer_minor(good: bytes) -> bytes:
    """The same in a file of a newer minor version, whose length a reader of this version can't compute."""

    def edit(root: Document) -> None:
        root["attributes"]["ups_store"]["format_version"] = "1.1"

    return put_together(edit_document(_huge(good), ROOT_NAME, edit))


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


_DEEP = b"[" * 100_000 + b"]" * 100_000
_GZIP = {"name": "gzip", "configuration": {"level": 1}}
_BIG_ENDIAN = [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]

DOCUMENT_DEFECTS: dict[str, Builder] = {
    # texts
    "crc_of_root_metadata": _flipped(ROOT_NAME),
    "crc_of_array_metadata": _flipped(_ARRAY),
    "metadata_not_json": with_data(_ARRAY, lambda raw: raw[:-1]),
    "metadata_empty": with_data(_ARRAY, lambda raw: b""),
    "metadata_a_list": with_data(_ARRAY, lambda raw: b"[]"),
    "metadata_in_utf_16": with_data(_ARRAY, lambda raw: raw.decode().encode("utf-16")),
    "metadata_not_utf_8": with_data(_ARRAY, lambda raw: raw.replace(b"m2 s-1", b"m\xb2 s-1")),
    "metadata_nested_100000_deep": with_data(_ARRAY, lambda raw: _DEEP),
    "metadata_number_of_a_million_digits": with_data(
        _ARRAY, lambda raw: b'{"shape":[' + b"9" * 10**6 + b"]}"
    ),
    "metadata_of_17_mib": with_data(_ARRAY, lambda raw: raw.ljust(17 * _MIB)),
    "root_metadata_of_17_mib": with_data(ROOT_NAME, lambda raw: raw.ljust(17 * _MIB)),
    # the root group
    "root_without_our_attribute": _root(lambda root: root["attributes"].pop("ups_store")),
    "root_attribute_not_an_object": _root(lambda root: root["attributes"].update(ups_store="1.0")),
    "root_attributes_null": _root(lambda root: root.update(attributes=None)),
    "root_is_an_array": _root(lambda root: root.update(node_type="array")),
    "root_of_zarr_2": _root(lambda root: root.update(zarr_format=2)),
    "version_missing": _root(lambda root: root["attributes"]["ups_store"].pop("format_version")),
    "version_a_number": _ours(format_version=1.0),
    "version_a_deep_list": _ours(format_version=_nested(300)),
    "version_not_ascii": _ours(format_version="1.\u0661"),
    "version_of_newer_major": _ours(format_version="2.0"),
    "version_of_older_major": _ours(format_version="0.9"),
    "packed_null": _ours(packed=None),
    # the identity
    "identity_edited_without_hash": _root(
        lambda root: root["attributes"]["ups_store"]["identity"]["content"].update(task="other")
    ),
    "identity_hash_edited": _ours(config_hash="0" * 64),
    "identity_hash_null": _ours(config_hash=None),
    "identity_null": _ours(identity=None),
    "identity_with_nan": _root_text(b'"task":"sample"', b'"task":NaN'),
    "identity_with_infinity": _root_text(b'"task":"sample"', b'"task":1e999'),
    "identity_with_integer_of_60_bits": _root_text(b'"task":"sample"', b'"task":1152921504606846976'),
    "identity_with_lone_surrogate": _root_text(b'"task":"sample"', b'"task":"\\ud800"'),
    "identity_nested_100000_deep": _root_text(b'"task":"sample"', b'"task":' + _DEEP),
    "identity_without_an_array": with_identity(lambda identity: identity["arrays"].pop(SMALL)),
    "identity_with_another_array": with_identity(lambda identity: identity["arrays"].update(z=None)),
    "identity_with_another_shape": with_identity(
        lambda identity: identity["arrays"][SMALL].update(shape=[4])
    ),
    "identity_arrays_null": with_identity(lambda identity: identity.update(arrays=None)),
    "array_metadata_missing": lambda good: put_together([p for p in take_apart(good) if p.name != _ARRAY]),
    # shapes
    "shape_missing": _without("shape"),
    "shape_negative": _array(shape=[-1]),
    "shape_of_floats": _array(shape=[3.0]),
    "shape_of_booleans": _array(shape=[True]),
    "shape_of_null": _array(shape=None),
    "shape_a_deep_list": _array(shape=[_nested(300)]),
    "shape_2_60": _array(shape=[1 << 60]),
    "shape_2_64": _array(shape=[1 << 64]),
    "shape_product_2_64": _array(shape=[1 << 16] * 4, dimension_names=list("abcd")),
    "shape_empty_but_not_addressable": _array(shape=[0, 1 << 30, 1 << 30], dimension_names=list("abc")),
    "shape_of_40_axes": _array(shape=[1] * 40, dimension_names=[f"d{i}" for i in range(40)]),
    "shape_larger_than_data": _shape(FLAGS, 3, 8),
    "shape_huge_everywhere": lambda good: put_together(_huge(good)),
    "shape_huge_everywhere_in_newer_minor": _huge_in_newer_minor,
    "num_samples_differ": _shape(SMALL, 4),
    "dimension_lengths_differ": _shape(LARGE, 3, 20, 64),
    # data types
    "dtype_missing": _without("data_type"),
    "dtype_unknown": _array(data_type="complex64"),
    "dtype_of_python_objects": _array(data_type="object"),
    "dtype_a_list": _array(data_type=["float64"]),
    "dtype_other_than_identity": _array(data_type="int64"),
    # codecs and chunks
    "codecs_missing": _without("codecs"),
    "codec_unknown": _array(codecs=[{"name": "zfpy"}]),
    "codec_compresses": _array(codecs=[*_BIG_ENDIAN, _GZIP]),
    "codec_without_checksum": _array(codecs=[{"name": "bytes", "configuration": {"endian": "little"}}]),
    "codec_big_endian": _array(codecs=_BIG_ENDIAN),
    "codec_a_deep_list": _array(codecs=_nested(300)),
    "index_at_start": _codec(lambda sharding: sharding.update(index_location="start")),
    "index_compressed": _codec(lambda sharding: sharding["index_codecs"].append(_GZIP)),
    "inner_chunk_of_two_samples": _codec(lambda sharding: sharding.update(chunk_shape=[2, 40, 32])),
    "large_array_without_shards": _array(_LARGE_ARRAY, codecs=_BIG_ENDIAN),
    "chunk_grid_of_booleans": _array(
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [True]}},
        shape=[1],
    ),
    "chunk_grid_with_two_chunks": _array(
        chunk_grid={"name": "regular", "configuration": {"chunk_shape": [2]}}
    ),
    "chunk_keys_with_dots": _array(
        chunk_key_encoding={"name": "default", "configuration": {"separator": "."}}
    ),
    "fill_value_of_1": _array(fill_value=1),
    "fill_value_false_for_numbers": _array(fill_value=False),
    "storage_transformer": _array(storage_transformers=[{"name": "remote"}]),
    "array_is_a_group": _array(node_type="group"),
    "array_of_zarr_2": _array(zarr_format=2),
    # dimensions and attributes
    "dimension_names_missing": _without("dimension_names"),
    "dimension_names_too_few": _array(dimension_names=[]),
    "dimension_names_null": _array(dimension_names=[None]),
    "dimension_name_twice": _array(_LARGE_ARRAY, dimension_names=["sample", "x", "x"]),
    "dimension_sample_not_first": _array(_LARGE_ARRAY, dimension_names=["time", "sample", "x"]),
    "attributes_missing": _without("attributes"),
    "attributes_null": _array(attributes=None),
    "attributes_with_nan": with_data(_ARRAY, lambda raw: raw.replace(b'"m2 s-1"', b"NaN")),
    "attributes_with_infinity": with_data(_ARRAY, lambda raw: raw.replace(b'"m2 s-1"', b"-1e999")),
    "attributes_nested_100000_deep": with_data(_ARRAY, lambda raw: raw.replace(b'"m2 s-1"', _DEEP)),
    "root_attributes_with_lone_surrogate": _root_text(b'"title":"sample"', b'"title":"\\ud800"'),
}
