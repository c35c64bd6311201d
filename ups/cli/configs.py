"""The verb `configs`: the configurations that the package ships, and their text."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from ups.cli.common import AsJson
from ups.errors import ConfigError
from ups_store.build import near_config, shipped_configs
from ups_store.command_line import Verb, Verbs
from ups_store.console import importing, print_json, print_lines

_FIRST = "demo"  # where to begin; the others as their names are sorted

app = typer.Typer(cls=Verbs, invoke_without_command=True)


@app.callback()
def configs(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped configurations; `ups train --config NAME` takes one."""
    if context.invoked_subcommand:
        return
    shipped = shipped_configs()
    names = sorted(shipped, key=lambda name: name != _FIRST)
    found = {name: _first_sentence(shipped[name]) for name in names}
    if as_json:
        print_json(found)
        return
    width = max(map(len, found))
    for name, sentence in found.items():
        print_lines(f"{name:<{width}}  {sentence}")


@app.command(cls=Verb)
def show(name: Annotated[str, typer.Argument(help="such as demo, or pdebench/burgers1d")]) -> None:
    """Print one, to copy and change: `ups configs show demo > mine.yaml`."""
    file = shipped_configs().get(name.removesuffix(".yaml"))
    if file is None:
        near = near_config(Path(name))
        hint = f"did you mean {near}?" if near else "`ups configs` lists them"
        raise ConfigError(f"{name}: no such configuration is shipped", hint=hint)
    print_lines(*file.read_text(encoding="utf-8").splitlines())


@app.command(cls=Verb)
def operator(
    name: Annotated[str | None, typer.Argument(help="such as fno, or mylab.model:Net of your own")] = None,
) -> None:
    """Print the keys of an operator's `operator.config`; without a name, which operators there are."""
    with importing():
        from pydantic_core import to_jsonable_python

        from ups.models.operator_size import TOKEN_UNET
        from ups.models.operators import config_section, operators
    if name is None:
        print_lines(*operators.names())
        return
    if name == TOKEN_UNET:
        print_lines(
            "keys of the package's own operator are operator.mixer, size, width, depths, spectral and so on"
        )
        return
    fields = config_section(name).model_fields
    print_lines("operator:", f"  name: {name}", "  config:")
    for key, field in fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "" if field.is_required() else f" {json.dumps(to_jsonable_python(default))}"
        about = "; ".join(filter(None, ("needed" if field.is_required() else "", field.description)))
        print_lines(f"    {key}:{shown}  # {about}" if about else f"    {key}:{shown}")


def _first_sentence(file: Path) -> str:
    """Of the comment that a configuration starts with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text("utf-8").splitlines())
    comment = " ".join(line.removeprefix("#").strip() for line in lines)
    return re.split(r"[.;] ", comment, maxsplit=1)[0].rstrip(".:")
