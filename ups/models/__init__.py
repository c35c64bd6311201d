"""Architectures: encoder and decoder of fields. They don't know each other:
`ups.trained.autoencoder` joins them.
"""
