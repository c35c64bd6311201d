from ups.cli.precompute import precompute

if __name__ == "__main__":  # as `ups-store build latent={}`
    precompute()
