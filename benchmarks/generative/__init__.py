"""The generative stages beside the operator alone, on tasks whose states have many futures."""
