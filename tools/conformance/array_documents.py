"""Files whose array documents, names or limits are wrong (spec 4.2 to 4.7, 9.1), checksums and hash right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tools.conformance.archive import (
    Builder,
    Document,
    Edit,
    Part,
    edit_document,
    edit_identity,
    edit_shape,
    put_together,
    read_document,
    take_apart,
    with_document,
    with_parts,
)
from tools.conformance.defect import Defect
from tools.conformance.records import LARGE_ARRAY, SMALL_ARRAY
from tools.conformance.sample_store import EMPTY, EMPTY_CONSTANT, FLAGS, LARGE, SMALL
from ups_store.format.zip_records import ROOT_NAME

_LITTLE: Document = {"name": "bytes", "configuration": {"endian": "little"}}
_BIG: Document = {"name": "bytes", "configuration": {"endian": "big"}}
_CRC32C: Document = {"name": "crc32c"}
_SAMPLED = (LARGE, SMALL, FLAGS)
_GZIP: Document = {"name": "gzip", "configuration": {"level": 1}}


def _doc(name: str = SMALL_ARRAY, **values: Any) -> Builder:
    """Set keys of an array's document."""
    return with_document(name, lambda array: array.update(values))


def _without(key: str) -> Builder:
    return with_document(SMALL_ARRAY, lambda array: array.pop(key))


def _sharding(edit: Edit) -> Builder:
    """Edit the sharding codec of the large array."""
    return with_document(LARGE_ARRAY, lambda array: edit(array["codecs"][0]["configuration"]))


def _codec(**values: Any) -> Builder:
    """Set keys of it."""
    return _sharding(lambda codec: codec.update(values))


def _geometry(array: str, **values: Any) -> Builder:
    """Shape, data type or dimensions of an array, in its document and in the identity."""

    def change(parts: list[Part]) -> list[Part]:
        name = f"{array}/{ROOT_NAME}"
        parts = edit_document(parts, name, lambda document: document.update(values))
        document = read_document(parts, name)
        dims, shape = document["dimension_names"], document["shape"]
        sample_shape = shape[1:] if dims[:1] == ["sample"] else shape
        edited = {"dims": dims, "dtype": document["data_type"], "shape": sample_shape}
        return edit_identity(parts, lambda identity: identity["arrays"].update({array: edited}))

    return with_parts(change)


def _empty_constant(shape: list[int]) -> Builder:
    """Another shape of the constant without elements, with dimensions, grid and identity that follow."""

    def grid(document: Document) -> None:
        document["chunk_grid"]["configuration"]["chunk_shape"] = [max(1, n) for n in shape]

    name = f"{EMPTY_CONSTANT}/{ROOT_NAME}"
    dims = [f"d{i}" for i in range(len(shape))]
    build = _geometry(EMPTY_CONSTANT, shape=shape, dimension_names=dims)
    return lambda good: put_together(edit_document(take_apart(build(good)), name, grid))


def with_shape(array: str, shape: tuple[int, ...]) -> Builder:
    """Another shape in document and identity; the records follow, the data don't."""
    return with_parts(lambda parts: edit_shape(parts, array, shape))


def _shape(array: str, *shape: int) -> Builder:
    return with_shape(array, shape)


def _without_samples(good: bytes) -> list[Part]:
    """The constants of the store and the array of samples without elements."""
    parts = edit_identity(take_apart(good), lambda identity: [identity["arrays"].pop(n) for n in _SAMPLED])
    return [part for part in parts if part.name.partition("/")[0] not in _SAMPLED]


def _long_documents(good: bytes) -> bytes:
    """Every array has a document of 14 MiB: each is short enough, all together aren't."""
    parts = take_apart(good)
    for name in (LARGE, SMALL, FLAGS, EMPTY, EMPTY_CONSTANT):
        note = "m" * (14 << 20)
        parts = edit_document(parts, f"{name}/{ROOT_NAME}", lambda d, n=note: d["attributes"].update(note=n))
    return put_together(parts)


def named(old: str, new: str) -> Builder:
    """Another name of an array, everywhere, the entries in the order of the new names."""

    def change(parts: list[Part]) -> list[Part]:
        def identity(document: Document) -> None:
            document["arrays"][new] = document["arrays"].pop(old)
            if old in document["constants"]:
                document["constants"][new] = document["constants"].pop(old)

        def rename(part: Part) -> Part:
            first, _, rest = part.name.partition("/")
            return replace(part, name=f"{new}/{rest}") if first == old and rest else part

        parts = [rename(part) for part in edit_identity(parts, identity)]
        return [
            parts[0],
            *sorted(parts[1:], key=lambda part: (not part.name.endswith("json"), _array_of(part))),
        ]

    return with_parts(change)


def _array_of(part: Part) -> str:
    name = part.name.removesuffix(f"/{ROOT_NAME}")
    return name.partition("/c")[0]


def with_empty_arrays(num: int) -> Builder:
    """A store of that many arrays and one: copies of the array without elements beside the others."""

    def change(parts: list[Part]) -> list[Part]:
        document = next(part.data for part in parts if part.name == f"{EMPTY}/{ROOT_NAME}")
        names = [f"a{i:04}" for i in range(num - 6)]
        extra = [Part(f"{name}/{ROOT_NAME}", document) for name in names]

        def identity(content: Document) -> None:
            content["arrays"] |= dict.fromkeys(names, content["arrays"][EMPTY])

        root, *others = edit_identity(parts, identity)
        return [root, *extra, *others]

    return with_parts(change)


def _huge(good: bytes) -> bytes:
    """2^40 samples in metadata, identity, hash and directory; only the length of the file knows better."""
    parts, samples = take_apart(good), 1 << 40
    for array in (LARGE, SMALL, FLAGS, EMPTY):
        shape = read_document(parts, f"{array}/{ROOT_NAME}")["shape"]
        parts = edit_shape(parts, array, (samples, *shape[1:]))
    sample_nbytes = {f"{LARGE}/c/0/0/0": 5184 + 16, f"{SMALL}/c/0": 8, f"{FLAGS}/c/0/0": 4}
    claimed = {name: samples * nbytes + 4 for name, nbytes in sample_nbytes.items()}
    return put_together([replace(part, claimed_nbytes=claimed.get(part.name)) for part in parts])


def _small_as_shard(document: Document) -> None:
    inner = [_LITTLE, _CRC32C]
    configuration = {"chunk_shape": [1], "codecs": inner, "index_codecs": inner, "index_location": "end"}
    document["codecs"] = [{"name": "sharding_indexed", "configuration": configuration}]


def _grid(*chunk_shape: int, **values: Any) -> Document:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}, **values}


_KEYS = ["attributes", "chunk_grid", "chunk_key_encoding", "codecs", "data_type", "dimension_names"]
_KEYS += ["fill_value", "node_type", "shape", "zarr_format"]

# Name: values of the document of an array of float64, shape (3,); what is wrong.
_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "zarr_2": ({"zarr_format": 2}, "zarr_format is 2"),
    "group": ({"node_type": "group"}, "node_type is 'group'"),
    "storage_transformers": ({"storage_transformers": []}, "There is the key storage_transformers"),
    "unknown_key": ({"extra": 1}, "There is an unknown key"),
    "attributes_null": ({"attributes": None}, "attributes are null"),
    "attributes_a_list": ({"attributes": []}, "attributes are a list"),
    "attributes_with_ups_store": ({"attributes": {"ups_store": {}}}, "attributes have the key ups_store"),
    "attributes_with_ups_store_null": (
        {"attributes": {"ups_store": None}},
        "attributes have the key ups_store",
    ),
    "shape_null": ({"shape": None}, "shape is null"),
    "shape_a_number": ({"shape": 3}, "shape is a number"),
    "shape_of_null": ({"shape": [None]}, "A length is null"),
    "shape_of_strings": ({"shape": ["3"]}, "A length is a string"),
    "shape_of_booleans": ({"shape": [True]}, "A length is true"),
    "shape_of_fractions": ({"shape": [3.5]}, "A length is a fraction"),
    "shape_negative": ({"shape": [-3]}, "A length is negative"),
    "shape_beyond_2_53": ({"shape": [9007199254740993]}, "A length is 2^53 + 1"),
    "shape_of_2_60": ({"shape": [1 << 60]}, "A length is 2^60"),
    "shape_of_2_64": ({"shape": [1 << 64]}, "A length is 2^64"),
    "shape_of_lists": ({"shape": [[3]]}, "A length is a list"),
    "chunk_grid_null": ({"chunk_grid": None}, "chunk_grid is null"),
    "chunk_grid_of_another_name": ({"chunk_grid": _grid(3, name="rectangular")}, "The grid isn't regular"),
    "chunk_grid_with_another_key": ({"chunk_grid": _grid(3, extra=1)}, "The grid has another key"),
    "chunk_shape_of_two_chunks": ({"chunk_grid": _grid(2)}, "The array is two chunks"),
    "chunk_shape_longer": ({"chunk_grid": _grid(4)}, "The chunk is longer than the array"),
    "chunk_keys_with_dots": (
        {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}}},
        "The separator is a dot",
    ),
    "chunk_keys_of_zarr_2": (
        {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "/"}}},
        "Chunk keys are those of Zarr 2",
    ),
    "chunk_keys_without_separator": (
        {"chunk_key_encoding": {"name": "default"}},
        "The separator isn't named",
    ),
    "fill_value_1": ({"fill_value": 1}, "fill_value is 1"),
    "fill_value_null": ({"fill_value": None}, "fill_value is null"),
    "fill_value_false_for_numbers": ({"fill_value": False}, "fill_value is false for numbers"),
    "fill_value_nan": ({"fill_value": "NaN"}, "fill_value is 'NaN'"),
    "codecs_null": ({"codecs": None}, "codecs are null"),
    "codecs_empty": ({"codecs": []}, "There are no codecs"),
    "codec_unknown": ({"codecs": [{"name": "zfpy"}, _CRC32C]}, "A codec is unknown"),
    "codec_compresses": ({"codecs": [_LITTLE, _GZIP, _CRC32C]}, "The chunk is compressed"),
    "codec_big_endian": ({"codecs": [_BIG, _CRC32C]}, "Numbers are big-endian"),
    "codec_without_endian": ({"codecs": [{"name": "bytes"}, _CRC32C]}, "The order of bytes isn't named"),
    "codec_transposes": (
        {"codecs": [{"name": "transpose", "configuration": {"order": [0]}}, _LITTLE, _CRC32C]},
        "There is a transpose codec",
    ),
    "codec_without_checksum": ({"codecs": [_LITTLE]}, "crc32c is missing"),
    "codec_with_checksum_twice": ({"codecs": [_LITTLE, _CRC32C, _CRC32C]}, "crc32c is there twice"),
    "codec_of_a_short_name": ({"codecs": [_LITTLE, "crc32c"]}, "A codec is a string"),
    "codec_with_empty_configuration": (
        {"codecs": [_LITTLE, {"name": "crc32c", "configuration": {}}]},
        "crc32c has an empty configuration",
    ),
    "dtype_null": ({"data_type": None}, "data_type is null"),
    "dtype_unknown": ({"data_type": "complex64"}, "data_type is complex64"),
    "dtype_of_raw_bits": ({"data_type": "r64"}, "data_type is r64"),
    "dtype_of_python_objects": ({"data_type": "object"}, "data_type is object"),
    "dtype_of_numpy": ({"data_type": "<f8"}, "data_type is NumPy's"),
    "dtype_an_object": ({"data_type": {"name": "float64"}}, "data_type is an object"),
    "dtype_a_list": ({"data_type": ["float64"]}, "data_type is a list"),
    "dtype_in_capitals": ({"data_type": "Float64"}, "data_type has a capital"),
    "dtype_other_than_identity": ({"data_type": "int64"}, "data_type isn't that of the identity"),
    "dims_null": ({"dimension_names": None}, "dimension_names are null"),
    "dims_of_null": ({"dimension_names": [None]}, "A dimension has no name"),
    "dims_too_few": ({"dimension_names": []}, "There are fewer names than axes"),
    "dims_too_many": ({"dimension_names": ["sample", "x"]}, "There are more names than axes"),
    "dims_a_string": ({"dimension_names": "sample"}, "dimension_names are a string"),
    "dims_of_numbers": ({"dimension_names": [1]}, "A name is a number"),
}

_CLAUSES = {
    "dtype_unknown": "4.7",
    "dtype_of_raw_bits": "4.7",
    "dtype_of_python_objects": "4.7",
    "dtype_of_numpy": "4.7",
    "dtype_an_object": "4.7",
    "dtype_in_capitals": "4.7",
    "dtype_other_than_identity": "8.1",
}

# Name: name of a dimension, what is wrong.
_DIMENSIONS = {
    "with_a_zero": ("t\0", "has U+0000"),
    "with_an_escape": ("\x1b[31mt", "has U+001B"),
    "with_a_delete": ("t\x7f", "has U+007F"),
    "with_a_next_line": ("t\x85", "has U+0085"),
    "of_257_bytes": ("t" + "\u00fc" * 128, "has 257 bytes"),
}

ARRAYS: dict[str, Defect] = {
    **{f"array_without_{key}": Defect("4.4", f"{key} is missing.", _without(key)) for key in _KEYS},
    **{
        f"array_{name}": Defect(_CLAUSES.get(name, "4.4"), f"{why}.", _doc(**values))
        for name, (values, why) in _VALUES.items()
    },
    "array_fill_value_0_for_bool": Defect(
        "4.4", "fill_value is 0 for bool.", _doc(f"{FLAGS}/{ROOT_NAME}", fill_value=0)
    ),
    "array_endian_for_bool": Defect(
        "4.4",
        "The codec of a one-byte type names an order of bytes.",
        _doc(f"{FLAGS}/{ROOT_NAME}", codecs=[_LITTLE, _CRC32C]),
    ),
    "array_chunk_shape_0": Defect(
        "4.4",
        "An array without elements has chunks of length 0.",
        _doc(f"{EMPTY}/{ROOT_NAME}", chunk_grid=_grid(3, 0)),
    ),
    "small_array_in_a_shard": Defect(
        "5.1", "A small array is a shard.", with_document(SMALL_ARRAY, _small_as_shard)
    ),
    "large_array_without_shard": Defect(
        "5.1", "A large array is a plain chunk.", _doc(LARGE_ARRAY, codecs=[_LITTLE, _CRC32C])
    ),
    "shard_with_checksum": Defect(
        "4.4",
        "crc32c follows the sharding codec.",
        with_document(LARGE_ARRAY, lambda array: array["codecs"].append(_CRC32C)),
    ),
    "inner_chunk_of_two_samples": Defect(
        "4.4", "An inner chunk holds two samples.", _codec(chunk_shape=[2, 40, 32])
    ),
    "inner_chunk_of_half_a_sample": Defect(
        "4.4", "An inner chunk holds half a sample.", _codec(chunk_shape=[1, 20, 32])
    ),
    "inner_chunk_without_checksum": Defect("4.4", "Inner chunks have no checksum.", _codec(codecs=[_LITTLE])),
    "inner_chunk_compressed": Defect(
        "4.4", "Inner chunks are compressed.", _codec(codecs=[_LITTLE, _GZIP, _CRC32C])
    ),
    "index_at_start": Defect("4.4", "The index stands at the start.", _codec(index_location="start")),
    "index_location_missing": Defect(
        "4.4", "The place of the index isn't named.", _sharding(lambda codec: codec.pop("index_location"))
    ),
    "index_compressed": Defect(
        "4.4", "The index is compressed.", _sharding(lambda codec: codec["index_codecs"].append(_GZIP))
    ),
    "index_without_checksum": Defect("4.4", "The index has no checksum.", _codec(index_codecs=[_LITTLE])),
    "index_big_endian": Defect("4.4", "The index is big-endian.", _codec(index_codecs=[_BIG, _CRC32C])),
    "dimension_name_twice": Defect(
        "4.5", "A dimension name is there twice.", _geometry(LARGE, dimension_names=["sample", "x", "x"])
    ),
    "dimension_name_empty": Defect(
        "4.5", "A dimension name is empty.", _geometry(LARGE, dimension_names=["sample", "", "x"])
    ),
    **{
        f"dimension_name_{name}": Defect(
            "4.5", f"A dimension name {why}.", _geometry(LARGE, dimension_names=["sample", value, "x"])
        )
        for name, (value, why) in _DIMENSIONS.items()
    },
    "dimension_sample_not_first": Defect(
        "4.5", "The second dimension is sample.", _geometry(LARGE, dimension_names=["time", "sample", "x"])
    ),
    "dimension_sample_twice": Defect(
        "4.5", "Two dimensions are sample.", _geometry(LARGE, dimension_names=["sample", "sample", "x"])
    ),
    "number_of_samples_differs": Defect("4.5", "An array has a sample more.", _shape(SMALL, 4)),
    "dimension_lengths_differ": Defect("4.5", "A dimension has two lengths.", _shape(LARGE, 3, 20, 64)),
    "shape_larger_than_data": Defect(
        "5.6", "The data entry is shorter than the shape says.", _shape(FLAGS, 3, 8)
    ),
    "shape_smaller_than_data": Defect(
        "5.6", "The data entry is longer than the shape says.", _shape(FLAGS, 3, 2)
    ),
    "shape_huge_everywhere": Defect(
        "7.1", "All metadata say 2^40 samples, the file doesn't hold them.", _huge
    ),
    "axes_33": Defect("9.1", "An array has 33 axes.", _empty_constant([0] + [1] * 32)),
    "length_2_53": Defect("9.1", "An axis has a length of 2^53.", _empty_constant([0, 1 << 53])),
    "elements_2_60": Defect(
        "9.1",
        "An array has 2^60 elements, axes of length 0 counted as 1.",
        _empty_constant([0, 1 << 30, 1 << 30]),
    ),
    "product_2_64": Defect("9.1", "The number of elements is 0 modulo 2^64.", _empty_constant([1 << 16] * 4)),
    "arrays_4097": Defect("9.1", "There are 4097 arrays.", with_empty_arrays(4097)),
    "samples_without_bytes_2_24_plus_1": Defect(
        "9.1",
        "There are 2^24 + 1 samples, and none has a byte.",
        lambda good: _shape(EMPTY, (1 << 24) + 1, 0)(put_together(_without_samples(good))),
    ),
    "documents_over_64_mib": Defect("9.1", "All documents together have 70 MiB.", _long_documents),
}

_NAMES: dict[str, str] = {
    "empty": "",
    "with_two_underscores": "__nu",
    "with_a_dot_first": ".nu",
    "with_a_dash_first": "-nu",
    "zarr_json": "zarr.json",
    "parent": "..",
    "with_a_slash": "n/u",
    "with_a_backslash": "n\\u",
    "with_a_space": "n u",
    "with_an_umlaut": "n\u00fc",
    "with_a_line_feed": "nu\n",
    "with_a_zero": "nu\0",
    "of_129_characters": "n" * 129,
    "out_of_the_folder": "../nu",
}
NAMES: dict[str, Defect] = {
    f"name_{name}": Defect("4.2", f"An array is named {value[:12]!r}.", named(SMALL, value))
    for name, value in _NAMES.items()
}
