"""What all commands share as typer sees them: -h, -q and -v on every verb, earlier flags, URLs refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ups_store.console import log, set_quiet, set_verbosity
from ups_store.errors import needs
from ups_store.launch import ALLOWED_VARIABLES
from ups_store.old_names import FLAGS
from ups_store.system.paths import check_local, is_remote

with needs("cli"):
    import typer
    from typer.core import TyperCommand, TyperGroup

_Function = TypeVar("_Function", bound=Callable[..., Any])

_HELP = {"help_option_names": ["-h", "--help"]}


class _WithCommonOptions:
    """Adds -q and -v, which may stand before and behind a verb, and translates flags of earlier versions."""

    params: list[Any]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        is_configured = any(parameter.name == "config" for parameter in self.params)
        added = [option for option in _common_options() if is_configured or option.name != "allow_env"]
        self.params = [*self.params, *added]

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        present = args if context.resilient_parsing else self._present(args)  # a shell asks about half a line
        try:
            return super().parse_args(context, present)  # type: ignore[misc,no-any-return]
        except Exception as error:  # by its attributes: some releases of typer bring a click of their own
            if isinstance(message := getattr(error, "message", None), str):  # some begin as pydantic's do
                error.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]
            raise

    def _present(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments with today's flags; a verb that has one of an earlier name keeps it."""
        known = {flag for parameter in self.params for flag in parameter.opts}
        present = []
        for argument in arguments:
            flag, equals, value = argument.partition("=")
            renamed = FLAGS.get(flag) if flag not in known else None
            present.append(f"{renamed}{equals}{value}" if renamed in known else argument)
        return present


def _allow_variables(names: list[str] | None) -> None:
    """Have this process, and those that it starts, take the word of the command line."""
    if names:
        for name in set(names).difference(os.environ):
            log(f"--allow-env {name}: no such variable in the environment", label="warning", style="yellow")
        os.environ[ALLOWED_VARIABLES] = ",".join([*names, os.environ.get(ALLOWED_VARIABLES, "")])


_AllowEnv = typer.Option(
    callback=_allow_variables,
    metavar="NAME",
    help="variable that the configuration may tell other machines by a URL, or an included file use",
)
_Quiet = typer.Option(
    "--quiet", "-q", callback=set_quiet, help="results, warnings and errors only; no progress"
)
_Verbose = typer.Option(
    "--verbose", "-v", count=True, callback=set_verbosity, show_default=False, help="more; -vv: tracebacks"
)


@cache
def _common_options() -> list[Any]:
    """Make the options that every verb has; their callbacks are all that reads them."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def common(
        allow_env: Annotated[list[str] | None, _AllowEnv] = None,
        quiet: Annotated[bool, _Quiet] = False,
        verbose: Annotated[int, _Verbose] = 0,
    ) -> None: ...

    options = list(typer.main.get_command(app).params)
    for option in options:
        option.expose_value = False
    return options


class Verb(_WithCommonOptions, TyperCommand):
    """A verb with the options that all have."""


class Verbs(_WithCommonOptions, TyperGroup):
    """The verbs of a command; the common options may stand before the verb, too."""


def make_app(verbs: Mapping[str, Callable[..., Any]], *, cls: type[Verbs] = Verbs) -> typer.Typer:
    """Make a command of several verbs, in the order of the help, with completion for the user's shell."""
    app = typer.Typer(
        cls=cls,
        no_args_is_help=True,
        rich_markup_mode=None,  # a quarter of the time that --help takes
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    for name, function in verbs.items():
        app.command(name, cls=Verb)(_refusing_urls(function))
    return app


def make_single(function: Callable[..., Any], *, cls: type[Verb] = Verb) -> typer.Typer:
    """Make a command without verbs."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=cls, context_settings=_HELP)(_refusing_urls(function))
    return app


def reading_urls(*names: str) -> Callable[[_Function], _Function]:
    """Have a verb take URLs as these of its arguments, which it gives to `ups_store.open`."""

    def mark(verb: _Function) -> _Function:
        verb.__dict__["url_arguments"] = names
        return verb

    return mark


def _refusing_urls(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Have a verb never see what `pathlib` makes of a URL, unless it reads URLs."""
    read = getattr(verb, "url_arguments", ())

    @wraps(verb)
    def checked(**given: Any) -> Any:
        for name, value in given.items():
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, Path) and not (name in read and is_remote(path)):
                    check_local(path)
        return verb(**given)

    return checked


def completing(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Offer a shell values that there are, once it asks: the `autocompletion` of `typer.Option`."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in known() if word.startswith(incomplete)]

    return complete
