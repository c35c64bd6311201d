"""Where training data comes from: solvers that make it, and what turns stored fields into samples."""
