"""Where training data comes from, and what turns it into samples and batches.

Each of these uses what stands behind it:

- all stages: `batches`, which the loader of `ups_store.torch` makes; `augment`, `statistics`, `stores`.
- stage `autoencoder`: `field_batches` (frames), `fields` (a store's, or from HDF5).
- stages `operator` and `joint`: `windows` (of a store); `on_demand` while latents are being encoded.
- validation, evaluation: `trajectories`, `latent_trajectories`; baselines train on `field_batches`.
- `ups predict`: `prediction_files`.
- `solvers` make data sets in the layout of PDEBench.
"""

from ups.errors import check_installed

check_installed("torch", extra="train")
