"""Rendered by tools/notebooks.py; run by tests/docs/test_notebooks.py."""

# %% [markdown]
# # From HDF5 to a rollout
#
# Solve an equation, build stores of the result, train an autoencoder and a latent operator on them, and
# predict. All settings are tiny, so that this page is made in seconds: the operator gets the direction
# right and no more. `ups train --config demo` has settings that work, and takes minutes.
#
# ## Data
#
# `ups make-data` writes HDF5 files in PDEBench's layout. With files from PDEBench, leave this out.

# %%
# !ups make-data burgers1d --out data --samples 60 --points 256

# %% [markdown]
# ## Stores
#
# One configuration serves all commands. Every key has its line in the
# [reference](../reference/config-run.md).

# %%
from pathlib import Path

Path("run.yaml").write_text("""
data: {tasks: burgers1d, root: data, reduce_space: 2}
cache: {dir: cache}
latent: {dim: 4, tokens: 16}
encoder: {patch_size: 8, width: 32, depth: 2}
decoder: {width: 32, depth: 2}
operator:
  size: tiny
  depths: [2]
  window_size: 16
training: {batch_size: 16, stride: 2, latent_cache_dir: latents}
stages:
  autoencoder: {epochs: 1, steps_per_epoch: 60, optimizer: {lr: 4.0e-3}}
  operator: {epochs: 1, steps_per_epoch: 100, optimizer: {lr: 4.0e-3}}
checkpoint: {dir: checkpoints}
""")

# %% [markdown]
# The build cuts the file into training, validation and test split, and makes a store of each.
# `latent.encoder=none` stores the fields themselves.

# %%
# !ups-store build --config run.yaml latent.encoder=none

# %%
import ups_store

store = ups_store.open("cache/burgers1d_test.zarr.zip")
fields, t, x = store["fields"], store["t"], store["x"]
print(f"{fields.shape[0]} trajectories, {fields.shape[1]} time steps, {fields.shape[2]} points")

# %% [markdown]
# ## Train
#
# `ups train` runs the stages that the configuration has: the autoencoder, a build that stores the latents
# of its encoder, and the operator, which learns to advance them. Stop it whenever you like; the same
# command continues.

# %%
# !ups train --config run.yaml

# %% [markdown]
# ## Predict
#
# One file holds all that predicting takes. Give it the first frame of trajectories that it has never seen:

# %%
import numpy as np

import ups

simulator = ups.load("checkpoints/operator.safetensors")
predicted = np.asarray(simulator.rollout(fields[:, 0], steps=20, parameters={"nu": store["nu"][:]}))
truth = fields[:, 2::2]  # the operator was trained on every second time step
predicted.shape, truth.shape

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True)
extent = (x[0], x[-1], t[-1], t[2])
panels = {"truth": truth[0], "prediction": predicted[0], "error": predicted[0] - truth[0]}
for axis, (name, values) in zip(axes, panels.items(), strict=True):
    axis.imshow(values[..., 0], aspect="auto", extent=extent, vmin=-1, vmax=1, cmap="RdBu")
    axis.set(title=name, xlabel="x")
axes[0].set_ylabel("t")

# %% [markdown]
# A number that means something needs something to compare with: a frame that never changes.


# %%
def nrmse(guess):
    """Mean over trajectories and times of the error relative to the field."""
    return float(np.mean(np.sqrt(np.mean((guess - truth) ** 2, axis=2) / np.mean(truth**2, axis=2))))


print(f"operator {nrmse(predicted):.2f}, persistence {nrmse(fields[:, :1]):.2f}")

# %% [markdown]
# `ups evaluate` makes a whole report of it, beside FNO, U-Net and other baselines:
# [Evaluate](../guides/evaluate.md).
