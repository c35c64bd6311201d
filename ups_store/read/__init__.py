"""Reading stores: opening, gathering, the order of epochs, preloading, verifying."""
