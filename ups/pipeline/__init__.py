"""From one configuration to a gated result: checks, the graph of a run and what executes it, rented machines.

`config_checks`, `data_checks`, `run` and what they use import no torch, so that they answer within seconds.
"""
