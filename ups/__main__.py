"""`python -m ups VERB`, as `ups VERB`."""

from ups.cli import main

if __name__ == "__main__":  # processes that a verb starts import this module, too
    main()
