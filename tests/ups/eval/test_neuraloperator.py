"""Our FNO against the package neuraloperator's, with the same weights; and that FNO as a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_simulators import make_data
from torch import Tensor
from trained_baselines import train

from ups.models.grid_networks import FourierNeuralOperator, NeuraloperatorFNO, neuraloperator_modes
from ups.nn.spectral import SpectralConv

pytest.importorskip("neuralop")

B, C, P, W, MODES, DEPTH = 2, 2, 1, 6, 4, 3
# Both compute spectra in single precision whatever they are given, neuraloperator by its complex64 buffer.
EXACT: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}


def dense_weight(conv: SpectralConv) -> Tensor:
    """Our weights in neuraloperator's order: channels first; along the first of two axes from mode -m on."""
    parts = conv.weight.detach().squeeze(-4).movedim(-2, -1)  # (*modes, in, out, 2)
    dense = torch.view_as_complex(parts.contiguous()).movedim((-2, -1), (0, 1))
    return dense if dense.ndim == 3 else dense.roll(conv.modes[0], 2)


def their_conv(ours: SpectralConv, *, modes: int, ndim: int) -> Any:
    from neuralop.layers.spectral_convolution import SpectralConv as TheirSpectralConv

    theirs = TheirSpectralConv(W, W, neuraloperator_modes(modes, ndim=ndim), bias=False)
    with torch.no_grad():
        theirs.weight.tensor.copy_(dense_weight(ours))
    return theirs


@pytest.mark.parametrize(
    ("grid", "modes"), [((32,), 16), ((33,), 4), ((33,), 1), ((16, 32), 8), ((16, 33), 4)]
)
def test_spectral_conv_equals_neuraloperators(grid: tuple[int, ...], modes: int) -> None:
    ours = SpectralConv(W, modes=(modes,) * len(grid))
    theirs = their_conv(ours, modes=modes, ndim=len(grid))
    x = torch.randn(B, W, *grid)
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)


@pytest.mark.parametrize("grid", [(17, 32), (17, 33)])
def test_spectral_conv_equals_neuraloperators_mended_at_an_odd_first_length(
    grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """neuraloperator 2.0.0 undoes `fftshift` by `fftshift`, which is right at even lengths only."""
    ours = SpectralConv(W, modes=(MODES, MODES))
    theirs, x = their_conv(ours, modes=MODES, ndim=2), torch.randn(B, W, *grid)
    expected = ours(x)
    shifts = iter([torch.fft.fftshift, torch.fft.ifftshift])
    monkeypatch.setattr(torch.fft, "fftshift", lambda spectrum, dim: next(shifts)(spectrum, dim=dim))
    torch.testing.assert_close(theirs(x), expected, **EXACT)


def copy_weights(ours: FourierNeuralOperator, theirs: Any) -> None:
    """Into neuraloperator's FNO of the same widths; its spectral layers hold our pointwise bias."""
    pairs = [(theirs.lifting.fcs[0], ours.lift)]
    pairs += zip(theirs.projection.fcs, (ours.out[0], ours.out[2]), strict=True)
    for conv, skip, spectral, local in zip(
        theirs.fno_blocks.convs, theirs.fno_blocks.fno_skips, ours.spectral, ours.local, strict=True
    ):
        conv.weight.tensor.copy_(dense_weight(spectral))
        conv.bias.copy_(local.bias.reshape(conv.bias.shape))
        skip.conv.weight.copy_(local.weight.flatten(2))
    for to, layer in pairs:
        to.weight.copy_(layer.weight.flatten(2))
        to.bias.copy_(layer.bias)


def their_forward(theirs: Any, x: Tensor) -> Tensor:
    """neuraloperator's layers joined as ours are: with a residual, an activation after each, none twice."""
    x = theirs.lifting(x)
    for conv, skip in zip(theirs.fno_blocks.convs, theirs.fno_blocks.fno_skips, strict=True):
        x = x + F.gelu(conv(x) + skip(x))
    return theirs.projection(x)


@pytest.mark.parametrize("grid", [(32,), (33,), (16, 32)])
@torch.no_grad()
def test_fno_equals_neuraloperators_layers_joined_as_ours(grid: tuple[int, ...]) -> None:
    from neuralop.models import FNO
    from neuralop.utils import count_model_params

    ndim = len(grid)
    ours = FourierNeuralOperator(
        C, num_parameters=P, periodic=(True,) * ndim, width=W, modes=MODES, depth=DEPTH
    )
    torch.nn.init.normal_(ours.out[2].weight)
    theirs = FNO(
        n_modes=neuraloperator_modes(MODES, ndim=ndim),
        in_channels=C + P,
        out_channels=C,
        hidden_channels=W,
        n_layers=DEPTH,
        lifting_channel_ratio=0,
        projection_channel_ratio=4,
        positional_embedding=None,
        use_channel_mlp=False,
    )
    copy_weights(ours, theirs)
    assert count_model_params(theirs) == sum(weight.numel() for weight in ours.parameters())
    field, parameters = torch.randn(B, C, *grid), torch.randn(B, P)
    given = torch.cat([field, parameters.reshape(B, P, *(1,) * ndim).expand(B, P, *grid)], dim=1)
    change = ours(field, parameters) - field
    assert change.std() > 0.01
    torch.testing.assert_close(change, their_forward(theirs, given), **EXACT)


# --- as a baseline -------------------------------------------------------------------------------------


def make(periodic: tuple[bool, ...]) -> NeuraloperatorFNO:
    return NeuraloperatorFNO(C, num_parameters=P, periodic=periodic, width=8, modes=4, depth=2)


@pytest.mark.parametrize("periodic", [(True,), (False,), (True, True), (False, True)])
def test_untrained_neuraloperator_fno_is_persistence(periodic: tuple[bool, ...]) -> None:
    field = torch.randn(B, C, *(16, 32)[-len(periodic) :])
    assert torch.equal(make(periodic)(field, torch.ones(B, P)), field)


@torch.no_grad()
def test_neuraloperator_fno_is_the_package_s_own_on_a_periodic_grid() -> None:
    from neuralop.models import FNO

    torch.manual_seed(0)
    model = make((True, True))
    torch.nn.init.normal_(model.out.fcs[-1].weight)
    theirs = FNO((8, 6), C + P, C, 8, n_layers=2, positional_embedding=None)
    theirs.lifting, theirs.fno_blocks, theirs.projection = model.lift, model.layers, model.out
    field = torch.randn(B, C, 16, 32)
    given = torch.cat([field, torch.ones(B, P, 16, 32)], dim=1)
    torch.testing.assert_close(model(field, torch.ones(B, P)), field + theirs(given))


def test_neuraloperator_baseline_trains_repeats_and_is_kept_in_a_file(tmp_path: Path) -> None:
    root = make_data(tmp_path / "data")
    one, two = (train(root, tmp_path / name, "fno_neuraloperator") for name in ("one", "two"))
    for (name, weight), twin in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(weight, twin), name
    assert one.name == "fno_neuraloperator_steps"
    assert one.note.startswith("144 k parameters;")  # a complex weight counts twice
