"""Checkpoints: safetensors with one JSON document in the header, written atomically; never pickle.

Nothing here needs torch until tensors are saved or loaded, so that a build can identify an encoder cheaply.
A file is 8 bytes of header length (little-endian), a JSON header, then the tensors' bytes, see
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.errors import CheckpointError, OtherTensorsError, OutputError
from ups.output import write_atomically, write_together
from ups.trained.card import KINDS, card_path, model_card
from ups_store.system.paths import check_local

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECKPOINT_VERSION = 1
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_NBYTES = 100_000_000  # as in safetensors
_DTYPES = {  # PyTorch's names, and those of safetensors
    **{"bool": "BOOL", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
    **{f"{sign}int{bits}": f"{sign or 'i'}{bits}".upper() for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
_MOST_NAMED = 5  # tensors in one message
_MOST_SHOWN = 200  # characters of what safetensors says, which may be a tensor's name
_METADATA_KEY = "ups"
# Where shards begin, as PyTorch's distributed checkpoints read it from safetensors files.
_SHARDING_KEY, _OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"
_ALIGN = 8  # bytes, of where tensors begin
_DIGEST_KEY = "tensors_sha256"
_HEADER_DIGEST_KEY = "header_sha256"  # beside the document; files of before 2026-11-27 lack it
_OTHER_TENSORS = "its tensors aren't those that were written"
_HINT = "train again, or copy the file again"
_HOW_TO_MAKE = {"operator": "train it with `ups train`"}  # kinds that one command makes


def save_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    *,
    kind: str,
    document: Mapping[str, Any],
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write tensors and a JSON document; the file appears whole, or the old one stays.

    An exported model (a kind of `ups.trained.card.KINDS`) gets its card beside it, together with the file.

    Args:
        path: Where it goes; the folder is made if missing.
        tensors: By name. Two names may share memory. Only those on a GPU, or with gaps, are copied.
        kind: What the checkpoint is, such as "autoencoder"; `load_checkpoint` asks for it.
        document: JSON values; numbers keep every bit (NaN and infinity included).
        offsets: Where each of them begins in the tensor that it is a shard of, if they are shards.
    """
    check_local(path)
    path = Path(path)
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digest = _digest(own)
    ours = {"version": CHECKPOINT_VERSION, "kind": kind, _DIGEST_KEY: digest}
    header = json.dumps({**ours, "document": dict(document)})
    metadata = {_METADATA_KEY: header}
    if offsets is not None:
        places = {name: {_OFFSETS_KEY: list(offsets[name])} for name in sorted(own)}
        metadata |= {_SHARDING_KEY: json.dumps(places)}
    entries = _entries_of(own)
    metadata |= {_HEADER_DIGEST_KEY: _header_digest(metadata, entries)}
    files: dict[Path, bytes | Callable[[Path], None]] = {
        path: partial(_write_tensors, own, metadata, entries)
    }
    if kind in KINDS:
        num_weights = sum(tensor.numel() for tensor in own.values())
        files[card_path(path)] = _card(path, kind, document, digest, num_weights)
    try:
        write_together(files)
    except OSError as error:
        raise OutputError.of(error, path) from error


def write_card(path: str | os.PathLike[str], *, kind: str) -> None:
    """Write the card of a checkpoint that is there, such as one with a new name."""
    path = Path(path)
    ours = _read_ours(path, kind=kind)
    header, _ = _read_header(path)
    shapes = (entry["shape"] for name, entry in header.items() if name != "__metadata__")
    num_weights = sum(map(math.prod, shapes))
    write_atomically(
        card_path(path), _card(path, kind, ours["document"], str(ours.get(_DIGEST_KEY)), num_weights)
    )


def _card(path: Path, kind: str, document: Mapping[str, Any], digest: str, num_weights: int) -> bytes:
    text = model_card(path.name, kind=kind, document=document, digest=digest, num_weights=num_weights)
    return text.encode()


def load_checkpoint(
    path: str | os.PathLike[str], *, kind: str, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote.

    Returns:
        New tensors on the device by name, and the document.
    """
    ours = _read_ours(path, kind=kind)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _not_ours(path, str(error)) from error
    _check_digest(path, _OTHER_TENSORS, expected=str(ours.get(_DIGEST_KEY)), found=_digest(tensors))
    return {name: tensor.to(device) for name, tensor in tensors.items()}, ours["document"]


def _check_digest(path: str | os.PathLike[str], problem: str, *, expected: str, found: str) -> None:
    if found != expected:
        raise CheckpointError(
            problem,
            kind="damaged",
            path=path,
            expected=f"sha256 {expected}",
            found=found,
            hint=_HINT,
        )


def fill_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, path: str | os.PathLike[str]) -> None:
    """Copy a checkpoint's tensors into the model that its specification describes.

    Args:
        model: Takes all of them, and has no others.
        tensors: By name, as `load_checkpoint` returns them.
        path: Where they are from, for the error.
    """
    problem, own = "its weights aren't those of its specification", model.state_dict()
    check_tensors(tensors, own, path=path, problem=problem)
    dtypes = {
        name: f"{name} {tensor.dtype} and not {own[name].dtype}"
        for name, tensor in sorted(tensors.items())
        if tensor.dtype != own[name].dtype
    }
    if dtypes:
        shown = _some_of([text.replace("torch.", "") for text in dtypes.values()])
        error = OtherTensorsError(f"{problem}: of another dtype {shown}", path=path)
        error.reshaped = tuple(dtypes)
        raise error
    model.load_state_dict(tensors)


def check_tensors(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    path: str | os.PathLike[str],
    problem: str,
) -> None:
    """Fail unless a checkpoint's tensors have the names and shapes that are expected."""
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    common = sorted(expected.keys() & found.keys())
    reshaped = [name for name in common if found[name].shape != expected[name].shape]
    if not (missing or unexpected or reshaped):
        return
    parts = {"missing": missing, "unexpected": unexpected}
    shown = [f"{what} {_some_of(names)}" for what, names in parts.items() if names]
    shapes = [f"{name} {tuple(found[name].shape)} and not {tuple(expected[name].shape)}" for name in reshaped]
    shown += [f"of another shape {_some_of(shapes)}"] if shapes else []
    error = OtherTensorsError(f"{problem}: {'; '.join(shown)}", path=path)
    error.missing, error.unexpected, error.reshaped = tuple(missing), tuple(unexpected), tuple(reshaped)
    raise error


def _some_of(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def read_document(path: str | os.PathLike[str], *, kind: str) -> dict[str, Any]:
    """Read a checkpoint's document without its tensors; needs no torch."""
    document: dict[str, Any] = _read_ours(path, kind=kind)["document"]
    return document


def read_any_document(path: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    """Kind and document of a checkpoint of any kind; needs no torch."""
    ours = _read_ours(path)
    return str(ours["kind"]), ours["document"]


def stored_digest(path: str | os.PathLike[str], *, kind: str) -> str:
    """The sha256 of a checkpoint's tensors that its header says; loading compares it."""
    return str(_read_ours(path, kind=kind).get(_DIGEST_KEY))


def _read_ours(path: str | os.PathLike[str], *, kind: str | None = None) -> dict[str, Any]:
    """What `save_checkpoint` put into the header: version, kind, digest of the tensors, document."""
    check_local(path)
    header, _ = _read_header(Path(path), kind=kind)
    metadata = header.pop("__metadata__", None)
    try:
        ours: dict[str, Any] = json.loads(metadata[_METADATA_KEY])
        if _HEADER_DIGEST_KEY in metadata:
            _check_digest(
                path,
                "its header isn't the one that was written",
                expected=str(metadata[_HEADER_DIGEST_KEY]),
                found=_header_digest(metadata, header),
            )
        version, found = ours["version"], ours["kind"]
        document = ours["document"] = dict(ours["document"])
        fields = all(
            isinstance(document.get(name, {}), dict) for name in ("spec", "config", "report", "data")
        )
        gates = all(
            type(gate["passed"]) is bool and gate["says"].isprintable() for gate in document.get("gates", ())
        )
        if type(version) is not int or (found in KINDS and not (fields and gates)):
            raise TypeError
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _not_ours(path, "the header has no document of ours") from error
    if version > CHECKPOINT_VERSION:
        raise CheckpointError(
            "written by a newer version",
            kind="too_new",
            path=path,
            expected=f"at most {CHECKPOINT_VERSION}",
            found=version,
        )
    if kind is not None and found != kind:
        raise CheckpointError(
            "another kind of checkpoint", kind="other_kind", path=path, expected=kind, found=found
        )
    return ours


def _header_digest(metadata: Mapping[str, str], entries: Mapping[str, Any]) -> str:
    """sha256 over what the digest of the tensors doesn't cover: the texts, names, dtypes and shapes.

    It is of a JSON list of two lists in UTF-8, without spaces: names and texts of the metadata, and names,
    dtypes and shapes of the tensors, both sorted by name.
    """
    texts = [[name, metadata[name]] for name in sorted(metadata) if name != _HEADER_DIGEST_KEY]
    tensors = [[name, entries[name]["dtype"], entries[name]["shape"]] for name in sorted(entries)]
    shown = json.dumps([texts, tensors], separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(shown.encode(errors="surrogatepass")).hexdigest()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names and bytes of all tensors, which are on the CPU, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + b"\n")
        digest.update(_bytes_of(tensors[name]))
    return digest.hexdigest()


def hash_tensors(path: str | os.PathLike[str], *, prefix: str = "") -> str:
    """Hash the tensors of a safetensors file whose names start with a prefix; needs no torch.

    The hash is sha256 over, for every tensor sorted by name: the JSON list [name without prefix, dtype as
    safetensors spells it, shape] in UTF-8 without spaces, a newline, and the tensor's bytes. So it depends on
    the weights alone, not on the order in the file nor on anything else in it.

    Returns:
        64 hexadecimal digits.
    """
    check_local(path)
    path = Path(path)
    header, start = _read_header(path)
    names = sorted(name for name in header if name != "__metadata__" and name.startswith(prefix))
    if not names:
        raise CheckpointError(f"no tensor is named {prefix}...", kind="no_tensors", path=path)
    digest = hashlib.sha256()
    for name, values in _values_of(path, header, start, names):
        shown = [name.removeprefix(prefix), header[name]["dtype"], header[name]["shape"]]
        digest.update(json.dumps(shown, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
        digest.update(values)
    return digest.hexdigest()


def check_whole(path: str | os.PathLike[str], *, kind: str) -> None:
    """Fail unless a checkpoint's tensors are those that were written; needs no torch."""
    expected = stored_digest(path, kind=kind)
    header, start = _read_header(Path(path))
    names, digest = sorted(header.keys() - {"__metadata__"}), hashlib.sha256()
    for name, values in _values_of(Path(path), header, start, names):
        digest.update(name.encode() + b"\n")
        digest.update(values)
    _check_digest(path, _OTHER_TENSORS, expected=expected, found=digest.hexdigest())


def _values_of(
    path: Path, header: Mapping[str, Any], start: int, names: Sequence[str]
) -> Iterator[tuple[str, bytes]]:
    """Bytes of tensors by name, one at a time."""
    with path.open("rb") as file:
        for name in names:
            first, last = header[name]["data_offsets"]
            file.seek(start + first)
            yield name, file.read(last - first)


def _entries_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The header's entries, in the order of the file: the wider a dtype, the nearer to the front."""
    entries, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    return entries


def _write_tensors(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], entries: Mapping[str, Any], path: Path
) -> None:
    """Write a safetensors file, one tensor after the other, contiguous ones on the CPU."""
    text = json.dumps(
        {"__metadata__": dict(metadata), **entries}, separators=(",", ":"), ensure_ascii=False
    ).encode()
    text += b" " * (-len(text) % _ALIGN)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in entries:
            file.write(_bytes_of(tensors[name]))


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    return tensor.flatten().view(torch.uint8).numpy().data


def _read_header(path: Path, *, kind: str | None = None) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors' bytes start; safetensors checks that all of them are there."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            length_bytes = file.read(_LENGTH.size)
            if len(length_bytes) < _LENGTH.size:
                raise _truncated(path, _LENGTH.size, len(length_bytes))
            (length,) = _LENGTH.unpack(length_bytes)
            if length > _MAX_HEADER_NBYTES:
                raise _not_ours(path, f"a header of {length} bytes")
            text = file.read(length)
            nbytes = file.seek(0, os.SEEK_END)
    except FileNotFoundError as error:
        raise missing_checkpoint(path, hint=_HOW_TO_MAKE.get(kind or "")) from error
    except OSError as error:
        raise _not_ours(path, error.strerror or str(error)) from error
    start = _LENGTH.size + length
    if nbytes < start:
        raise _truncated(path, start, nbytes)
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        if ends and nbytes < start + max(ends):
            raise _truncated(path, start + max(ends), nbytes)
        with safe_open(path, framework="np"):
            return header, start
    except SafetensorError as error:
        raise _not_ours(path, str(error).rpartition("header: ")[2][:_MOST_SHOWN]) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _not_ours(path, "its header isn't that of safetensors") from error


def missing_checkpoint(path: Path, *, hint: str | None) -> CheckpointError:
    """The error for a checkpoint that isn't there."""
    return CheckpointError("no such checkpoint", kind="missing", path=path, hint=hint)


@contextmanager
def hinting_where_missing(hint: str) -> Iterator[None]:
    """Inside, the error for a checkpoint that isn't there says how to have it."""
    try:
        yield
    except CheckpointError as error:
        if error.kind == "missing":
            error.hint = hint
        raise


def _truncated(path: Path, expected: int, found: int) -> CheckpointError:
    return CheckpointError(
        "isn't as long as its header says",
        kind="truncated",
        path=path,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
        hint=_HINT,
    )


def _not_ours(path: str | os.PathLike[str], why: str) -> CheckpointError:
    return CheckpointError(f"not a checkpoint ({why})", kind="not_a_checkpoint", path=path, hint=_HINT)
