"""Benchmarks, asv layout: one file per operation.

`python -m benchmarks.harness.run` runs them all here and now.
"""
