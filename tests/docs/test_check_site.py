"""The check of the built site finds what leads nowhere, and what would be loaded from the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_site import problems_of_site


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ('<a href="b.html#there">', None),
        ('<a href="https://example.org/x">', None),
        ('<a href="#here">', None),
        ('<link rel="canonical" href="https://example.org">', None),
        ('<a href="c.html">', "c.html leads nowhere"),
        ('<a href="b.html#gone">', "b.html#gone: there is no such place in the page"),
        ('<img src="x.png">', "x.png leads nowhere"),
        (
            '<script src="https://x.org/a.js"></script>',
            "loads https://x.org/a.js from the network",
        ),
        ('<link rel="stylesheet" href="//example.org/a.css">', "loads //example.org/a.css from the network"),
    ],
)
def test_link_is_judged_by_where_it_leads(tmp_path: Path, link: str, problem: str | None) -> None:
    (tmp_path / "a.html").write_text(f'<h1 id="here">A</h1>{link}')
    (tmp_path / "b.html").write_text('<h1 id="there">B</h1>')
    assert list(problems_of_site(tmp_path)) == ([f"a.html: {problem}"] if problem else [])
