"""What mkdocs calls: pages made from the code, notebooks that are run, and a check of the finished site."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tools import docs_reference, notebooks
from tools.check_site import problems_of_site

log = logging.getLogger("mkdocs.hooks.docs")  # below mkdocs: with --strict a warning fails the build
REPOSITORY = docs_reference.REPOSITORY


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put a page per command in the navigation, where it says `reference/commands/`."""
    pages = [{program.name: f"reference/commands/{program.name}.md"} for program in docs_reference.programs()]
    config.nav = _filled(config.nav, pages)
    return config


def _filled(nav: Any, pages: list[dict[str, str]]) -> Any:
    if isinstance(nav, list):
        return [_filled(item, pages) for item in nav]
    if isinstance(nav, dict):
        return {
            title: pages if item == "reference/commands/" else _filled(item, pages)
            for title, item in nav.items()
        }
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what isn't in `docs/`; the sources of notebooks give way to the rendered pages."""
    made: dict[str, str | bytes] = dict(docs_reference.reference_pages())
    made |= {uri: _at_the_top(name) for uri, name in docs_reference.MOVED_PAGES.items()}
    for path in sorted(notebooks.FOLDER.glob("*.py")):
        made |= _rendered(path, path.stat().st_mtime_ns)
        files.remove(files.src_uris[f"notebooks/{path.name}"])
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, /, **about: Any) -> str:
    """Lead links to what a clone has to the pages that the site has instead."""
    markdown = re.sub(r"(\]\(notebooks/\w+)\.py\)", r"\1.md)", markdown)
    for uri, name in docs_reference.MOVED_PAGES.items():
        markdown = markdown.replace(f"](../{name})", f"]({uri})")
    return markdown


def _at_the_top(name: str) -> str:
    """A page of the repository's root, whose links begin with `docs/`."""
    return (REPOSITORY / name).read_text(encoding="utf-8").replace("](docs/", "](")


@cache  # while `make docs-serve` builds again and again
def _rendered(path: Path, modified_ns: int) -> dict[str, str | bytes]:
    page, images = notebooks.to_markdown(path, notebooks.run(path))
    return {
        f"notebooks/{path.stem}.md": page,
        f"notebooks/{path.stem}.ipynb": notebooks.to_ipynb(path),
        **{f"notebooks/{name}": image for name, image in images.items()},
    }


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of links that lead nowhere, and of anything that the site would load from the network."""
    for problem in problems_of_site(Path(config.site_dir)):
        log.warning(problem)
