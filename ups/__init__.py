"""Training stack for neural PDE solvers, reading its data from `ups_store` files."""
