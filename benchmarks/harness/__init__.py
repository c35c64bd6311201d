"""What benchmarks share: inputs, measuring, reports; `run` measures all of them."""
