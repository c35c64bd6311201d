"""`python -m tools.fuzz`."""

import typer

from tools.fuzz.run import main

typer.run(main)
