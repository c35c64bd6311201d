"""`StateSpace`: fields to the normalised states that models work on, and back.

Letters: B batch, X the axes of the grid, C channels, L tokens of a state, D channels of a token, P
parameters.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from ups.grid import FIELDS
from ups.models.any_point_decoder import grid_queries
from ups.models.latent_operator import TokenUNet
from ups.models.operator_blocks import TokenGeometry
from ups.models.operators import NamedOperator
from ups.nn.layers import patchify, unpatchify
from ups.nn.patches import resampled
from ups.trained.autoencoder import Autoencoder, Normalizer
from ups.trained.model_files import TrainedModel
from ups.trained.rollout_inputs import RolloutStart
from ups.trained.specs import SimulatorSpec, check_known_encoder


class Geometries(nn.ModuleDict):
    """The token grids of a specification's tasks, as a network has to know them.

    Args:
        network: That works on them.
        spec: Of the tasks.
    """

    def __init__(self, network: TokenUNet | NamedOperator, spec: SimulatorSpec) -> None:
        super().__init__(
            {
                name: network.geometry(task.tokens, task.boundary, steady=task.steady)
                for name, task in spec.tasks.items()
            }
        )

    def of(self, task: str) -> TokenGeometry:
        """Of a task."""
        geometry = self[task]
        assert isinstance(geometry, TokenGeometry)
        return geometry

    def need_all_weights(self, network: TokenUNet | NamedOperator) -> bool:
        """Whether a step needs every weight of the network: there is one task, on a grid that does."""
        return len(self) == 1 and all(network.uses_all_weights(self.of(task)) for task in self)


class StateSpace(TrainedModel):
    """Normalised tokens: latents of a frozen autoencoder, or patches of the fields themselves.

    Args:
        spec: Tasks, statistics, size of a token.
        autoencoder: Encoder and decoder where states are latents; frozen here.
    """

    def __init__(self, spec: SimulatorSpec, autoencoder: Autoencoder | None = None) -> None:
        super().__init__()
        assert (spec.states == "latent") == (autoencoder is not None)
        self.spec = spec
        self.autoencoder = autoencoder
        if autoencoder is not None:
            autoencoder.requires_grad_(False).eval()
        self.normalizer, self.queries = nn.ModuleDict(), nn.Module()
        for name, task in spec.tasks.items():
            for array, statistics in task.statistics.items():
                self.normalizer[f"{name}/{array}"] = Normalizer(**statistics)
            # Functions of the grid alone, so they aren't part of the weights.
            self.queries.register_buffer(name, grid_queries(task.grid.points), persistent=False)

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`; the autoencoder stays in evaluation mode."""
        super().train(mode)
        if self.autoencoder is not None:
            self.autoencoder.eval()
        return self

    def encode(self, values_BXC: Tensor, parameters_BP: Tensor, *, task: str, array: str = FIELDS) -> Tensor:
        """Physical fields to normalised states.

        Args:
            values_BXC: Frames of one array of one task, physical units, shape (B, X..., C).
            parameters_BP: In the order of `spec.parameters`, NaN where unknown, shape (B, P).
        Returns:
            Shape (B, L, D).
        """
        if self.autoencoder is None:
            return self.normalise(values_BXC, task=task, array=array)
        latent_BLD = self.autoencoder.encode(values_BXC, parameters_BP, task=task, array=array)
        return self.normalise(latent_BLD, task=task, array=array)

    def normalise(self, states: Tensor, *, task: str, array: str = FIELDS) -> Tensor:
        """What a store holds to normalised states.

        Args:
            states: Latents (..., L, D), or fields (B, X..., C) where states are patches of fields.
            array: Which array they are, or are the latents of.
        Returns:
            Shape (..., L, D), float32.
        """
        normalised: Tensor = self.normalizer_of(task, array)(states.float())
        if self.spec.patch_size is None:
            return normalised
        return self._padded(patchify(normalised, patch_size=self.spec.patch_size))

    def decode(self, state_BLD: Tensor, parameters_BP: Tensor, *, task: str) -> Tensor:
        """Normalised states to physical fields on the task's grid, shape (B, X..., C)."""
        check_known_encoder(self.spec)
        known = self.spec.tasks[task]
        normalizer = self.normalizer_of(task, FIELDS)
        if self.autoencoder is None:
            patches_BLD = state_BLD[..., : self.own_dim(task)]
            assert self.spec.patch_size is not None
            return normalizer.inverse(
                unpatchify(patches_BLD, points=known.grid.points, patch_size=self.spec.patch_size)
            )
        query_PN = self.queries.get_buffer(task)
        values_BPC = self.decode_at(state_BLD, query_PN, parameters_BP, task=task, array=FIELDS)
        return values_BPC.unflatten(1, known.grid.points)

    def decode_at(
        self, state_BLD: Tensor, query_PN: Tensor, parameters_BP: Tensor, *, task: str, array: str
    ) -> Tensor:
        """Normalised states of an array, latents of the autoencoder, to physical values at points.

        Args:
            state_BLD: States.
            query_PN: Points as fractions of the domain.
            parameters_BP: In the order of `spec.parameters`.
        Returns:
            Shape (B, P, C).
        """
        assert self.autoencoder is not None
        latent_BLD = self.normalizer_of(task, array).inverse(state_BLD)
        return self.autoencoder.decode(latent_BLD, query_PN, parameters_BP, task=task, array=array)

    def frame(self, state_BLD: Tensor, parameters_BP: Tensor, start: RolloutStart) -> Tensor:
        """Decode states of a rollout, on the points that are wanted, shape (B, X..., C)."""
        decoded_BXC = self.decode(state_BLD, parameters_BP, task=start.task)
        periodic = self.spec.tasks[start.task].grid.periodic
        return resampled(decoded_BXC, start.points, periodic=periodic)

    def own_channels(self, states: Tensor, *, task: str) -> Tensor:
        """Zero where a task's patches have no values, those of another task being larger; same shape."""
        dim = self.own_dim(task)
        return states if dim == self.spec.state_dim else self._padded(states[..., :dim])

    def own_dim(self, task: str) -> int:
        """Channels of a token that a task uses; a patch of fewer values is padded with zeros."""
        if self.spec.patch_size is None:
            return self.spec.state_dim
        grid = self.spec.tasks[task].grid
        return int(self.spec.patch_size**grid.ndim * dict(grid.channels)[FIELDS])

    def normalizer_of(self, task: str, array: str) -> Normalizer:
        """Shift and scale of the states of one array of one task."""
        normalizer = self.normalizer[f"{task}/{array}"]
        assert isinstance(normalizer, Normalizer)
        return normalizer

    def _padded(self, tokens: Tensor) -> Tensor:
        return nn.functional.pad(tokens, (0, self.spec.state_dim - tokens.shape[-1]))
