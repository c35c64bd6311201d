"""What the words of the command line mean before a parser or a configuration sees them."""

from __future__ import annotations

from collections.abc import Sequence

from ups_store.errors import ConfigError

_LISTS = ("--tasks", "--splits")  # take several words: --tasks burgers1d advection1d


def num_workers_of(text: str | None, parallel: bool | None) -> int | str | None:
    """`reading.num_workers` of --num-workers and --parallel or --no-parallel.

    Raises:
        ConfigError: If they contradict each other.
    """
    if parallel is False and text not in (None, "0"):
        raise ConfigError("--num-workers", expected="0 beside --no-parallel", found=text)
    if text is None and parallel is not None:
        return "auto" if parallel else 0
    return count_of(text)


def count_of(text: str | None) -> int | str | None:
    """A number, or a word that the configuration knows or refuses."""
    return int(text) if text and text.isdecimal() else text


def repeat_lists(arguments: Sequence[str]) -> list[str]:
    """Repeat --tasks and --splits before each of their words: `--tasks a b` as `--tasks a --tasks b`.

    Raises:
        ConfigError: If one has no word.
    """
    repeated: list[str] = []
    flag = ""
    for argument in arguments:
        is_word = not argument.startswith("-") and "=" not in argument
        if is_word and flag and repeated[-1] != flag:
            repeated.append(flag)
        if not is_word:
            _expect_words(flag, repeated)
            flag = argument.partition("=")[0]
            flag = flag if flag in _LISTS else ""
        repeated.append(argument)
    _expect_words(flag, repeated)
    return repeated


def _expect_words(flag: str, repeated: Sequence[str]) -> None:
    if flag and repeated[-1] == flag:
        raise ConfigError(flag, expected="at least one name", found="none")


def words_of(lists: Sequence[str]) -> list[str]:
    """The words of a flag that was given several times, perhaps with commas."""
    return [word for words in lists for word in words.split(",")]


def numbers_of(text: str) -> list[float]:
    """The numbers of --split-fractions.

    Raises:
        ConfigError: If they are none.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            "--split-fractions", expected="three numbers, such as 0.8,0.1,0.1", found=text
        ) from error
