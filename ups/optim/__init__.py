"""Optimisers, learning rates and averaged weights; they see parameters and their names, never physics."""
