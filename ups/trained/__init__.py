"""What a trained file is and does: checkpoints, autoencoder, simulator, encoder."""
