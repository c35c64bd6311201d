"""Training: one loop for all stages, the stages, and what a run keeps of itself."""
