"""Reading simulations that others wrote: what a file holds, which files make a split, and their samples."""
