"""The package as a whole: what importing it costs, and what its modules export."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import spheret

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("transformers", "datasets", "matplotlib", "jinja2", "scipy", "pyarrow", "tiktoken", "triton", "numba")


def test_import_brings_no_optional_package() -> None:
    """Neither the package nor the rooms that use one: they import it at its first use."""
    rooms = ("spheret", "spheret.data", "spheret.training", "spheret.comparison.statistics", "spheret.reporting.report",
             "spheret.reporting.curves", "spheret.cli.main")  # fmt: skip
    code = (
        f"import sys, json, importlib, torch; before, found = set(sys.modules), {{}}\nfor room in {rooms}:\n"
        "    importlib.import_module(room)\n"
        "    found[room] = sorted({name.partition('.')[0] for name in set(sys.modules) - before})\n"
        "print(json.dumps(found))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {room: set(loaded) & set(HEAVY) for room, loaded in json.loads(out.stdout).items()} == {
        room: set() for room in rooms
    }


def test_public_names_exist_and_are_documented() -> None:
    for name in spheret.__all__:
        value = getattr(spheret, name)
        assert name == "__version__" or (value.__doc__ and len(value.__doc__) > 20), name


def test_package_is_typed_and_carries_its_template() -> None:
    files = resources.files("spheret")
    assert (files / "py.typed").is_file()
    assert (files / "reporting" / "templates" / "report.html.j2").is_file()


def test_no_source_file_is_a_hall() -> None:
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in (ROOT / "src").rglob("*.py")}
    assert not [path for path, lines in lengths.items() if lines > 500]


def modules() -> list[str]:
    """Every module of the package, except those that need an extra to be imported."""
    found = [module.name for module in pkgutil.walk_packages(spheret.__path__, "spheret.")]
    return ["spheret", *(name for name in found if name != "spheret.__main__")]


def test_every_name_in_all_exists() -> None:
    """``from module import *`` works for every module that the installed packages can import."""
    code = """
import importlib, json, sys
failed = {}
for name in json.load(sys.stdin):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").startswith("spheret"):
            failed[name] = str(error)
        continue  # an extra is not installed
    missing = [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
    if missing:
        failed[name] = missing
    else:
        exec(f"from {name} import *", {})
print(json.dumps(failed))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(modules()), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}


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
            if path.name == "config.py":  # the default of GPTConfig: a user may omit the scheme
                text = text.replace('scheme: str = "pre-ln"', "")
            assert not [name for name in names if name in text], path
