"""The fuzzer's inputs that aren't stores: HDF5 (`hdf5`), configurations, `.pt` files and checkpoints.

What comes of a changed one has to be a typed error, or right: what another reader finds in it, or, where a
checksum covers it, what was there before the change.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from tools.fuzz.changes import BLIND, Chance, change_value, flip_bits
from tools.fuzz.hdf5 import Hdf5Kind
from tools.fuzz.kind import Arrays, Input, Kind, assert_same
from tools.fuzz.stores import StoreKind
from ups.errors import CheckpointError
from ups_store.building.config import load_config
from ups_store.convert.import_pt import Names
from ups_store.errors import StoreError

# --- configurations -------------------------------------------------------------------------------------

TEXTS = (
    "null", "~", "true", "yes", "0", "-1", "1e400", ".nan", "-.inf", "0x10", "0o17", "1_000", "12:30:45",
    "2026-11-23", "9" * 5000, "''", '"\\ud800"', "'\\0'", "[]", "{}", "[[], {}]", "{a: 1, a: 2}", "&a [*a]",
    "*a", "!!python/object/apply:os.system [id]", "!!binary aGk=", "!!set {a}", "!!float x", "<<: *a",
    "? [a]",
    "${data.root}", "${data.tasks}", "${oc.env:HOME}", "${", "$", "|", ">-", "%TAG ! x", "---", "...", "\t",
    "\u2028", "\x00", "\ufeff", "burgers1d", "a.b.c", "../x", "/dev/zero", "demo", "[1, 2.5, x]", "-" * 40,
    "[" * 100, "{a: " * 40, "data", "s3://bucket", "\x1b[2J",
)  # fmt: skip


def odd_value(good: bytes, chance: Chance) -> bytes:
    """Values of some lines are others."""
    lines = good.decode().splitlines()
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        lines[at] = f"{key}{colon} {chance.choice(TEXTS)}"
    return "\n".join(lines).encode(errors="surrogatepass")


def odd_lines(good: bytes, chance: Chance) -> bytes:
    """Lines are left out, repeated, moved in or out, or inserted."""
    lines = good.decode().splitlines()
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        action = chance.randrange(5)
        if action == 0 and len(lines) > 1:
            del lines[at]
        elif action == 1:
            lines.insert(other, lines[at])
        elif action == 2:
            lines[at] = "  " * chance.randrange(3) + lines[at].lstrip()
        elif action == 3:
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines.insert(
                at, chance.choice(("include: ", "data: ", "tasks: ", "", "  - ")) + chance.choice(TEXTS)
            )
    return "\n".join(lines).encode(errors="surrogatepass")


class YamlKind(Kind):
    """Configurations of builds."""

    aware = (odd_value, odd_value, odd_lines)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        configs = Path(__file__).parents[2] / "ups" / "configs"
        names = ("demo.yaml", "own/group_per_sample.yaml", "own/one_file.yaml")
        self.seeds = tuple((configs / name).read_bytes() for name in names)
        self._path = folder / "config.yaml"

    def read(self, made: Input) -> bool:
        """Load it; what it gives, written out and loaded again, has to give the same."""
        self._path.write_bytes(made.content)
        config = load_config(self._path)
        self._path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        try:
            again = load_config(self._path)
        except StoreError as error:
            raise AssertionError(f"refused what it had given: {error}") from error
        assert again == config, f"{again} was {config}"
        return True


# --- .pt files ------------------------------------------------------------------------------------------


def odd_pickle(good: bytes, chance: Chance) -> bytes:
    """The pickle is changed blindly, and the archive's checksums are right."""
    return rezipped(good, lambda name, data: _changed(data, chance) if name.endswith("data.pkl") else data)


def odd_entry(good: bytes, chance: Chance) -> bytes:
    """Any entry is changed blindly or left out, or compressed."""
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        chosen = chance.choice(archive.namelist())
    left_out = chance.random() < 0.2
    change = lambda name, data: data if name != chosen else None if left_out else _changed(data, chance)  # noqa: E731
    return rezipped(good, change, compression=chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


def _changed(data: bytes, chance: Chance) -> bytes:
    return chance.choice(BLIND)(data, chance) if len(data) > 8 else bytes(chance.randbytes(8))


def rezipped(
    good: bytes, change: Callable[[str, bytes], bytes | None], *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """The archive with other entries; None leaves one out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for entry in old.infolist():
            data = change(entry.filename, old.read(entry))
            if data is not None:
                new.writestr(zipfile.ZipInfo(entry.filename), data, compression)  # without the time
    return out.getvalue()


class PtKind(Kind):
    """Samples as `torch.save` writes them, as `import-pt` reads them."""

    aware = (odd_pickle, odd_pickle, odd_entry)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = tuple(self._saved(protocol) for protocol in (2, 5))

    @staticmethod
    def _saved(protocol: int) -> bytes:
        import torch

        whole = torch.arange(24.0).reshape(2, 3, 4)
        document = {
            "x": whole,
            "view": whole.permute(2, 0, 1)[1:, :, ::2],
            "half": torch.arange(6).to(torch.float16),
            "params": {"nu": 0.5, "k": 3, "is_wall": True},
            "none": None,
        }
        file = io.BytesIO()
        torch.save(document, file, pickle_protocol=protocol)
        return file.getvalue()

    def read(self, made: Input) -> bool:
        """Read it; where torch reads it, too, both have to find the same, and a blind change nothing else."""
        names = Names({}, ())
        found, _ = names.read(made.content, path=Path("sample_0.pt"))
        if made.is_blind:
            assert_same(found, names.read(made.good, path=Path("sample_0.pt"))[0])
        for name, value in _by_torch(made.content):
            if name in found and value.shape == found[name].shape and value.dtype == found[name].dtype:
                assert value.tobytes() == found[name].tobytes(), f"{name} has other values than torch reads"
            elif name in found:
                raise AssertionError(
                    f"{name} is {found[name].dtype} {found[name].shape}, {value.shape} by torch"
                )
        return True


def _by_torch(content: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors at the top of a file, as torch reads it."""
    import torch

    try:
        document = torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # it raises whatever the damage leads to
        return
    for name, value in document.items() if isinstance(document, dict) else ():
        if isinstance(name, str) and isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16:
            yield name, value.numpy()


# --- checkpoints ----------------------------------------------------------------------------------------


def odd_header(good: bytes, chance: Chance) -> bytes:
    """Values of the header are others, its length is right, and it has no digest, as before there was one."""
    (length,) = struct.unpack_from("<Q", good)
    header = json.loads(good[8 : 8 + length])
    del header["__metadata__"]["header_sha256"]
    if chance.random() < 0.5:
        header["__metadata__"]["ups"] = _odd_json(header["__metadata__"]["ups"], chance)
        text = json.dumps(header).encode()
    else:
        text = _odd_json(json.dumps(header), chance).encode(errors="surrogatepass")
    return struct.pack("<Q", len(text)) + text + good[8 + length :]


def _odd_json(text: str, chance: Chance) -> str:
    if chance.random() < 0.2:
        nested = chance.choice(("[", '{"a":')) * chance.choice((10, 1000, 100_000))
        return text.replace(":", ":" + nested, 1)
    document = json.loads(text)
    for _ in range(chance.choice((1, 1, 2, 5))):
        change_value(document, chance)
    return json.dumps(document)


class CheckpointKind(Kind):
    """Checkpoints, which are safetensors files."""

    aware = (odd_header, odd_header, flip_bits)

    def __init__(self, folder: Path) -> None:
        import torch

        from ups.trained.checkpoint import save_checkpoint

        super().__init__(folder)
        self._path = folder / "autoencoder.safetensors"
        tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.float16)}
        document = {"layers": [1, 2], "lr": 0.1, "name": "x", "more": {"deep": [None, True]}}
        save_checkpoint(self._path, tensors, kind="autoencoder", document=document)
        self.seeds = (self._path.read_bytes(),)

    def read(self, made: Input) -> bool:
        """Read document, hash and tensors: these are what the header says of bytes that didn't change."""
        from ups.trained.checkpoint import hash_tensors, load_checkpoint, read_document

        self._path.write_bytes(made.content)
        for read in (hash_tensors, lambda path: read_document(path, kind="autoencoder")):
            with suppress(CheckpointError):
                read(self._path)
        tensors, document = load_checkpoint(self._path, kind="autoencoder")
        json.dumps(document)
        if made.is_blind:
            self._path.write_bytes(made.good)
            assert_same(_numpy(tensors), _numpy(load_checkpoint(self._path, kind="autoencoder")[0]))
        header = json.loads(made.content[8 : 8 + struct.unpack_from("<Q", made.content)[0]])
        header.pop("__metadata__")
        assert tensors.keys() == header.keys()
        data = made.content[len(made.content) - sum(t.numpy().nbytes for t in tensors.values()) :]
        for name, tensor in tensors.items():
            first, last = header[name]["data_offsets"]
            assert list(tensor.shape) == header[name]["shape"], f"{name} has another shape"
            assert tensor.numpy().tobytes() == data[first:last], f"{name} has other values"
        return True


class ModelKind(Kind):
    """Operators and correctors, as `ups.load` reads them."""

    aware = (odd_header,)

    def __init__(self, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)
        super().__init__(folder)
        self._path = folder / "model.safetensors"
        self.seeds = tuple(self._saved(states) for states in ("fields", "latent"))

    def _saved(self, states: Literal["fields", "latent"]) -> bytes:
        """A corrector with its operator, of patches or of an autoencoder's latents."""
        from ups.grid import GridSpec
        from ups.models.operator_size import OperatorSize
        from ups.trained.autoencoder import Autoencoder
        from ups.trained.checkpoint import hash_tensors
        from ups.trained.corrected import CorrectedSimulator, save_corrected
        from ups.trained.simulator import Simulator, save_simulator
        from ups.trained.specs import (
            AutoencoderSpec,
            CorrectorSpec,
            Sampling,
            SimulatedTask,
            SimulatorSpec,
            TaskSpec,
        )

        grid = GridSpec((16,), (states == "latent",), (("fields", 1),))
        unit = {"fields": {"mean": [0.0], "std": [1.0]}}
        sizes = {"width": 4, "depth": 1, "num_heads": 2}
        encoder = {**sizes, "basis": "pca", "residual": True, "isometry": True}
        inner = AutoencoderSpec(
            {"wave": TaskSpec(grid, ("u",), False, unit)}, ("c",), 1, 4, 4, encoder, {**sizes, "radius": 1}
        )
        is_latent = states == "latent"
        size = OperatorSize(4, (1, 1), ("hybrid",) if is_latent else ("spectral",), num_heads=2).to_json()
        boundary = ("periodic" if is_latent else "wall",)
        task = SimulatedTask(grid, boundary, (4,), ("u",), False, 0.1, {"c": (0.0, 1.0)}, unit)
        spec = SimulatorSpec(
            states, {"wave": task}, ("c",), 1 if is_latent else 4, None if is_latent else 4, 1, size, None
        )
        report = {f"val/{name}": 0.5 for name in ("nrmse", "latent_nrmse", "loss", "flow")}
        said: dict[str, Any] = {"config": {"seed": 1, "training": dict(report)}, "report": report}
        simulator = Simulator(spec, Autoencoder(inner) if is_latent else None)
        save_simulator(self._path, simulator, **said)
        corrector = CorrectorSpec(hash_tensors(self._path), size, {"wave": 0.1}, 1, Sampling(num_steps=1))
        save_corrected(self._path, CorrectedSimulator(simulator, corrector), **said)
        return self._path.read_bytes()

    def read(self, made: Input) -> bool:
        """Load it; where a change is blind, only what is equal loads."""
        import ups

        self._path.write_bytes(made.content)
        ups.load(self._path)
        assert not made.is_blind or made.content == made.good, "a changed byte was not noticed"
        return True


def _numpy(tensors: Mapping[str, Any]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


KINDS: dict[str, type[Kind]] = {
    "store": StoreKind,
    "hdf5": Hdf5Kind,
    "yaml": YamlKind,
    "pt": PtKind,
    "safetensors": CheckpointKind,
    "model": ModelKind,
}
