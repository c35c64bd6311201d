"""Layers that several models are made of."""
