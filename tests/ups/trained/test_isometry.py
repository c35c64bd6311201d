"""Latents rescaled to isometry: the decoder's singular values agree, and nothing is restored differently."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from tiny_autoencoders import make_spec
from torch import Tensor

from ups.models.any_point_decoder import grid_queries
from ups.nn.patches import PatchBasis
from ups.trained.autoencoder import Autoencoder
from ups.trained.isometry import (
    LatentFrames,
    chosen_tokens,
    is_isometric,
    make_isometric,
    spectrum_of,
    token_gram,
)

ARRAYS = [("burgers1d", "fields"), ("darcy2d", "fields"), ("darcy2d", "coefficient")]


def make_model(latent_dim: int = 3) -> Autoencoder:
    """Random networks whose channels differ a hundred times in what they move."""
    torch.manual_seed(0)
    spec = make_spec()
    encoder = {**spec.encoder, "isometry": True}
    model = Autoencoder(dataclasses.replace(spec, encoder=encoder, latent_dim=latent_dim)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("tokens_in.weight"):
            weight.data[:, 0] *= 10.0
            weight.data[:, 1] *= 0.1
    return model


def queries_of(model: Autoencoder) -> dict[str, Tensor]:
    return {name: grid_queries(task.grid.points) for name, task in model.spec.tasks.items()}


def values_of(model: Autoencoder, task: str, array: str, *, seed: int, num: int = 32) -> Tensor:
    grid = model.spec.tasks[task].grid
    shape = (num, *grid.points, dict(grid.channels)[array])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encode(model: Autoencoder, task: str, array: str, *, seed: int = 1) -> LatentFrames:
    values = values_of(model, task, array, seed=seed)
    parameters = torch.full((len(values), 2), 0.1)
    with torch.no_grad():
        tokens = model.encode(values, parameters, task=task, array=array)
        return LatentFrames(task, array, torch.arange(len(values)), tokens, parameters)


def isometric(model: Autoencoder) -> Autoencoder:
    make_isometric(model, [encode(model, *which) for which in ARRAYS], queries=queries_of(model))
    return model


def make_linear_model() -> Autoencoder:
    """A basis that is none of fields, and no networks."""
    spec = make_spec()
    encoder = {**spec.encoder, "basis": "pca", "residual": False}
    model = Autoencoder(dataclasses.replace(spec, encoder=encoder, latent_dim=3)).eval()
    for basis in model.modules():
        if isinstance(basis, PatchBasis):
            basis.vectors.copy_(torch.linalg.qr(torch.randn(basis.vectors.shape)).Q)
            basis.scale.fill_(0.7)
    return model


@pytest.mark.parametrize("make", [make_model, make_linear_model])
def test_gram_is_that_of_the_whole_jacobian(make: Callable[[], Autoencoder]) -> None:
    model = make()
    frames = encode(model, "burgers1d", "fields")
    first = {name: getattr(frames, name)[:3] for name in ("items", "tokens", "parameters")}
    frames = dataclasses.replace(frames, **first)
    query = grid_queries((16,))
    found = token_gram(model, frames, query=query, seed=4)
    chosen = chosen_tokens(frames.items, num_tokens=4, seed=4)
    condition = model.condition("burgers1d", frames.parameters[:1])
    for row, token in enumerate(chosen.tolist()):
        jacobian = torch.autograd.functional.jacobian(
            lambda tokens: model.decoder["16p_fields1"](tokens, query, condition),
            frames.tokens[row : row + 1],
        )[0, :, 0, 0, token]
        torch.testing.assert_close(found[row], (jacobian.T @ jacobian).double(), rtol=1e-4, atol=1e-8)


def test_token_of_a_frame_is_the_same_whatever_is_looked_at_beside_it() -> None:
    every = chosen_tokens(torch.arange(200), num_tokens=5, seed=1)
    some = torch.tensor([7, 150, 3])
    assert torch.equal(chosen_tokens(some, num_tokens=5, seed=1), every[some])
    assert every.unique().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("task", "array"), ARRAYS)
def test_singular_values_agree_on_the_sample_and_nearly_elsewhere(task: str, array: str) -> None:
    model, query = make_model(), queries_of(make_model())[task]
    before = spectrum_of(token_gram(model, encode(model, task, array), query=query, seed=9))
    assert before.condition > 20
    isometric(model)
    on_sample = spectrum_of(token_gram(model, encode(model, task, array), query=query))
    assert on_sample.condition == pytest.approx(1, abs=1e-3)
    elsewhere = spectrum_of(token_gram(model, encode(model, task, array, seed=7), query=query, seed=9))
    assert elsewhere.condition < 1.5
    latents = encode(model, task, array).tokens
    variance = (latents - latents.mean((0, 1))).square().mean()
    assert variance.item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(("task", "array"), ARRAYS)
def test_decoded_fields_stay_what_they_were(task: str, array: str) -> None:
    model = make_model()
    values, parameters = values_of(model, task, array, seed=3), torch.full((32, 2), 0.1)
    which = {"query": torch.rand(40, values.ndim - 2), "task": task, "array": array}
    with torch.no_grad():
        before = model(values, parameters=parameters, **which)
        assert not is_isometric(model)
        after = isometric(model)(values, parameters=parameters, **which)
        assert is_isometric(model)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * float(before.std()) + 1e-5)


def test_channel_without_effect_is_not_blown_up() -> None:
    model = make_model()
    for name, weight in model.named_parameters():
        if name.endswith("tokens_in.weight"):
            weight.data[:, 2] = 0.0
    values, parameters = values_of(model, "burgers1d", "fields", seed=3), torch.full((32, 2), 0.1)
    which = {"query": grid_queries((16,)), "task": "burgers1d"}
    with torch.no_grad():
        before = model(values, parameters=parameters, **which)
        after = isometric(model)(values, parameters=parameters, **which)
        latents = encode(model, "burgers1d", "fields").tokens
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    assert latents.isfinite().all()
    assert latents.abs().max() < 10
