"""The same samples through every peer: other ways to keep a training set, one small file each.

`make bench-peers` makes their environment, measures, and writes the tables of `docs/performance.md`.
"""
