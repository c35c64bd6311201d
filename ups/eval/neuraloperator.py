"""The FNO of the package neuraloperator, to check ours against.

Its layers, ratios of widths and initialisation are the package's defaults (Kossaifi et al. 2024,
arXiv:2412.10354); inputs, outputs and training are those of `ups.eval.baselines.FourierNeuralOperator`.
Letters: B trajectories, X and G the axes of the grid, W width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ups.errors import check_installed
from ups.eval.baselines import FieldNetwork, cut_to, padded, zeroed
from ups.nn.activation_checkpointing import recomputed


class NeuraloperatorFNO(FieldNetwork):
    """neuraloperator's FNO; axes that aren't periodic are treated as in our own.

    On two axes version 2.0.0 moves the spectrum by one mode where the first has an odd length, the zeros
    behind it counted (mended later: pull request 688 of neuraloperator), so grids should be even there.

    Args:
        channels: C.
        width: W.
        modes: Fourier modes along each axis, as in our own FNO.
        depth: Layers.
        shared: See `FieldNetwork`.

    Raises:
        MissingExtraError: If the package isn't installed.
    """

    def __init__(
        self, channels: int, *, width: int = 32, modes: int = 16, depth: int = 4, **shared: Any
    ) -> None:
        super().__init__(channels, **shared)
        check_neuraloperator()
        from neuralop.models import FNO

        fno = FNO(
            n_modes=neuraloperator_modes(modes, ndim=self.ndim),
            in_channels=self.num_given,
            out_channels=channels,
            hidden_channels=width,
            n_layers=depth,
            positional_embedding=None,
        )
        # Its parts, not itself: the arguments of its constructor would be among the weights of a checkpoint.
        self.lift, self.layers, self.out = fno.lifting, fno.fno_blocks, fno.projection
        zeroed(self.out.fcs[-1])

    def compute(self, given_BXG: Tensor) -> Tensor:
        """See `FieldNetwork.compute`."""
        x_BWG = padded(self.lift(given_BXG), self.periodic)
        for number in range(self.layers.n_layers):
            x_BWG = self._layer(x_BWG, number)
        return self._output(cut_to(x_BWG, given_BXG.shape[2:]))

    @recomputed
    def _layer(self, x_BWG: Tensor, number: int) -> Tensor:
        after: Tensor = self.layers(x_BWG, number)
        return after

    @recomputed
    def _output(self, x_BWG: Tensor) -> Tensor:
        out: Tensor = self.out(x_BWG)
        return out


def neuraloperator_modes(modes: int, *, ndim: int) -> tuple[int, ...]:
    """`n_modes` of neuraloperator's layers that keep what `SpectralConv(modes=(modes,) * ndim)` keeps.

    It counts modes of both signs; of the last axis, where one sign suffices, it keeps n // 2 + 1.
    """
    return (*(2 * modes,) * (ndim - 1), 2 * (modes - 1))


def check_neuraloperator() -> None:
    """Check that the package is there.

    Raises:
        MissingExtraError: If it isn't.
    """
    check_installed("neuralop", extra="neuraloperator")
