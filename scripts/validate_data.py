from ups.cli import main

if __name__ == "__main__":  # as `ups validate data`
    main("validate", "data")
