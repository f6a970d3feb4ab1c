"""A full-size export: published shapes of Phi-3-mini-4k, 32 layers, 7.64 GB; only with scripts/test --full."""

import json
import sys
from pathlib import Path

import pytest

from runtimes import ROOT, run
from workshop import FIGURES

LIMIT_MB = 1000  # an eighth of the checkpoint: no code path may hold it


@pytest.mark.full
def test_a_full_size_export_stays_under_a_gigabyte(tmp_path: Path) -> None:
    """Peak memory of every job; the times stand beside the converter's, from the same run, in the summary."""
    run([sys.executable, ROOT / "benchmarks/export.py", tmp_path, "--json", tmp_path / "figures.json"])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    for row in rows:
        FIGURES.append(f"{row['job']:<5} {row['tool']:<21} {row['wall_s']:6.1f} s, {row['peak_mb']:5.0f} MB peak")
    ours = {row["job"]: row["peak_mb"] for row in rows if row["tool"] == "linnet-export"}
    assert ours.keys() == {"bf16", "f16", "q8_0", "hf"}
    assert all(peak < LIMIT_MB for peak in ours.values()), ours
