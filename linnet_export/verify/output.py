"""A report in files: report.json with every figure, report.html to look at, and the answers as samples.

    write_report(report, Path("checks/NAME-BF16"))
    write_samples(report, Path("samples.json"))

What is there already under these names is replaced.
"""

import json
import math
from pathlib import Path
from typing import Any

from linnet_export import files
from linnet_export.converters.hf import RECORD
from linnet_export.errors import OutputError
from linnet_export.verify.records import Report

REPORT_JSON, REPORT_HTML = "report.json", "report.html"


def report_json(report: Report) -> str:
    """The whole report as strict JSON: what is not a finite number is null."""
    return _json(report.data())


def write_report(report: Report, directory: Path) -> tuple[Path, Path]:
    """Writes report.json and report.html into a directory, and returns their paths."""
    from linnet_export.verify import page

    if directory.exists() and not directory.is_dir():
        raise OutputError(f"{directory} is a file; a directory is needed")
    contents = {REPORT_JSON: report_json(report), REPORT_HTML: page.html(report)}
    for name, content in contents.items():
        _write(directory / name, content)
    return directory / REPORT_JSON, directory / REPORT_HTML


def write_samples(report: Report, path: Path) -> None:
    """Writes the answers of all runtimes in the schema of a card's samples.json: one object, or a list of several."""
    samples = [sample.sample() for runtime in report.runtimes for sample in runtime.samples]
    _write(path, _json(samples[0] if len(samples) == 1 else samples))


def record_of(export: Path) -> Path:
    """Where the report of an export is kept: in its directory, or beside NAME.gguf as NAME.verify.json."""
    return export / RECORD if export.is_dir() else export.with_name(f"{export.stem}.{RECORD}")


def write_record(report: Report, export: Path) -> Path:
    """Writes the report where `record_of` says, and returns that path."""
    path = record_of(export)
    _write(path, report_json(report))
    return path


def _write(path: Path, content: str) -> None:
    with files.new_file(path, force=True) as partial:
        partial.write_text(content, encoding="utf-8")


def _json(value: object) -> str:
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
