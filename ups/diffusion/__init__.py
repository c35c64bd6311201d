"""Formulas of generative models: paths from noise to data, distributions of the flow time, samplers.

One formula a function, in the letters of its paper; no models, no data, no files.
"""

from ups.errors import check_installed

check_installed("torch", extra="train")
