"""A folder in which latents are built: a Burgers file in PDEBench's layout, an encoder, a configuration."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from test_encode_loop import make_checkpoint

T, X = 5, 32


def write_latent_run(folder: Path, *, num_samples: int, config: str) -> Path:
    """Write data/, checkpoints/ and run.yaml with the text of `config` below a folder; returns the folder."""
    (folder / "data").mkdir()
    with h5py.File(folder / "data" / "1D_Burgers_Sols_Nu0.01.hdf5", "w") as file:
        file["tensor"] = np.random.default_rng(0).standard_normal((num_samples, T, X)).astype(np.float32)
        file["x-coordinate"] = np.linspace(0, 1, X, dtype=np.float32)
        file["t-coordinate"] = np.linspace(0, 2, T + 1, dtype=np.float32)
        file.attrs["Nu"] = 0.01
    make_checkpoint(folder / "checkpoints")
    (folder / "run.yaml").write_text(config)
    return folder
