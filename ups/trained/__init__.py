"""What a trained file is and does: checkpoints, autoencoder, simulator, encoder."""

from ups.errors import check_installed

check_installed("torch", "safetensors", extra="train")
