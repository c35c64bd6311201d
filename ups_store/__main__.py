"""`python -m ups_store VERB`, as `ups-store VERB`."""

from ups_store.cli import main

main()
