"""A disk that loses what wasn't synced, for tests of what survives a power loss (`ups_store.testing.disk`)."""
