"""The files of a report: JSON, CSV and one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from ups.errors import OutputError
from ups.eval.report import Report
from ups.eval.report_page import to_html
from ups.output import sync_folder, write_synced


def write_report(folder: Path, report: Report) -> dict[str, Path]:
    """Write `report.json`, `report.csv` and `report.html`; returns where they are, by suffix.

    Raises:
        OutputError: None of them is changed then.
    """
    texts = {
        "json": json.dumps(report.to_json(), indent=2, default=str, allow_nan=False) + "\n",
        "csv": report.to_csv(),
        "html": to_html(report),
    }
    paths = {suffix: folder / f"report.{suffix}" for suffix in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".report", dir=folder) as partial:
            written = {suffix: Path(partial) / path.name for suffix, path in paths.items()}
            for suffix, text in texts.items():
                write_synced(written[suffix], text.encode())
            for suffix, path in paths.items():
                written[suffix].replace(path)
            sync_folder(folder)
    except OSError as error:
        raise OutputError.of(error, folder) from error
    return paths
