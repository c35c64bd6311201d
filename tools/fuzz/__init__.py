"""Change good files at random, read what comes out, and see that nothing but a typed error ever happens.

    python -m tools.fuzz --kind store --inputs 1000000

The kinds are stores (`stores`), HDF5 files (`hdf5`), and YAML, `.pt`, safetensors and models (`inputs`). Each
input is a function of seed and number. Results go to docs/results/reliability.md.
"""
