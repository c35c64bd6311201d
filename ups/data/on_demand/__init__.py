"""Latents that are made while they are trained on: `opening.open_training_windows`."""
