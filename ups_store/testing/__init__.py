"""A disk that loses what wasn't synced, for tests of power losses (`ups_store.testing.disk`)."""
