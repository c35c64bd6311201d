"""Files whose `zarr.json` texts aren't canonical in form (spec 4.1), checksums and hash those of the text."""

from __future__ import annotations

from collections.abc import Callable

from tools.conformance.archive import Builder, data_offset, overwrite, with_data, with_root_text
from tools.conformance.defect import Defect
from tools.conformance.records import SMALL_ARRAY
from ups_store.format.zip_records import ROOT_NAME

_UNITS = b'"m2 s-1"'
_MIB = 1 << 20
CLAUSE = "4.1"


def with_attribute(text: bytes) -> Builder:
    """Another text in place of the value of the array's attribute `units`."""
    return with_data(SMALL_ARRAY, lambda raw: raw.replace(_UNITS, text))


def with_content(text: bytes) -> Builder:
    """Another text in place of the value of `task` in the identity's content."""
    return with_root_text(b'"task":"sample"', b'"task":' + text)


def with_title(text: bytes) -> Builder:
    """Another text in place of the value of the root's attribute `title`."""
    return with_root_text(b'"title":"sample"', b'"title":' + text)


def nested(depth: int, inner: bytes = b"0") -> bytes:
    """Text of a list in a list in a list."""
    return b"[" * depth + inner + b"]" * depth


def _text(edit: Callable[[bytes], bytes]) -> Builder:
    return with_data(SMALL_ARRAY, edit)


def _flipped(name: str) -> Builder:
    """Change a byte of a metadata entry; its CRC-32 stays."""

    def build(good: bytes) -> bytes:
        at = data_offset(good, name) + 100
        return overwrite(good, at, "B", good[at] ^ 1)

    return build


WHOLE_TEXTS: dict[str, Defect] = {
    "crc_of_root_document": Defect("3.2", "A byte of the root's document is flipped.", _flipped(ROOT_NAME)),
    "crc_of_array_document": Defect(
        "3.2", "A byte of an array's document is flipped.", _flipped(SMALL_ARRAY)
    ),
    "document_cut": Defect(CLAUSE, "The last brace is missing.", _text(lambda raw: raw[:-1])),
    "document_empty": Defect(CLAUSE, "The text is empty.", _text(lambda raw: b"")),
    "document_a_list": Defect(CLAUSE, "The document is a list.", _text(lambda raw: b"[]")),
    "document_a_number": Defect(CLAUSE, "The document is a number.", _text(lambda raw: b"0")),
    "document_null": Defect(CLAUSE, "The document is null.", _text(lambda raw: b"null")),
    "document_twice": Defect(CLAUSE, "A second document follows.", _text(lambda raw: raw + raw)),
    "brace_too_many": Defect(CLAUSE, "A brace follows the document.", _text(lambda raw: raw + b"}")),
    "space_behind_document": Defect(CLAUSE, "A space follows the document.", _text(lambda raw: raw + b" ")),
    "newline_behind_document": Defect(
        CLAUSE, "A line feed follows the document.", _text(lambda raw: raw + b"\n")
    ),
    "zero_behind_document": Defect(
        CLAUSE, "A zero byte follows the document.", _text(lambda raw: raw + b"\0")
    ),
    "space_before_document": Defect(CLAUSE, "A space precedes the document.", _text(lambda raw: b" " + raw)),
    "space_behind_root": Defect(
        CLAUSE, "A space follows the root's document.", with_data(ROOT_NAME, lambda raw: raw + b" ")
    ),
    "page_of_spaces_behind_root": Defect(
        CLAUSE, "4096 spaces follow the root's document.", with_data(ROOT_NAME, lambda raw: raw + b" " * 4096)
    ),
    "byte_order_mark": Defect(
        CLAUSE, "The text begins with a byte order mark.", _text(lambda raw: b"\xef\xbb\xbf" + raw)
    ),
    "utf_16": Defect(CLAUSE, "The text is UTF-16.", _text(lambda raw: raw.decode().encode("utf-16"))),
    "not_utf_8": Defect(CLAUSE, "A string is in Latin-1.", with_attribute(b'"m\xb2 s-1"')),
    "utf_8_overlong": Defect(
        CLAUSE, "A character has more bytes than it needs.", with_attribute(b'"\xc1\xa1"')
    ),
    "utf_8_of_a_surrogate": Defect(
        CLAUSE, "UTF-8 of half a surrogate pair.", with_attribute(b'"\xed\xa0\x80"')
    ),
    "utf_8_of_both_surrogates": Defect(
        CLAUSE, "A character as UTF-8 of its surrogate pair.", with_attribute(b'"\xed\xa0\xbd\xed\xb8\x80"')
    ),
    "utf_8_beyond_unicode": Defect(
        CLAUSE, "UTF-8 of a code point beyond U+10FFFF.", with_attribute(b'"\xf4\x90\x80\x80"')
    ),
    "space_behind_a_colon": Defect(
        CLAUSE, "A space follows a colon.", _text(lambda raw: raw.replace(b":", b": ", 1))
    ),
    "space_behind_a_comma": Defect(
        CLAUSE, "A space follows a comma.", _text(lambda raw: raw.replace(b",", b", ", 1))
    ),
    "tab_before_a_colon": Defect(
        CLAUSE, "A tab precedes a colon.", _text(lambda raw: raw.replace(b":", b"\t:", 1))
    ),
    "newline_in_root": Defect(
        CLAUSE,
        "A line feed follows the root's first brace.",
        with_data(ROOT_NAME, lambda raw: b"{\n" + raw[1:]),
    ),
    "space_in_identity": Defect(CLAUSE, "A space stands in the identity.", with_content(b' "sample"')),
    "no_break_space": Defect(
        CLAUSE, "A no-break space follows a colon.", with_attribute(b"\xc2\xa0" + _UNITS)
    ),
    "keys_not_sorted": Defect(
        CLAUSE,
        "The last key is the first.",
        _text(lambda raw: b'{"zarr_format":3,' + raw[1:].replace(b',"zarr_format":3', b"")),
    ),
    "key_twice": Defect(CLAUSE, "A key is there twice.", _text(lambda raw: raw[:-1] + b',"zarr_format":3}')),
    "key_twice_in_attributes": Defect(
        CLAUSE, "A key of an object in the attributes is there twice.", with_attribute(b'{"a":1,"a":1}')
    ),
    "key_twice_in_identity": Defect(
        CLAUSE, "A key of the identity is there twice.", with_content(b'"sample","task":"sample"')
    ),
    "inner_keys_not_sorted": Defect(
        CLAUSE, "Keys in the attributes aren't sorted.", with_attribute(b'{"b":1,"a":1}')
    ),
    "longer_key_before_its_prefix": Defect(
        CLAUSE, "A key precedes its own prefix.", with_attribute(b'{"ab":1,"a":1}')
    ),
    "keys_sorted_by_code_point": Defect(
        CLAUSE,
        "U+FF61 precedes U+1F600: sorted by code points, not by UTF-16 code units.",
        with_attribute('{"\uff61":1,"\U0001f600":1}'.encode()),
    ),
    "trailing_comma": Defect(CLAUSE, "A comma follows the last item.", with_attribute(b"[1,]")),
    "missing_comma": Defect(CLAUSE, "A comma is missing.", with_attribute(b"[1 2]")),
    "comment": Defect(CLAUSE, "There is a comment.", with_attribute(b"/**/1")),
    "single_quotes": Defect(CLAUSE, "A string stands in single quotes.", with_attribute(b"'m'")),
    "key_without_quotes": Defect(CLAUSE, "A key has no quotes.", with_attribute(b"{a:1}")),
    "word_in_capitals": Defect(CLAUSE, "true is written True.", with_attribute(b"True")),
    "undefined": Defect(CLAUSE, "A value is undefined.", with_attribute(b"undefined")),
    "depth_of_101": Defect("9.1", "Attributes are nested 101 deep.", with_attribute(nested(99))),
    "depth_of_101_in_identity": Defect("9.1", "The identity is nested 101 deep.", with_content(nested(96))),
    "depth_of_100000": Defect(
        "9.1", "Attributes are nested 100000 deep.", with_attribute(nested(100_000, b""))
    ),
    "depth_of_100000_in_identity": Defect(
        "9.1", "The identity is nested 100000 deep.", with_content(nested(100_000, b""))
    ),
    "document_nested_100000_deep": Defect(
        "9.1", "The document is lists 100000 deep.", _text(lambda raw: nested(100_000, b""))
    ),
    "document_of_16_mib_and_a_byte": Defect(
        "9.1",
        "A document has 16 MiB and a byte.",
        _text(
            lambda raw: raw.replace(_UNITS, b'"' + b"m" * (16 * _MIB + 1 - len(raw) + len(_UNITS) - 2) + b'"')
        ),
    ),
    "root_of_16_mib_and_a_byte": Defect(
        "9.1",
        "The root's document has 16 MiB and a byte.",
        with_data(
            ROOT_NAME,
            lambda raw: raw.replace(
                b'"title":"sample"', b'"title":"' + b"m" * (16 * _MIB + 1 - len(raw) + 6) + b'"'
            ),
        ),
    ),
}

# Name: text of a string, what is wrong.
_STRINGS = {
    "letter_escaped": (rb'"\u006d"', "A letter is escaped"),
    "slash_escaped": (rb'"m\/s"', "A slash is escaped"),
    "delete_escaped": (rb'"\u007f"', "U+007F is escaped"),
    "umlaut_escaped": (rb'"\u00fc"', "A letter beyond ASCII is escaped"),
    "line_separator_escaped": (rb'"\u2028"', "U+2028 is escaped"),
    "pair_escaped": (rb'"\ud83d\ude00"', "A surrogate pair is escaped"),
    "lone_surrogate_escaped": (rb'"\ud800"', "Half of a surrogate pair is escaped"),
    "newline_as_code": (rb'"\u000a"', r"A line feed is \u000a, not \n"),
    "escape_in_capitals": (rb'"\u001F"', r"U+001F is \u001F, not \u001f"),
    "quote_as_code": (rb'"\u0022"', r"A quote is \u0022"),
    "backslash_as_code": (rb'"\u005c"', r"A backslash is \u005c"),
    "control_character": (b'"\x1f"', "U+001F isn't escaped"),
    "newline_in_a_string": (b'"m\n"', "A line feed isn't escaped"),
    "zero_in_a_string": (b'"m\0"', "U+0000 isn't escaped"),
    "unknown_escape": (rb'"\x41"', "An escape is unknown"),
    "vertical_tab": (rb'"\v"', "An escape is one of other languages"),
    "escape_cut": (rb'"\u00"', "An escape has two digits"),
    "string_not_closed": (b'"m', "A string has no end"),
}

# Name: text of a number, what is wrong.
_NUMBERS = {
    "nan": (b"NaN", "NaN"),
    "infinity": (b"Infinity", "an infinity"),
    "minus_infinity": (b"-Infinity", "a negative infinity"),
    "minus_zero": (b"-0", "a negative zero"),
    "fraction_of_zero": (b"0.0", "zero with a fraction"),
    "integer_with_fraction": (b"1.0", "an integer with a fraction"),
    "fraction_ends_in_zero": (b"1.50", "a fraction that ends in 0"),
    "leading_zero": (b"01", "a number with a leading zero"),
    "plus_sign": (b"+1", "a number with a plus sign"),
    "point_at_the_end": (b"1.", "a number that ends with a point"),
    "point_at_the_start": (b".5", "a number that begins with a point"),
    "hexadecimal": (b"0x10", "a hexadecimal number"),
    "exponent_for_a_small_integer": (b"1e+2", "100 as 1e+2"),
    "exponent_of_20": (b"1e+20", "1e+20 with an exponent"),
    "exponent_in_capitals": (b"1E+21", "an E"),
    "exponent_without_sign": (b"1e21", "1e+21 without a sign"),
    "exponent_with_leading_zero": (b"1e+021", "an exponent with a leading zero"),
    "two_digits_before_exponent": (b"10e+21", "two digits before an exponent"),
    "integer_of_22_digits": (b"1000000000000000000000", "1e+21 as an integer"),
    "six_zeros_behind_the_point": (b"0.0000001", "1e-7 without an exponent"),
    "exponent_of_minus_6": (b"1e-6", "0.000001 with an exponent"),
    "zero_before_exponent": (b"0e+21", "a zero with an exponent"),
    "fraction_ends_in_zero_before_exponent": (b"1.50e+21", "a fraction that ends in 0 before an exponent"),
    "exponent_of_309": (b"1e+309", "a number beyond all doubles"),
    "exponent_of_minus_325": (b"1e-325", "a number below all doubles"),
    "rounds_to_infinity": (b"1.8e+308", "a number whose nearest double is infinite"),
    "million_digits": (b"9" * 10**6, "an integer of a million digits"),
}

_IN_ROOT = ("nan", "infinity", "integer_with_fraction", "exponent_without_sign", "minus_zero")

STRINGS: dict[str, Defect] = {
    name: Defect(CLAUSE, f"{why}.", with_attribute(text)) for name, (text, why) in _STRINGS.items()
}
NUMBERS: dict[str, Defect] = {
    **{
        f"number_{name}": Defect(
            CLAUSE, f"A number in the attributes of an array is {why}.", with_attribute(text)
        )
        for name, (text, why) in _NUMBERS.items()
    },
    **{
        f"number_in_identity_{name}": Defect(
            CLAUSE, f"A number in the identity is {_NUMBERS[name][1]}.", with_content(_NUMBERS[name][0])
        )
        for name in _IN_ROOT
    },
    **{
        f"number_in_root_attributes_{name}": Defect(
            CLAUSE,
            f"A number in the root's attributes is {_NUMBERS[name][1]}.",
            with_title(_NUMBERS[name][0]),
        )
        for name in _IN_ROOT
    },
}
STRINGS |= {
    "lone_surrogate_in_identity": Defect(
        CLAUSE, "Half of a surrogate pair in the identity.", with_content(rb'"\ud800"')
    ),
    "lone_surrogate_in_root_attributes": Defect(
        CLAUSE, "Half of a surrogate pair in the root's attributes.", with_title(rb'"\ud800"')
    ),
}
TEXTS: dict[str, Defect] = {**WHOLE_TEXTS, **STRINGS, **NUMBERS}
