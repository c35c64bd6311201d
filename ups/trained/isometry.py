"""How far latents move a field, and latents rescaled until all their directions move it equally far.

J is the Jacobian of the decoder at one token: (all normalised values of the field) by (its D channels). G =
E[J^T J] over tokens and frames says how large an error of the field an error of the latents becomes:
E|J e|^2 = e^T G e. A decoder that was trained amplifies some directions a thousand times more than others. z'
= c G^(1/2) z makes G a multiple of the identity without any training, and decoder(encoder(x)) stays what it
was. Letters: B batch, X the axes of the grid, L tokens, D channels of a token, P points, C channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ups.distributed.ranks import ALONE, Ranks
from ups.nn.patches import ChannelMap
from ups.trained.autoencoder import Autoencoder

# Singular values below this share of the largest count as this: what has no effect isn't blown up.
LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class LatentFrames:
    """Latents of some frames of one array of one task.

    Attributes:
        task: Name of the task.
        array: Which array.
        items: Number of each frame among all of its array, int64, shape (B,).
        tokens: Shape (B, L, D).
        parameters: In the order of the model, shape (B, Q).
    """

    task: str
    array: str
    items: Tensor
    tokens: Tensor
    parameters: Tensor


@dataclass(frozen=True)
class DecoderSpectrum:
    """Singular values of the decoder, per token, of normalised fields by latents.

    Attributes:
        singular_values: Square roots of the eigenvalues of G = E[J^T J], shape (D,), going down.
        least: The smallest singular value of any J that was looked at.
        largest: The largest one.
    """

    singular_values: tuple[float, ...]
    least: float
    largest: float

    @property
    def condition(self) -> float:
        """Largest over smallest of `singular_values`; infinite where a channel has no effect."""
        smallest = self.singular_values[-1]
        return self.singular_values[0] / smallest if smallest else float("inf")


@torch.no_grad()
def token_gram(model: Autoencoder, frames: LatentFrames, *, query: Tensor, seed: int = 0) -> Tensor:
    """J^T J of one token of each frame, drawn at random by its number, by D Jacobian-vector products.

    A decoder without networks needs none: on the grid a token moves its own cell, everywhere alike.

    Args:
        model: In evaluation mode.
        frames: Latents at which the decoder is differentiated.
        query: Centres of the grid's cells, shape (P, N).
        seed: Of the tokens.

    Returns:
        float64, shape (B, D, D).
    """
    num, num_tokens, dim = frames.tokens.shape
    chosen = chosen_tokens(frames.items, num_tokens=num_tokens, seed=seed)
    condition = model.condition(frames.task, frames.parameters)
    decoder = model.decoder_of(model.spec.tasks[frames.task].grid)
    if not decoder.has_network:
        basis = decoder.basis_of(frames.array)
        jacobian_PD = (basis.vectors * basis.scale).double()
        return (jacobian_PD.mT @ jacobian_PD).expand(num, dim, dim)

    def decode(tokens_BLD: Tensor) -> Tensor:
        return decoder(tokens_BLD, query, condition, array=frames.array)

    columns = []
    for channel in range(dim):
        tangent_BLD = torch.zeros_like(frames.tokens)
        tangent_BLD[torch.arange(num), chosen, channel] = 1.0
        with warnings.catch_warnings():  # PyTorch loads its rules by `torch.jit.script`, and warns of itself
            warnings.simplefilter("ignore", DeprecationWarning)
            moved_BPC = torch.func.jvp(decode, (frames.tokens,), (tangent_BLD,))[1]
        columns.append(moved_BPC.flatten(1).double())
    jacobian_BVD = torch.stack(columns, dim=-1)
    return jacobian_BVD.mT @ jacobian_BVD


def chosen_tokens(items: Tensor, *, num_tokens: int, seed: int) -> Tensor:
    """A random token of each frame, the same whichever frames are looked at beside it."""
    drawn = np.random.Generator(np.random.PCG64(seed)).random(int(items.max()) + 1)
    return (torch.from_numpy(drawn)[items] * num_tokens).long()


def spectrum_of(grams_BDD: Tensor) -> DecoderSpectrum:
    """Singular values from `token_gram`."""
    of_mean = torch.linalg.eigvalsh(grams_BDD.mean(0)).clamp(min=0).sqrt().flip(0)
    of_each = torch.linalg.eigvalsh(grams_BDD).clamp(min=0).sqrt()
    return DecoderSpectrum(tuple(of_mean.tolist()), float(of_each.min()), float(of_each.max()))


def is_isometric(model: Autoencoder) -> bool:
    """Whether there is nothing to make isometric: it was done, or isn't wanted, or nothing is trained."""
    maps = [module for module in model.modules() if isinstance(module, ChannelMap)]
    return not any(torch.equal(one.matrix, torch.eye(len(one.matrix)).to(one.matrix)) for one in maps)


@torch.no_grad()
def make_isometric(
    model: Autoencoder,
    sample: Iterable[LatentFrames],
    *,
    queries: Mapping[str, Tensor],
    ranks: Ranks = ALONE,
) -> None:
    """Rescale the latents of an autoencoder, in place, so that G is a multiple of the identity.

    The scale is such that latents have the mean square 1, as those of a `PatchBasis`. Of tasks that share a
    decoder each array has one map, of the mean over their frames.

    Args:
        model: In evaluation mode, with `encoder.isometry`; its maps are replaced.
        sample: Latents that the model has given.
        queries: Centres of the grid's cells by task, on the model's device.
        ranks: The processes that measure together, each its share of the frames; then it is a collective.
    """
    found: dict[tuple[str, str], list[tuple[Tensor, ...]]] = {}
    for frames in sample:
        gram = token_gram(model, frames, query=queries[frames.task])
        found.setdefault((frames.task, frames.array), []).append((frames.items, gram, frames.tokens.double()))
    of_grid: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = {}
    for (task, array), some in found.items():
        items, grams, tokens = map(torch.cat, zip(*some, strict=True))
        joined = ranks.joined(items, grams), ranks.joined(items, tokens).flatten(0, 1)
        of_grid.setdefault((model.spec.tasks[task].grid.name, array), []).append(joined)
    for (grid, array), parts in of_grid.items():
        there = model.get_submodule(f"encoder.{grid}.to_isometry.{array}")
        back = model.get_submodule(f"decoder.{grid}.from_isometry.{array}")
        assert isinstance(there, ChannelMap)
        assert isinstance(back, ChannelMap)
        grams, tokens = (torch.cat(some).to(back.matrix.device) for some in zip(*parts, strict=True))
        _set_maps(there, back, grams.mean(0), tokens)


def _set_maps(there: ChannelMap, back: ChannelMap, gram_DD: Tensor, tokens_RD: Tensor) -> None:
    """Put c G^(1/2) behind what the encoder's map does, and its inverse before the decoder's."""
    eigenvalues, vectors = torch.linalg.eigh(gram_DD)
    singular = eigenvalues.clamp(min=0).sqrt()
    has_effect = singular > LEAST_SHARE * singular.max()
    if not has_effect.any():
        return
    singular = torch.where(has_effect, singular, LEAST_SHARE * singular.max())
    root_DD = vectors * singular @ vectors.T
    power = ((tokens_RD - tokens_RD.mean(0)) @ root_DD).square().mean(0).sum() / has_effect.sum()
    scale = power.rsqrt() if power > 0 else 1.0
    there.matrix.copy_(scale * root_DD @ there.matrix.double())
    back.matrix.copy_(back.matrix.double() @ (vectors / singular @ vectors.T) / scale)
