"""The package as a whole: what importing it costs, and which way its imports point."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import spheret

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("transformers", "datasets", "matplotlib", "jinja2", "scipy", "pyarrow", "tiktoken", "triton", "numba")


@pytest.mark.parametrize(
    "module", ["spheret", "spheret.data", "spheret.training", "spheret.reporting", "spheret.cli.main"]
)
def test_import_brings_no_optional_package(module: str) -> None:
    code = (
        f"import sys, json, torch; before = set(sys.modules); import {module};"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(out.stdout)}
    assert not loaded & set(HEAVY)


def test_public_names_exist_and_are_documented() -> None:
    for name in spheret.__all__:
        value = getattr(spheret, name)
        assert name == "__version__" or (value.__doc__ and len(value.__doc__) > 20), name


def test_package_is_typed_and_carries_its_template() -> None:
    files = resources.files("spheret")
    assert (files / "py.typed").is_file()
    assert (files / "reporting" / "templates" / "report.html.j2").is_file()


def test_imports_only_point_down_the_layers() -> None:
    tool = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("import-linter is not installed")
    out = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


def test_rooms_are_small() -> None:
    """Median file under 150 lines, none over 500: longer files are rarely read whole."""
    lengths = sorted(len(p.read_text(encoding="utf-8").splitlines()) for p in (ROOT / "src").rglob("*.py"))
    assert lengths[-1] <= 500
    assert lengths[len(lengths) // 2] < 150


def test_no_scheme_is_named_outside_connections() -> None:
    """Models, data, training and evaluation talk to the protocol."""
    schemes = (
        '"pre-ln"',
        '"post-ln"',
        '"peri-ln"',
        '"pre-dyt"',
        '"keel"',
        '"geonorm"',
        '"proj"',
        '"cay"',
        '"gpt-qknorm"',
        '"ngpt"',
        '"angpt"',
    )
    names = (*schemes, "SpheretNorm", "PreLN", "PostLN", "PeriLN", "DyT", "Keel", "GeoNorm")
    for part in ("models", "data", "training", "evaluation", "diagnostics"):
        for path in (ROOT / "src" / "spheret" / part).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            # A configuration has a default scheme, since its user may omit the flag.
            text = text.replace('scheme: str = "pre-ln"', "")
            assert not [name for name in names if name in text], path
