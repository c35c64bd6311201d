"""Where training data comes from, and what turns it into samples and batches.

Each of these uses what stands behind it:

- stage `autoencoder`: `frames` (batches of frames), `field_statistics`, `fields` (a store's, or from HDF5),
  `hdf5_split`.
- stages `operator` and `joint`: `window_batches` (batches of windows), `task_windows` (windows of a store),
  `state_stores` (which store), `state_statistics`; `on_demand` has the same while latents are being encoded.
- validation and evaluation: `trajectories`, `latent_trajectories`; baselines are trained on `field_windows`.
- `ups predict`: `given_states`, `prediction_store`.
- for several of them: `batching`, `augment`, `augment_windows`, `store_places`, `split_plan`.
- for the rest of `ups`, which doesn't import `ups_store`: `config`, `errors`, `build_files`.
- `solvers` make data sets in the layout of PDEBench.
"""

from ups.errors import check_installed

check_installed("torch", extra="train")
