"""The verbs of `python -m ups_store VERB`: each parses and calls one function of the package."""
