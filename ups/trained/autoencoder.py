"""`Autoencoder`: encoders and decoders of all tasks with their normalisation, and the file that holds them.

Tasks on the same kind of grid share an encoder and a decoder. Letters: B batch, X the axes of the grid,
C channels, L latent tokens, D latent channels, P query points, N axes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from ups.grid import FIELDS, GridSpec
from ups.models.any_point_decoder import AnyPointDecoder
from ups.models.grid_encoder import GridEncoder
from ups.nn.layers import Condition
from ups.trained.checkpoint import load_checkpoint
from ups.trained.model_files import OfTraining, TrainedModel, filled, save_model
from ups.trained.specs import AUTOENCODER, AutoencoderSpec, parse_spec


class Autoencoder(TrainedModel):
    """Physical fields to latent tokens and back, for several tasks."""

    def __init__(self, spec: AutoencoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.encoder, self.decoder, self.normalizer = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        for grid in {task.grid.name: task.grid for task in spec.tasks.values()}.values():
            common: dict[str, Any] = {
                "cut": spec.cut(grid),
                "latent_dim": spec.latent_dim,
                "num_tasks": len(spec.tasks_on(grid)),
                "num_parameters": len(spec.parameters),
                **spec.linear_part,
            }
            self.encoder[grid.name] = GridEncoder(grid, **{**common, **spec.encoder})
            self.decoder[grid.name] = AnyPointDecoder(grid, **{**common, **spec.decoder})
        for name, task in spec.tasks.items():
            for array in task.grid.arrays:
                self.normalizer[f"{name}/{array}"] = Normalizer(**task.statistics[array])

    @property
    def device(self) -> torch.device:
        """Where it is; without a network there are no parameters to ask."""
        return next(self.buffers()).device

    def encode(self, values_BXC: Tensor, parameters: Tensor, *, task: str, array: str = FIELDS) -> Tensor:
        """Encode frames in physical units.

        Args:
            values_BXC: Frames of one array of one task, shape (B, X..., C).
            parameters: In the order of `spec.parameters`, NaN where unknown, shape (B, P).

        Returns:
            Latent tokens, shape (B, L, D).
        """
        grid = self.spec.tasks[task].grid
        normalised = self.normalizer_of(task, array)(values_BXC)
        condition = self.condition(task, parameters)
        return self.encoder[grid.name](normalised, condition, array=array)

    def decode(
        self, tokens_BLD: Tensor, query: Tensor, parameters: Tensor, *, task: str, array: str = FIELDS
    ) -> Tensor:
        """Decode at points, fractions of the domain, (P, N) or (B, P, N); physical units, (B, P, C)."""
        grid = self.spec.tasks[task].grid
        condition = self.condition(task, parameters)
        normalised = self.decoder[grid.name](tokens_BLD, query, condition, array=array)
        return self.normalizer_of(task, array).inverse(normalised)

    def forward(
        self, values_BXC: Tensor, query: Tensor, parameters: Tensor, *, task: str, array: str = FIELDS
    ) -> Tensor:
        """Encode, and decode at points: (B, X..., C) to (B, P, C)."""
        tokens_BLD = self.encode(values_BXC, parameters, task=task, array=array)
        return self.decode(tokens_BLD, query, parameters, task=task, array=array)

    def encoder_of(self, grid: GridSpec) -> GridEncoder:
        """The encoder of the tasks on a grid."""
        return cast(GridEncoder, self.encoder[grid.name])

    def decoder_of(self, grid: GridSpec) -> AnyPointDecoder:
        """The decoder of the tasks on a grid."""
        return cast(AnyPointDecoder, self.decoder[grid.name])

    def normalizer_of(self, task: str, array: str) -> Normalizer:
        """Shift and scale of one array of one task."""
        return cast(Normalizer, self.normalizer[f"{task}/{array}"])

    def condition(self, task: str, parameters: Tensor) -> Condition:
        """The condition of frames of a task."""
        number = self.spec.tasks_on(self.spec.tasks[task].grid).index(task)
        return Condition(number, parameters)


class Normalizer(nn.Module):
    """Shift and scale of each channel; not weights, so neither trained nor part of the state.

    Args:
        mean: By channel.
        std: By channel, > 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        """Physical to normalised, shape (..., C)."""
        return (values - self.mean) / self.std

    def inverse(self, values: Tensor) -> Tensor:
        """Normalised to physical, shape (..., C)."""
        return values * self.std + self.mean


def save_autoencoder(
    path: str | os.PathLike[str], model: Autoencoder, **training: Unpack[OfTraining]
) -> None:
    """Write weights, named `encoder.<grid>...` and `decoder.<grid>...`, and specification with statistics.

    Arguments and errors are those of `save_model`.
    """
    save_model(path, model, kind=AUTOENCODER, spec=model.spec.to_json(), training=training)


def spec_within(autoencoder: Autoencoder | None) -> dict[str, Any] | None:
    """What a document says of the frozen autoencoder, or none, that a model holds."""
    return None if autoencoder is None else {"spec": autoencoder.spec.to_json()}


def spec_of_autoencoder(document: Mapping[str, Any], path: str | os.PathLike[str]) -> AutoencoderSpec | None:
    """The specification that `spec_within` described; its weights are the model's."""
    inner = document.get("autoencoder")
    return None if inner is None else parse_spec(inner, path)


def load_autoencoder(path: str | os.PathLike[str], *, device: str = "cpu") -> Autoencoder:
    """Read an autoencoder, in evaluation mode."""
    tensors, document = load_checkpoint(path, kind=AUTOENCODER, device=device)
    spec = parse_spec(document, path)
    return filled(lambda: Autoencoder(spec), tensors, path=path, device=device)
