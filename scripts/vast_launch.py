import sys

from ups.cli import main

if __name__ == "__main__":  # as `ups launch vast`
    sys.argv[1:2] = ["vast"] if sys.argv[1:2] == ["launch"] else sys.argv[1:2]
    main("launch")
