"""What pyproject.toml can't say: the README for package indexes, where links into the repository are dead."""

import re
from pathlib import Path

from setuptools import setup

IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|#)([^)]*)\)")


def for_an_index(readme: str) -> str:
    """Leave pictures of the repository out, and name its pages instead of linking to them."""
    return LINK.sub(r"`\1`", IMAGE.sub("", readme))


if __name__ == "__main__":
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=for_an_index(text), long_description_content_type="text/markdown")
