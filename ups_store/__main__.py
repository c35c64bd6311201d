"""`python -m ups_store VERB`; `python -m ups_store.build` builds."""

from ups_store.cli import main

main()
