"""Where training data comes from, and what turns it into samples and batches.

Each of these uses what stands behind it:

- all: `stores` (where they lie), `splits` (opens them, or HDF5 into memory), `windows` (samples of a split).
- training: `batches` (of frames and windows), which the loader of `ups_store.torch` makes; `augment`,
  `statistics`; `latents` builds what an operator is trained on.
- `ups predict`: `prediction_files`.
- `solvers` make data sets in the layout of PDEBench.
"""

from ups.errors import check_installed

check_installed("torch", extra="train")
