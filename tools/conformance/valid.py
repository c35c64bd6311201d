"""Valid mapped stores: every feature and every edge of the geometry (spec 1 to 5, 8 to 10)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ups_store
from tools.conformance.archive import data_offset, hash_of, with_identity
from tools.conformance.array_documents import named, with_empty_arrays, with_shape
from tools.conformance.case import Case
from tools.conformance.sample_store import SMALL, sample_store
from tools.conformance.texts import nested, with_attribute, with_content, with_title
from ups_store.format.metadata import DTYPE_NAMES, dtype_of

Values = Mapping[str, npt.NDArray[Any]]


def make(
    varying: Values,
    constants: Values | None = None,
    *,
    dims: Mapping[str, tuple[str, ...]] | None = None,
    content: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> bytes:
    """A store of these values, those in `varying` with the sample axis first."""
    dims = dims or {}
    specs = {
        name: ups_store.ArraySpec(value.shape, str(value.dtype), dims=dims.get(name))
        for name, value in varying.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        writer = ups_store.create(
            Path(folder) / "a.zarr.zip",
            specs,
            constants=constants or {},
            dims={name: dims[name] for name in constants or {} if name in dims},
            identity=content or {},
            attrs=attrs or {},
            durability="lazy",
        )
        with writer:
            if writer.num_samples:
                writer.commit_many(range(writer.num_samples), dict(varying))
            return writer.finish().read_bytes()


def pattern(dtype: str, *shape: int) -> npt.NDArray[Any]:
    """Values that differ from their neighbours and repeat after 61 elements; finite ones."""
    values = np.arange(math.prod(shape)) % 61
    return (values % 2 if dtype == "bool" else values).astype(dtype_of(dtype)).reshape(shape)


def digests(*groups: Values | None) -> dict[str, str]:
    """sha256 of each array's bytes."""
    return {name: hash_of(value.tobytes()) for group in groups if group for name, value in group.items()}


def case(name: str, why: str, varying: Values, constants: Values | None = None, **options: Any) -> Case:
    raw = make(varying, constants, **options)
    return Case(
        f"valid/{name}.zarr.zip",
        raw,
        why,
        verify="ok",
        digests=digests(varying, constants),
        has_fingerprint=True,
    )


def cases() -> list[Case]:
    """All of them."""
    return [*_contents(), *_geometries(), *_edited()]


def _contents() -> list[Case]:
    every_dtype = {f"a_{dtype}": pattern(dtype, 2, 3) for dtype in DTYPE_NAMES}
    in_slots = {f"a_{dtype}": pattern(dtype, 2, 4096) for dtype in ("bool", "bfloat16", "float32", "int64")}
    names = ["u", "u-b", "u.b", "u_b", "u0", "U", "0u", "_u", "u-", "u.", "u.b-c", "uu"]
    a_float = pattern("float32", 3)
    return [
        case("smallest", "One int8 sample: the first dump of section 12.", {"u": np.array([7], np.int8)}),
        case("no_arrays", "No arrays at all.", {}, attrs={"title": "no arrays"}),
        case("only_constants", "Constants only, so no samples.", {}, {"x": pattern("float64", 5)}),
        case("scalar_constant", "A constant without axes.", {"u": a_float}, {"length": np.array(0.5)}),
        case(
            "constant_over_4_kib",
            "A constant of 8 KiB, one chunk.",
            {"u": a_float},
            {"x": pattern("float64", 1024)},
        ),
        case(
            "constants_without_elements",
            "Constants without elements: no data entries, but digests.",
            {"u": a_float},
            {"x": np.zeros(0), "y": np.zeros((3, 0), np.int8)},
        ),
        case("every_dtype", "Every data type, small arrays.", every_dtype),
        case("every_size_in_slots", "Data types of 1, 2, 4 and 8 bytes in slots.", in_slots),
        case(
            "no_samples",
            "N = 0: a large array, small ones and a constant; the large one says sharding_indexed.",
            {"u": np.zeros((0, 40, 32), np.float32), "nu": np.zeros(0), "e": np.zeros((0, 0), np.int16)},
            {"x": pattern("float64", 3)},
        ),
        case(
            "samples_without_elements",
            "Samples of 0 elements beside others.",
            {"a": np.zeros((3, 0), np.int16), "b": np.zeros((3, 4, 0, 5)), "u": a_float},
        ),
        case(
            "sorted_by_name",
            "Names with '-' and '.', whose order isn't that of the names of their entries (2.2).",
            {name: pattern("int16", 3) + i for i, name in enumerate(names)},
        ),
        case(
            "dimensions",
            "Dimension names that several arrays share, and one beyond ASCII.",
            {"u": pattern("float32", 3, 4, 5), "v": pattern("float32", 3, 5)},
            {"x": pattern("float64", 5), "m": pattern("int8", 5, 4)},
            dims={
                "u": ("sample", "h\u00f6he", "x"),
                "v": ("sample", "x"),
                "x": ("x",),
                "m": ("x", "h\u00f6he"),
            },
        ),
        case(
            "dimension_of_256_bytes",
            "The longest name of a dimension: 128 umlauts.",
            {"u": pattern("float32", 3, 2)},
            dims={"u": ("sample", "\u00fc" * 128)},
        ),
        case(
            "attributes",
            "Attributes with every kind of value, keys sorted by UTF-16 code units.",
            {"u": a_float},
            attrs={
                "numbers": [
                    0,
                    -1,
                    0.1,
                    1e21,
                    1e-7,
                    5e-324,
                    1.7976931348623157e308,
                    123456789012345.6,
                    2**53 - 1,
                ],
                "strings": ["", '"\\\b\t\n\f\r\0\x1f\x7f', "/\u2028\u2029", "\u00fc\U0001f600\ufb33"],
                "keys": {"": 0, "\U0001f600": 1, "\ufb33": 2, "\u20ac": 3, "\r": 4, "1": 5, "a": 6, "A": 7},
                "others": [None, True, False, {}, [], [[]]],
            },
            content={"deep": {"a": [1, {"b": None}]}, "\ufb33": 1, "\U0001f600": 2},
        ),
        case(
            "root_of_two_pages",
            "A root document of 9000 bytes.",
            {"u": a_float},
            content={"text": "config " * 1250},
        ),
    ]


def _geometries() -> list[Case]:
    boundaries = {
        f"s{nbytes}": pattern("uint8", 2, nbytes) for nbytes in (4092, 4095, 4096, 4156, 4157, 4220)
    }
    found = [
        case(
            "slot_sizes", "Samples around 4096 bytes, and chunks that fill their slots exactly.", boundaries
        ),
        case(
            "slots_of_pages",
            "Samples of a byte less than 1 MiB, of 1 MiB, and chunks of exactly 257 pages.",
            {f"s{nbytes}": pattern("uint8", 1, nbytes) for nbytes in (2**20 - 1, 2**20, 257 * 4096 - 4)},
        ),
        case(
            "slots_of_pages_twice",
            "Two samples of 1 MiB, each on a page.",
            {"u": pattern("float32", 2, 512, 512)},
        ),
        case("many_small_samples", "10000 samples of a small array.", {"u": pattern("float32", 10_000)}),
        case("axes_32", "A constant with 32 axes.", {}, {"x": pattern("int8", 2, *[1] * 30, 3)}),
        case(
            "length_2_53_minus_1",
            "An axis of the greatest length, and no elements.",
            {},
            {"x": np.zeros((0, 2**53 - 1), np.int8)},
        ),
    ]
    for at, why in (
        (0, "Data that are aligned without padding."),
        (4090, "Padding without zeros."),
        (4091, "Padding that takes a whole page more."),
        (4095, "Padding that takes nearly a page more."),
    ):
        found.append(_padded(at, why))
    return found


def _padded(at: int, why: str) -> Case:
    """A store whose first data entry has a plain local header that ends at `at` modulo 4096."""
    values = {"u": pattern("int16", 3)}
    plain = _plain_end(make(values, attrs={"title": ""}))
    title = "t" * ((at - plain) % 4096)
    assert _plain_end(make(values, attrs={"title": title})) % 4096 == at
    return case(f"padding_at_{at}", why, values, attrs={"title": title})


def _plain_end(raw: bytes) -> int:
    at = raw.index(b"PK\3\4", raw.index(b"u/zarr.json") + 11)
    assert raw[at + 30 : at + 35] == b"u/c/0"
    assert data_offset(raw, "u/c/0") % 4096 == 0
    return at + 55


def _edited() -> list[Case]:
    """The sample store, and what is made of it by an edit that changes no payload."""
    good, values, constants = sample_store()
    answers = digests(values, constants)

    def edited(name: str, why: str, raw: bytes, **changes: Any) -> Case:
        file = f"valid/{name}.zarr.zip"
        options = {"verify": "ok", "digests": answers, "has_fingerprint": True, **changes}
        return Case(file, raw, why, **options)

    long_name = "n" * 128
    renamed = {long_name if name == SMALL else name: digest for name, digest in answers.items()}
    many = {**answers, "a0000": hash_of(b""), "a4089": hash_of(b"")}
    return [
        edited("sample", "The store that the broken files are made from.", good),
        edited("title_null", "A title of null.", with_title(b"null")(good)),
        edited("depth_of_100", "Attributes nested as deep as allowed.", with_attribute(nested(98))(good)),
        edited(
            "depth_of_100_in_identity",
            "An identity nested as deep as allowed.",
            with_content(nested(95))(good),
        ),
        edited("name_of_128_characters", "The longest name.", named(SMALL, long_name)(good), digests=renamed),
        edited("arrays_4096", "As many arrays as allowed.", with_empty_arrays(4096)(good), digests=many),
        edited("document_of_16_mib", "A document as long as allowed.", _with_long_document(good)),
        *(
            edited(
                f"part-{number:05}-of-00002",
                "A partition of two.",
                with_identity(lambda identity, number=number: identity.update(partition=[number, 2]))(good),
            )
            for number in range(2)
        ),
        edited(
            "partition_99998_of_99999",
            "The last of as many partitions as allowed.",
            with_identity(lambda identity: identity.update(partition=[99_998, 99_999]))(good),
        ),
        Case(
            "valid/samples_without_bytes_2_24.zarr.zip",
            with_shape("a", (1 << 24, 0))(make({"a": np.zeros((0, 0), np.int8)})),
            "As many samples as allowed where none has a byte.",
            verify="ok",
            has_fingerprint=True,
        ),
    ]


def _with_long_document(good: bytes) -> bytes:
    """The document of an array has 16 MiB."""
    short = with_attribute(b'""')(good)
    at = data_offset(short, f"{SMALL}/zarr.json")
    end = short.index(b"PK\3\4", at)
    return with_attribute(b'"' + b"m" * (2**24 - (end - at)) + b'"')(good)
