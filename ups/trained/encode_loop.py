"""The encode loop of a build: batches of samples through a trained encoder, the same bytes however they come.

The encoder always sees a micro-batch of one shape, and a sample always lies at the same place of its
micro-batch, chosen by its number in the store; what isn't there is zeros. So a sample's latents don't depend
on the size of the batch that it came in, on how many micro-batches are encoded side by side, nor on how often
a build was interrupted. The entry point `ups` of
`ups_store.encoders` is `make_encoder`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ups.conditions import condition_of
from ups.errors import CheckpointError
from ups.grid import FIELDS, latent_of
from ups.log import logger
from ups.trained.encoder import ComputeDtype, LatentEncoder

if TYPE_CHECKING:
    from torch import Tensor

    from ups.trained.encode_lanes import Lanes  # torch, which a second run doesn't need

MICRO_BATCH = 256  # frames, at most
MICRO_BATCH_BYTES = 64 << 20  # of frames, at most; with what a forward makes of them some 2 GB

Arrays = Mapping[str, npt.NDArray[Any]]
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
    """A trained encoder as `ups_store.building.encode` wants it, and can overlap it with reading.

    Args:
        encoder: One task's encoder.
        micro_batch: Frames of a micro-batch, at most; fewer where these exceed `MICRO_BATCH_BYTES`.
        num_lanes: Micro-batches that are encoded side by side; by default what the device is good for.
        pin_memory: Whether a CUDA device copies from page-locked memory, while it computes.
        compile: Whether the encoder is compiled; if that fails, encoding raises ConfigError.
    """

    def __init__(
        self,
        encoder: LatentEncoder,
        *,
        micro_batch: int = MICRO_BATCH,
        num_lanes: int | None = None,
        pin_memory: bool = True,
        compile: bool = False,
    ) -> None:
        self.encoder = encoder
        self._frame_nbytes = 4 * math.prod(encoder.grid.points) * dict(encoder.grid.channels)[FIELDS]
        self.micro_batch = max(1, min(micro_batch, MICRO_BATCH_BYTES // self._frame_nbytes))
        self._num_lanes, self._pin_memory = num_lanes, pin_memory
        self._compile = compile
        self._lanes: Lanes | None = None  # once the first batch comes

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(L, D): tokens and channels of one frame's latent state."""
        return self.encoder.latent_shape

    def identity(self) -> dict[str, Any]:
        """Everything that decides the latents' bytes, as JSON values; needs no torch."""
        latent_dtype = self.encoder.latent_dtype
        own = {"latent_dtype": latent_dtype, "micro_batch": self.micro_batch}
        if self._compile:  # else the identity stays that of stores from before there was a choice
            own["compile"] = True
        return {**self.encoder.identity(), **own}

    def output_spec(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays of the latent store for those of the fields; says so if the latents are no smaller."""
        specs = self.encoder.output_spec(arrays)
        values, latents = np.prod(arrays[FIELDS].shape[2:]), np.prod(self.encoder.latent_shape)
        if latents >= values:
            logger.warning(
                f"{self.encoder.task}: {latents} latent numbers a frame are no fewer than its {values} values"
                f" ({values / latents:.2f}x compression); choose a smaller latent.tokens or latent.dim"
            )
        return specs

    def group_size(self, arrays: Mapping[str, Any]) -> int:
        """Samples that share a micro-batch; batches that hold whole groups leave no place of one empty."""
        num_frames = arrays[FIELDS].shape[1]
        return MicroBatches(num_frames, largest=self.micro_batch).num_samples

    def encode(self, batch: Arrays, *, samples: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Encode a batch of samples.

        Args:
            batch: Arrays by name, shape (B, ...), physical units.
            samples: Their numbers in the store, shape (B,).
        Returns:
            `latent` (B, T, L, D) and `latent_input` (B, L, D), float32, new arrays, for the build to cast;
            what isn't encoded as it is.
        """
        return self.begin(batch, samples=samples)()

    def begin(
        self, batch: Arrays, *, samples: npt.NDArray[np.int64]
    ) -> Callable[[], dict[str, npt.NDArray[Any]]]:
        """Begin to encode a batch: the next one may begin while the last micro-batches of this are at work.

        Args:
            batch: As for `encode`; what is encoded needn't stay as it is after this returns.
            samples: Their numbers in the store, shape (B,).
        Returns:
            A function that waits and returns what `encode` does, or raises what went wrong.
        """
        self.prepare()
        arrays = self.encoder.grid.arrays
        encoded = {name: values for name, values in batch.items() if name not in arrays}
        jobs: list[Future[None]] = []
        for array in arrays:
            name = latent_of(array)
            encoded[name] = self._begin_array(array, batch, samples, jobs)

        def finish() -> dict[str, npt.NDArray[Any]]:
            for job in jobs:
                job.result()
            return encoded

        return finish

    def encode_frames(
        self,
        frames_FXC: npt.NDArray[np.float32],
        parameters: Arrays,
        *,
        samples: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64],
        num_steps: int,
        array: str = FIELDS,
    ) -> Tensor:
        """Encode frames of some trajectories to what a store of all of them would hold, to the bit.

        Each lies where it would in the micro-batches of a build; those of one place go into several of them.

        Args:
            frames_FXC: Physical units, shape (F, X..., C).
            parameters: Conditions by name, each (F,).
            samples: Of the trajectories, shape (F,): their numbers in the store.
            steps: Of the frames in their trajectories, shape (F,).
            num_steps: Of a trajectory as it is stored; 1 of a constant field.
            array: Which one it is.

        Returns:
            Float32, shape (F, L, D), on the CPU.
        """
        import torch

        self.prepare()
        assert self._lanes is not None
        cut = MicroBatches(num_steps, largest=self.micro_batch)
        places = samples % cut.num_samples * cut.piece + steps % cut.piece
        order = np.argsort(places, kind="stable")
        number = np.empty_like(places)  # of the frame among those of its place
        number[order] = np.arange(len(places)) - np.searchsorted(places[order], places[order])
        out, jobs = np.empty((len(places), *self.encoder.latent_shape), np.float32), list[Future[None]]()
        for each in range(number.max(initial=-1) + 1):
            rows = np.flatnonzero(number == each)
            given = _laid_out(parameters, rows, places[rows], cut.num_samples * cut.piece)
            micro = self._host_tensor((cut.num_samples * cut.piece, 1, *frames_FXC.shape[1:])).zero_()
            micro.numpy()[places[rows], 0] = frames_FXC[rows]
            job = partial(
                self._forward, array, {**given, array: micro}, out[:, None], rows, places[rows], slice(0, 1)
            )
            jobs.append(self._lanes.submit(job))
        for job_done in jobs:
            job_done.result()
        dtype = getattr(torch, self.encoder.latent_dtype)
        return torch.from_numpy(out).to(dtype).float()

    def prepare(self) -> None:
        """Choose the device and load the weights, the first time."""
        if self._lanes is not None:
            return
        from ups.device import choose_device, device_of_rank
        from ups.trained.encode_lanes import Lanes, num_lanes

        device = device_of_rank(choose_device(self.encoder.device, key="latent.device"))
        self.encoder.device = str(device)
        self.encoder.load_model()
        if self._compile:
            self.encoder.compile_model()
        nbytes = self.micro_batch * self._frame_nbytes
        num = self._num_lanes or num_lanes(device, micro_batch_nbytes=nbytes)
        self._lanes = Lanes(num, device=device, micro_batch=self.micro_batch)

    def device_state(self) -> str:
        """What is allocated on the device, for a build that stalls."""
        from ups.device import choose_device, cuda_state

        return cuda_state(choose_device(self.encoder.device))

    def _begin_array(
        self, array: str, batch: Arrays, samples: npt.NDArray[np.int64], jobs: list[Future[None]]
    ) -> npt.NDArray[Any]:
        """Begin the micro-batches of one array, and return where the latents will be."""
        values = batch[array] if array == FIELDS else batch[array][:, None]
        cut = MicroBatches(values.shape[1], largest=self.micro_batch)
        out = np.empty((*values.shape[:2], *self.encoder.latent_shape), np.float32)
        found = {name: condition_of(name, batch) for name in self.encoder.spec.parameters}
        parameters = {name: column for name, column in found.items() if column is not None}
        assert self._lanes is not None
        for rows, places in cut.places(samples):
            given = _laid_out(parameters, rows, places, cut.num_samples)
            for frames in cut.pieces():
                micro = self._host_tensor((cut.num_samples, cut.piece, *values.shape[2:]))
                num = frames.stop - frames.start
                if len(places) < cut.num_samples or num < cut.piece:
                    micro.zero_()
                micro.numpy()[places, :num] = values[rows, frames]
                job = partial(self._forward, array, {**given, array: micro}, out, rows, places, frames)
                jobs.append(self._lanes.submit(job))
        return out if array == FIELDS else out[:, 0]

    def _forward(
        self,
        array: str,
        micro: Mapping[str, Any],
        out: npt.NDArray[Any],
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        frames: slice,
    ) -> None:
        """Encode one micro-batch, shape (S, frames, X..., C), and put its latents at `rows` and `frames`."""
        given = micro if array == FIELDS else {**micro, array: micro[array][:, 0]}
        tokens = self.encoder.encode_on_device(given, array=array)
        latents = _to_host(tokens if array == FIELDS else tokens.unsqueeze(1))
        out[rows, frames] = latents[places, : frames.stop - frames.start]

    def _host_tensor(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for a micro-batch, from which a CUDA device copies while others compute."""
        import torch

        return torch.empty(shape, pin_memory=self._pin_memory and self.encoder.device.startswith("cuda"))


def make_encoder(
    checkpoint: Path,
    *,
    task: str,
    device: str = "auto",
    compute_dtype: ComputeDtype = "float32",
    latent_dtype: str = "float16",
    micro_batch: int = MICRO_BATCH,
    pin_memory: bool = True,
    compile: bool = False,
) -> BatchEncoder:
    """Open a checkpoint for a build; reads its header only.

    Args:
        checkpoint: `autoencoder.safetensors`.
        device: "auto", "cpu", "cuda" or "cuda:N"; chosen when the first batch is encoded.
        compute_dtype: What to compute in.
        latent_dtype: What the store holds.
        micro_batch: Frames of a micro-batch, at most.
        pin_memory: Whether a CUDA device copies from page-locked memory, while it computes.
        compile: Whether the encoder is compiled.
    """
    try:
        encoder = LatentEncoder.load(
            checkpoint, task=task, device=device, dtype=compute_dtype, latent_dtype=latent_dtype
        )
    except CheckpointError as error:
        error.hint = error.hint or "run `ups train --stage autoencoder`, or check --checkpoint"
        raise
    return BatchEncoder(encoder, micro_batch=micro_batch, pin_memory=pin_memory, compile=compile)


def _laid_out(
    parameters: Arrays, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], num: int
) -> dict[str, npt.NDArray[Any]]:
    """Parameters of a micro-batch, NaN (unknown) where it is empty."""
    out = {name: np.full(num, np.nan) for name in parameters}
    for name, values in parameters.items():
        out[name][places] = values[rows]
    return out


def _to_host(tokens: Tensor) -> npt.NDArray[np.float32]:
    """The values of a float32 tensor, once the current stream has computed them."""
    import torch

    if not tokens.is_cuda:
        return tokens.numpy()
    host = torch.empty(tokens.shape, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    torch.cuda.current_stream(tokens.device).synchronize()  # of this lane; the others compute on
    return host.numpy()
