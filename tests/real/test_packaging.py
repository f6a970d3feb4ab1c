"""The wheel: only `linnet_export`, every tracked module in it, and the quick tests pass against it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from runtimes import ROOT, run

# Folder in the repository -> package in the wheel.
PACKAGES = {
    "linnet_export": "linnet_export",
    "converters": "linnet_export/converters",
    "reference": "linnet_export/reference",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked files, so that nothing left in the checkout can slip in."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run([*pip, "-w", folder, folder / "source"])
    [built] = folder.glob("*.whl")
    return built


def tracked() -> list[str]:
    """The files that git tracks and that exist."""
    return [name for name in run(["git", "-C", ROOT, "ls-files"]).splitlines() if (ROOT / name).is_file()]


def test_the_wheel_holds_the_tracked_modules_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    expected = {}
    for name in tracked():
        folder, _, rest = name.partition("/")
        if folder in PACKAGES and rest:
            expected[f"{PACKAGES[folder]}/{rest}"] = (ROOT / name).read_bytes()
    assert inside.keys() == expected.keys()
    assert all(inside[name] == content for name, content in expected.items())
    assert "linnet_export/py.typed" in inside
    assert wheel.stat().st_size < 1_000_000


def test_the_quick_tests_pass_against_the_wheel(wheel: Path, tmp_path: Path) -> None:
    site, copy = tmp_path / "site", tmp_path / "copy"
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel])
    # The tests alone, without the packages' folders beside them.
    for name in ("tests", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy / name)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = "import linnet_export.converters as c, linnet_export.reference as r; print(c.__file__, r.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", where], cwd=copy, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        str(site / f"linnet_export/{name}/__init__.py") for name in ("converters", "reference")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", ["converters", "reference"])
def test_a_folder_refuses_to_be_imported_under_its_own_name(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"import linnet_export.{name}" in done.stderr
