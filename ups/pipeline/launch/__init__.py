"""The same run on another machine: one script, as a rented machine starts with it, or as a batch job."""
