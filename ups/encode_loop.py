"""The encode loop of a build: batches of samples through a trained encoder, the same bytes however they come.

The encoder always sees a micro-batch of one shape, and a sample always lies at the same place of its
micro-batch, chosen by its number in the store; what isn't there is zeros. So a sample's latents don't depend
on the size of the batch that it came in, nor on how often a build was interrupted. The entry point `ups` of
`ups_store.encoders` is `make_encoder`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups.encoder import ComputeDtype, LatentEncoder
from ups.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

MICRO_BATCH = 256  # frames, at most
_FIELDS = "fields"

Arrays = Mapping[str, npt.NDArray[Any]]
Note = Callable[[str], None]
log = logging.getLogger(__name__)


class MicroBatches:
    """How frames are laid into micro-batches: whole samples, or pieces of one that is too long.

    Args:
        num_frames: Frames of a sample, T.
        largest: Frames of a micro-batch, at most.

    Attributes:
        num_samples: Samples side by side in a micro-batch.
        num_pieces: Micro-batches that a sample is cut into; 1 unless it is too long.
        piece: Frames of a sample in one micro-batch.
    """

    def __init__(self, num_frames: int, *, largest: int) -> None:
        self.num_frames = num_frames
        self.num_samples = max(1, largest // max(1, num_frames))
        self.num_pieces = -(-num_frames // largest) if num_frames > largest else 1
        self.piece = -(-num_frames // self.num_pieces)

    def places(self, samples: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], ...]]:
        """Per micro-batch the rows of a batch that it holds, and where in it they lie."""
        group, place = np.divmod(samples, self.num_samples)
        for number in np.unique(group):
            rows = np.flatnonzero(group == number)
            yield rows, place[rows]

    def pieces(self) -> Iterator[slice]:
        """The frames of a sample, piece by piece."""
        for first in range(0, self.num_frames, max(1, self.piece)):
            yield slice(first, min(first + self.piece, self.num_frames))


class BatchEncoder:
    """A trained encoder as `ups_store.encoder.Encoder` wants it.

    Args:
        encoder: One task's encoder.
        micro_batch: Frames of a micro-batch, at most; part of the identity.
        note: Told what the user should know.
    """

    def __init__(
        self, encoder: LatentEncoder, *, micro_batch: int = MICRO_BATCH, note: Note = log.warning
    ) -> None:
        self.encoder = encoder
        self.micro_batch = micro_batch
        self.note = note

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(L, D): tokens and channels of one frame's latent state."""
        return self.encoder.latent_shape

    def identity(self) -> dict[str, Any]:
        """Everything that decides the latents' bytes, as JSON values; needs no torch."""
        latent_dtype = self.encoder.latent_dtype
        return {**self.encoder.identity(), "latent_dtype": latent_dtype, "micro_batch": self.micro_batch}

    def output_spec(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays of the latent store for those of the fields; says so if the latents are no smaller."""
        specs = self.encoder.output_spec(arrays)
        values, latents = np.prod(arrays[_FIELDS].shape[2:]), np.prod(self.encoder.latent_shape)
        if latents >= values:
            self.note(
                f"{self.encoder.task}: {latents} latent numbers a frame are no fewer than its {values} values"
                f" ({values / latents:.2f}x compression); choose a smaller latent.tokens or latent.dim"
            )
        return specs

    def encode(self, batch: Arrays, *, samples: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Encode a batch of samples.

        Args:
            batch: Arrays by name, shape (B, ...), physical units.
            samples: Their numbers in the store, shape (B,).
        Returns:
            `latent` (B, T, L, D) and `latent_input` (B, L, D) in the store's dtype, new arrays; what isn't
            encoded as it is.
        """
        self._choose_device()
        arrays = self.encoder.grid.arrays
        encoded = {name: values for name, values in batch.items() if name not in arrays}
        for array in arrays:
            name = "latent" if array == _FIELDS else "latent_input"
            encoded[name] = self._encode_array(array, batch, samples)
        return encoded

    def _choose_device(self) -> None:
        from ups.device import choose_device

        self.encoder.device = str(choose_device(self.encoder.device, note=self.note))

    def _encode_array(self, array: str, batch: Arrays, samples: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        values = batch[array] if array == _FIELDS else batch[array][:, None]
        cut = MicroBatches(values.shape[1], largest=self.micro_batch)
        out = np.empty((*values.shape[:2], *self.encoder.latent_shape), self._dtype)
        parameters = {name: batch[name] for name in self.encoder.spec.parameters if name in batch}
        for rows, places in cut.places(samples):
            given = _laid_out(parameters, rows, places, cut.num_samples)
            for frames in cut.pieces():
                micro = np.zeros((cut.num_samples, cut.piece, *values.shape[2:]), np.float32)
                num = frames.stop - frames.start
                micro[places, :num] = values[rows, frames]
                tokens = self._forward(array, {**given, array: micro})
                out[rows, frames] = tokens[places, :num]
        return out if array == _FIELDS else out[:, 0]

    def _forward(self, array: str, micro: Arrays) -> npt.NDArray[Any]:
        """Latents of one micro-batch, shape (S, frames, L, D)."""
        given = micro if array == _FIELDS else {**micro, array: micro[array][:, 0]}
        try:
            tokens = self.encoder.encode_on_device(given, array=array)
        except RuntimeError as error:
            raise _as_memory_error(error, self.micro_batch) from error
        return _to_numpy(tokens if array == _FIELDS else tokens.unsqueeze(1), self._dtype)

    @property
    def _dtype(self) -> np.dtype[Any]:
        if self.encoder.latent_dtype == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.encoder.latent_dtype)


def make_encoder(
    checkpoint: Path,
    *,
    task: str,
    device: str = "auto",
    compute_dtype: ComputeDtype = "float32",
    latent_dtype: str = "float16",
    micro_batch: int = MICRO_BATCH,
    note: Note = log.warning,
) -> BatchEncoder:
    """Open a checkpoint for a build; reads its header only.

    Args:
        checkpoint: `autoencoder.safetensors`.
        task: Name of the task.
        device: "auto", "cpu", "cuda" or "cuda:N"; chosen when the first batch is encoded.
        compute_dtype: What to compute in.
        latent_dtype: What the store holds.
        micro_batch: Frames of a micro-batch, at most.
        note: Told what the user should know.
    Raises:
        CheckpointError: Missing, truncated, or not an autoencoder's.
        ConfigError: It isn't of the task.
    """
    encoder = LatentEncoder.load(
        checkpoint, task=task, device=device, dtype=compute_dtype, latent_dtype=latent_dtype
    )
    return BatchEncoder(encoder, micro_batch=micro_batch, note=note)


def _laid_out(
    parameters: Arrays, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], num: int
) -> dict[str, npt.NDArray[Any]]:
    """Parameters of a micro-batch, NaN (unknown) where it is empty."""
    out = {name: np.full(num, np.nan) for name in parameters}
    for name, values in parameters.items():
        out[name][places] = values[rows]
    return out


def _to_numpy(tokens: Tensor, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return tokens.float().cpu().numpy().astype(dtype)


def _as_memory_error(error: RuntimeError, micro_batch: int) -> Exception:
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return error
    return ConfigError(
        "the device has too little memory for one micro-batch",
        kind="no_memory",
        expected=f"room for {micro_batch} frames",
        found=str(error).splitlines()[0],
        hint="choose a smaller latent.micro_batch; it is part of the store's identity",
    )
