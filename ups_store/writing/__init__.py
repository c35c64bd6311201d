"""Making stores: the building file, commits, and what publishes a file."""
