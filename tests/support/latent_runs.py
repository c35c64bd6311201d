"""A folder in which latents are built: a Burgers file in PDEBench's layout, an encoder, a configuration."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from burgers_encoder import make_checkpoint

from ups.trained.encode_loop import BatchEncoder
from ups.trained.encoder import ComputeDtype, LatentEncoder

T, X = 5, 32


def write_latent_run(folder: Path, *, num_samples: int, config: str) -> Path:
    """Write data/, checkpoints/ and run.yaml with the text of `config` below a folder; returns the folder."""
    write_burgers(folder / "data", nu=0.01, num_samples=num_samples)
    make_checkpoint(folder / "checkpoints")
    (folder / "run.yaml").write_text(config)
    return folder


def write_burgers(folder: Path, *, nu: float, num_samples: int, seed: int = 0) -> None:
    """Write noise as PDEBench writes Burgers' equation."""
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / f"1D_Burgers_Sols_Nu{nu}.hdf5", "w") as file:
        random = np.random.default_rng(seed)
        file["tensor"] = random.standard_normal((num_samples, T, X)).astype(np.float32)
        file["x-coordinate"] = np.linspace(0, 1, X, dtype=np.float32)
        file["t-coordinate"] = np.linspace(0, 2, T + 1, dtype=np.float32)
        file.attrs["Nu"] = nu


class OtherEncoder(LatentEncoder):
    """Of another class, and else the same."""


def make_other_encoder(
    checkpoint: Path,
    *,
    task: str,
    device: str,
    compute_dtype: ComputeDtype,
    latent_dtype: str,
    micro_batch: int,
) -> BatchEncoder:
    """As `make_encoder`, for `latent.encoder`."""
    encoder = OtherEncoder.load(
        checkpoint, task=task, device=device, dtype=compute_dtype, latent_dtype=latent_dtype
    )
    return BatchEncoder(encoder, micro_batch=micro_batch)
