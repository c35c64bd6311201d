"""The FNO of the package neuraloperator as one more baseline, to check our own against; optional.

Its layers, ratios of widths and initialisation are the package's defaults (Kossaifi et al. 2024,
arXiv:2412.10354). What goes in, what comes out and the training are those of our own,
`ups.eval.baselines.FourierNeuralOperator`. Letters: B batch, C channels of the field, W width, G the axes of
the grid.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ups.errors import ConfigError
from ups.eval.baselines import expect_axes, padding_behind, with_parameters, zeroed


class NeuraloperatorFNO(nn.Module):
    """neuraloperator's FNO.

    On two axes version 2.0.0 moves the spectrum by one mode where the first has an odd length, the zeros
    behind it counted (mended later: pull request 688 of neuraloperator), so grids should be even there.

    Args:
        channels: C.
        num_parameters: Numbers that are given to every point beside the field.
        periodic: Whether each axis is; the others are treated as in our own FNO.
        width: W.
        modes: Fourier modes along each axis, as in our own FNO.
        depth: Layers.
        predicts_change: Whether the output is added to the field.

    Raises:
        ConfigError: Kind "no_neuraloperator", if the package isn't installed.
    """

    def __init__(
        self,
        channels: int,
        *,
        num_parameters: int,
        periodic: tuple[bool, ...],
        width: int = 32,
        modes: int = 16,
        depth: int = 4,
        predicts_change: bool = True,
    ) -> None:
        super().__init__()
        ndim = expect_axes(periodic)
        expect_neuraloperator()
        from neuralop.models import FNO

        self.periodic, self.predicts_change = periodic, predicts_change
        fno = FNO(
            n_modes=neuraloperator_modes(modes, ndim=ndim),
            in_channels=channels + num_parameters + sum(not wraps for wraps in periodic),
            out_channels=channels,
            hidden_channels=width,
            n_layers=depth,
            positional_embedding=None,
        )
        # Its parts, not itself: the arguments of its constructor would be among the weights of a checkpoint.
        self.lift, self.layers, self.out = fno.lifting, fno.fno_blocks, fno.projection
        zeroed(self.out.fcs[-1])

    def forward(self, field_BCG: Tensor, parameters_BP: Tensor) -> Tensor:
        """The field one time step later; arguments as `FourierNeuralOperator.forward`."""
        x_BWG = self.lift(with_parameters(field_BCG, parameters_BP, self.periodic))
        grid = x_BWG.shape[2:]
        x_BWG = F.pad(x_BWG, padding_behind(grid, self.periodic))
        for number in range(self.layers.n_layers):
            x_BWG = self.layers(x_BWG, number)
        x_BWG = x_BWG[(..., *(slice(length) for length in grid))]
        out_BCG: Tensor = self.out(x_BWG)
        return field_BCG + out_BCG if self.predicts_change else out_BCG


def neuraloperator_modes(modes: int, *, ndim: int) -> tuple[int, ...]:
    """`n_modes` of neuraloperator's layers that keep what `SpectralConv(modes=modes)` keeps.

    It counts modes of both signs; of the last axis, where one sign suffices, it keeps n // 2 + 1.
    """
    return (*(2 * modes,) * (ndim - 1), 2 * (modes - 1))


def expect_neuraloperator() -> None:
    """Check that the package is there; imports it, which takes seconds.

    Raises:
        ConfigError: Kind "no_neuraloperator".
    """
    try:
        import neuralop  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the baseline fno_neuraloperator needs the package neuraloperator ({error})",
            kind="no_neuraloperator",
            hint="pip install 'ups-store[neuraloperator]'",
        ) from error
