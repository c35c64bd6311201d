from ups.cli import main

if __name__ == "__main__":  # as `ups lineage`
    main("lineage")
