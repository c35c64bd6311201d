"""How good a prediction is: metrics in field space."""
