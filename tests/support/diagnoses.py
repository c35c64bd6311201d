"""What `doctor` says to each file of the conformance corpus: to most files of a folder, and to the others."""

from __future__ import annotations

from ups_store.check.doctor import Status

USUAL = {
    "building": Status.RESUMABLE,
    "damaged": Status.DAMAGED,
    "newer": Status.TOO_NEW,
    "packed": Status.PACKED_DAMAGED,
    "ragged": Status.METADATA_DAMAGED,
    "refused/array": Status.METADATA_DAMAGED,
    "refused/directory": Status.DAMAGED,
    "refused/end": Status.DAMAGED,
    "refused/root": Status.IDENTITY_LOST,
    "refused/text": Status.METADATA_DAMAGED,
    "valid": Status.COMPLETE,
}

_OTHERS = {
    ("building", Status.TORN_TAIL): """
        a_byte_longer a_byte_shorter a_page_longer cut_at_the_tail tail_arrays tail_build_id
        tail_checksum tail_flags tail_length tail_magic tail_of_zeros tail_reserved tail_samples
        tail_version
    """,
    (
        "building",
        Status.METADATA_DAMAGED,
    ): "array_header array_of_another_name crc cut_in_root root_header size_2_60",
    ("building", Status.PACKED_DAMAGED): "packed",
    ("building", Status.TRUNCATED): "cut_in_data",
    ("building", Status.FOREIGN): "empty zeros",
    ("building", Status.FINISHED_NOT_RENAMED): "finished",
    (
        "building",
        Status.DAMAGED,
    ): "finished_with_another_header finished_with_another_record finished_without_end",
    ("building", Status.TOO_NEW): "finished_newer_minor newer_minor",
    ("packed", Status.PACKED): "blosc partition pcodec without_data",
    ("packed", Status.TOO_NEW): "refused_newer_minor",
    ("ragged", Status.COMPLETE): """
        bytes chunks_without_fill flags name_of_120_characters neighbours no_rows no_samples
        points_and_text rows_over_64_kib several_chunks
    """,
    ("ragged", Status.DAMAGED): """
        damaged_checksum_of_sample damaged_checksum_of_sample_without_rows damaged_chunk_of_checksums
        damaged_chunk_of_offsets damaged_first_byte_of_fill damaged_index damaged_index_checksum
        damaged_last_byte_of_fill damaged_offsets_and_bool damaged_offsets_and_checksum_of_sample
        damaged_offsets_and_fill damaged_offsets_and_index damaged_offsets_begin_with_1
        damaged_offsets_end_early
        damaged_offsets_end_late damaged_offsets_fall damaged_offsets_negative
        damaged_offsets_of_other_samples damaged_rows damaged_text_cut_in_a_character
        damaged_text_not_utf_8 damaged_text_of_a_surrogate
    """,
    ("ragged", Status.IDENTITY_LOST): """
        refused_companion_in_identity refused_identity_of_no_ragged_array
        refused_identity_with_another_tail refused_identity_with_null_second
        refused_identity_with_number_of_rows refused_identity_with_two_nulls
        refused_identity_without_sample refused_not_required
    """,
    ("refused/array", Status.IDENTITY_LOST): """
        array_dtype_other_than_identity arrays_4097 name_empty name_of_129_characters
        name_out_of_the_folder name_parent name_with_a_backslash name_with_a_dash_first
        name_with_a_dot_first name_with_a_line_feed name_with_a_slash name_with_a_space name_with_a_zero
        name_with_two_underscores name_zarr_json
    """,
    ("refused/array", Status.TRUNCATED): "shape_huge_everywhere",
    ("refused/array", Status.DAMAGED): "shape_larger_than_data shape_smaller_than_data",
    ("refused/directory", Status.METADATA_DAMAGED): """
        consolidated_metadata_entry data_before_documents data_beside_documents document_missing
        documents_aligned documents_not_sorted gap_before_metadata root_not_first
    """,
    (
        "refused/directory",
        Status.TRUNCATED,
    ): "data_missing data_not_aligned data_not_sorted key_without_chunk_coordinates",
    ("refused/end", Status.METADATA_DAMAGED): "bytes_before_the_start",
    ("refused/end", Status.FOREIGN): """
        directory_too_long empty_file end_record_cut_short entry_of_another_name file_of_127_bytes
        hdf5_renamed only_end_records text_file zarr_zip_of_zarr_python zeros
        zip_of_another_program
    """,
    ("refused/end", Status.TRUNCATED): """
        truncated_before_central_record_of_zarr truncated_before_zip64_end truncated_in_comment
        truncated_in_data_of_u_c_0_0_0
    """,
    ("refused/root", Status.TOO_NEW): """
        newer_minor_requiring_a_feature newer_minor_with_an_entry_between newer_minor_with_data_missing
        requires_64_unknown_features requires_an_unknown_feature version_10_0 version_2_0
    """,
    ("refused/root", Status.METADATA_DAMAGED): "newer_minor_with_another_array_key",
    ("refused/text", Status.IDENTITY_LOST): """
        crc_of_root_document depth_of_100000_in_identity depth_of_101_in_identity key_twice_in_identity
        lone_surrogate_in_identity lone_surrogate_in_root_attributes newline_in_root
        page_of_spaces_behind_root space_behind_root
        number_in_identity_exponent_without_sign number_in_identity_infinity
        number_in_identity_integer_with_fraction number_in_identity_minus_zero number_in_identity_nan
        number_in_root_attributes_exponent_without_sign number_in_root_attributes_infinity
        number_in_root_attributes_integer_with_fraction number_in_root_attributes_minus_zero
        number_in_root_attributes_nan root_of_16_mib_and_a_byte space_in_identity
    """,
}
OTHERS = {f"{folder}/{name}": status for (folder, status), names in _OTHERS.items() for name in names.split()}


def diagnosis_of(file: str) -> Status:
    """The status of a file of the corpus by its path there."""
    folder, _, name = file.rpartition("/")
    return OTHERS.get(f"{folder}/{name.partition('.')[0]}", USUAL[folder])
