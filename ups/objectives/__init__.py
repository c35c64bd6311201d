"""Losses: batch and model in, named losses out."""
