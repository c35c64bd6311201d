"""`LatentEncoder`: a trained encoder as the build of latent stores uses it.

Importing this module and asking for the identity needs no torch; torch comes with the first `encode`, and a
CUDA device is touched only then. Reader processes hand over raw arrays and never encode.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ups.conditions import condition_of
from ups.errors import ShapeError
from ups.grid import FIELDS, latent_of
from ups.trained.checkpoint import hash_tensors, read_document
from ups.trained.specs import AUTOENCODER, AutoencoderSpec, check_task, parse_spec

if TYPE_CHECKING:
    from torch import Tensor

    from ups.trained.autoencoder import Autoencoder


Spec = TypeVar("Spec")  # `ups_store.ArraySpec`, which only `ups.data` may import
ComputeDtype = Literal["float32", "bfloat16", "float16"]


class LatentEncoder:
    """Encoder of one task out of an autoencoder's checkpoint; made by `load`.

    Attributes:
        path: The checkpoint.
        task: Name of the task.
        spec: What the checkpoint is for.
        grid: The task's grid.
        device: Where it computes.
        dtype: Dtype that it computes in (autocast); the results are float32.
        latent_dtype: Dtype of the latents in the store, for `output_spec`.
        latent_shape: (L, D), tokens and channels of one frame's latent state.
    """

    def __init__(
        self,
        path: Path,
        spec: AutoencoderSpec,
        *,
        task: str,
        device: str,
        dtype: ComputeDtype,
        latent_dtype: str,
    ) -> None:
        self.path, self.task, self.device, self.dtype = path, task, device, dtype
        self.latent_dtype = latent_dtype
        self.spec = spec
        self.grid = spec.tasks[task].grid
        self.latent_shape = (spec.num_tokens, spec.latent_dim)
        self._model: Autoencoder | None = None
        self._compiled: Callable[..., Tensor] | None = None

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        task: str | None = None,
        device: str = "cpu",
        dtype: ComputeDtype = "float32",
        latent_dtype: str = "float16",
    ) -> LatentEncoder:
        """Open a checkpoint; reads its header only.

        Args:
            path: `autoencoder.safetensors`.
            task: Name of the task; may be left out where the checkpoint has only one.
            device: "cpu", "cuda", "cuda:1", ...
            dtype: What to compute in.
            latent_dtype: What the store holds.

        Raises:
            CheckpointError: Missing, truncated, or not an autoencoder's; statistics missing.
            ConfigError: The checkpoint isn't of the task.
        """
        spec = parse_spec(read_document(path, kind=AUTOENCODER), path)
        named = check_task(spec, task, path)
        return cls(Path(path), spec, task=named, device=device, dtype=dtype, latent_dtype=latent_dtype)

    def identity(self) -> dict[str, Any]:
        """What decides the latents, as JSON values: class, configuration, statistics, sha256 of the weights.

        Of a checkpoint for several tasks only what concerns this one.
        """
        spec = self.spec.to_json()
        configuration = {
            name: spec[name] for name in ("parameters", "num_tokens", "latent_dim", "patch_size", "encoder")
        }
        return {
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "weights_sha256": hash_tensors(self.path, prefix=f"encoder.{self.grid.name}."),
            "configuration": {
                "task": self.task,
                "tasks_of_encoder": self.spec.tasks_on(self.grid),
                "grid": self.grid.to_json(),
                **configuration,
            },
            "statistics": spec["tasks"][self.task]["statistics"],
            "compute_dtype": self.dtype,
        }

    def output_spec(self, input_spec: Mapping[str, Spec]) -> dict[str, Spec]:
        """What becomes of a store of fields: `latent`, `latent_input` of a constant field, the rest as it is.

        Args:
            input_spec: `ups_store.ArraySpec` by name: "fields" (N, T, X..., C), at most one constant field
                (N, X...[, C]), parameters (N,).

        Returns:
            Specifications of the same class: `latent` (N, T, L, D), `latent_input` (N, L, D), and all
            arrays that aren't encoded.

        Raises:
            ShapeError: If the fields aren't on the grid that the encoder was trained on.
        """
        specs = dict(input_spec)
        for array, num_channels in self.grid.channels:
            spec: Any = specs.pop(array, None)
            leading = 2 if array == FIELDS else 1
            self._check_on_grid(array, spec, leading=leading, num_channels=num_channels)
            name = latent_of(array)
            specs[name] = dataclasses.replace(
                spec,
                shape=(*spec.shape[:leading], *self.latent_shape),
                dtype=self.latent_dtype,
                dims=(*("sample", "time")[:leading], "token", "latent_channel"),
                attrs=None,
            )
        return specs

    def _check_on_grid(self, array: str, spec: Any, *, leading: int, num_channels: int) -> None:
        trained = f"{array!r} of {self.task}, as the encoder was trained on"
        if spec is None:
            raise ShapeError(f"no {trained}", path=self.path)
        expected = (*spec.shape[:leading], *self.grid.points, num_channels)
        may_lack_channels = array != FIELDS and num_channels == 1
        if tuple(spec.shape) not in (expected, expected[:-1] if may_lack_channels else expected):
            hint = "train on these fields, or reduce them as for training (data.reduce_space)"
            raise ShapeError(trained, path=self.path, expected=expected, found=tuple(spec.shape), hint=hint)

    def encode(self, batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float32]]:
        """Encode a batch of samples in one go; the caller decides how many fit.

        Args:
            batch: Arrays of `output_spec`'s input by name, shape (B, ...), physical units.

        Returns:
            `latent` (B, T, L, D) and `latent_input` (B, L, D), float32, new arrays; arrays that aren't
            encoded are left out.
        """
        encoded = {}
        for array in self.grid.arrays:
            name = latent_of(array)
            encoded[name] = self.encode_on_device(batch, array=array).cpu().numpy()
        return encoded

    def encode_on_device(self, batch: Mapping[str, Any], *, array: str = FIELDS) -> Tensor:
        """Encode one array of a batch; arrays or tensors in, a float32 tensor on the device out.

        Asynchronous on CUDA, on the current stream.
        """
        import torch

        encode = self._compiled or self.load_model().encode
        values = torch.as_tensor(batch[array]).to(self.device, torch.float32, non_blocking=True)
        frames = values.flatten(0, 1) if array == FIELDS else values
        num_frames = len(frames) // max(1, len(values))
        if frames.ndim == 1 + self.grid.ndim:
            frames = frames.unsqueeze(-1)
        parameters = self._parameters(batch, len(values)).repeat_interleave(num_frames, dim=0)
        autocast = torch.autocast(
            torch.device(self.device).type,
            getattr(torch, self.dtype),
            enabled=self.dtype != "float32",
            cache_enabled=False,  # all streams would share it, also weights that one is still casting
        )
        with torch.inference_mode(), autocast:
            on_device = parameters.to(self.device, non_blocking=True)
            tokens = encode(frames, on_device, task=self.task, array=array)
        tokens = tokens.float()
        return tokens.unflatten(0, values.shape[:2]) if array == FIELDS else tokens

    def load_model(self) -> Autoencoder:
        """The autoencoder, loaded to the device the first time, and then there for any stream and thread."""
        if self._model is None:
            import torch

            from ups.trained.autoencoder import load_autoencoder

            self._model = load_autoencoder(self.path, device=self.device)
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)  # weights come on the current stream, others use them
        return self._model

    def compile_model(self) -> None:
        """Encode with a compiled model from now on, in any thread.

        Encoding raises ConfigError where the compiler fails, as the identity says that latents are compiled.
        """
        from ups.device import FirstCallAlone, compiled_or_refused, with_own_code

        encode = with_own_code(self.load_model().encode)
        # Code for any shape would serve a known one, too, depending on what was encoded before; and no error
        # names what can't be compiled as a whole.
        hint = "say latent.compile=false"
        self._compiled = FirstCallAlone(compiled_or_refused(encode, hint=hint, dynamic=False, fullgraph=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "_compiled": None}  # another process loads its own

    def _parameters(self, batch: Mapping[str, Any], num_samples: int) -> Tensor:
        import torch

        missing = np.full(num_samples, np.nan)
        found = [condition_of(name, batch) for name in self.spec.parameters]
        columns = [np.asarray(missing if each is None else each, np.float32) for each in found]
        table = np.stack(columns, axis=1) if columns else np.zeros((num_samples, 0), np.float32)
        return torch.from_numpy(table)
