"""Where training data comes from, and what turns it into samples and batches.

Each of these uses what stands before it:

- `stores` (where they lie, if they are the wanted ones), `fields` (samples of one), `splits` (opens them,
  or HDF5 into one in memory), `windows` (what is trained on, and trajectories that are evaluated).
- `batches`, which the loader of `ups_store.torch` makes; `augment`, `statistics`, `patch_basis`, `seams`.
- `latents` builds what an operator is trained on, `cached` what generative models are.
- `ups predict`: `predictions`. `solvers` make data sets in the layout of PDEBench.
"""

from ups.errors import check_installed

check_installed("torch", extra="train")
