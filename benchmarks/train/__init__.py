"""A training step beside a bare loop, its products alone, and the step of an earlier commit."""
