"""Benchmarks, asv layout: one file per operation; `python -m benchmarks.run` runs them all here and now."""
