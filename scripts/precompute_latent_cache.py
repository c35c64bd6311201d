"""The earlier name of `python -m ups_store.build`: the same flags, the same stores."""

from ups_store.build.__main__ import main

if __name__ == "__main__":
    main()
