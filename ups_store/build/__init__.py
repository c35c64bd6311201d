"""`python -m ups_store.build`: from source files to stores."""
