"""The C++ kernel's library: built once, kept, used ahead of a compiler, and done without where it cannot be had.

Where a test needs a compiler that only has to deliver, a script that counts its calls stands in for it and copies the
library of all tests.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import spheret
from spheret.kernels import cpp

NewProcess = Callable[..., subprocess.CompletedProcess[str]]
pytestmark = [
    pytest.mark.usefixtures("compiled_kernel"),
    pytest.mark.skipif(os.name != "posix", reason="the compiler's stand-in is a shell script"),
]

INSTRUCTIONS = cpp.instruction_set()
NAME = cpp.library_name(INSTRUCTIONS)
# What a program would see: which backend, and that a retraction works, whoever serves it.
ASK = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, spheret
    h, f = torch.randn(4, 8), torch.randn(4, 8)
    told = spheret.which_backend(h, f)
    out = spheret.retract(h, f, alpha=0.7)
    spheret.retract(h, f, alpha=0.3)
torch.testing.assert_close(out.double(), spheret.retract(h.double(), f.double(), alpha=0.7), rtol=1e-5, atol=1e-5)
ours = [str(w.message) for w in caught if "C++ kernel" in str(w.message)]
print(f"{told.name}|{told.reason}|{len(ours)}|{''.join(ours)}")
"""


@pytest.fixture(scope="session")
def library(kernel_library: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernel_library or cpp.build(tmp_path_factory.mktemp("library"), INSTRUCTIONS)


@pytest.fixture
def compiler(library: Path, tmp_path: Path) -> Path:
    """Stands in for a compiler; every call is a line in the file ``calls`` beside it."""
    script = tmp_path / "bin" / "cxx"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\necho called >> "{script.parent}/calls"\nsleep 1\n'
        f'while [ "$1" != -o ]; do shift; done\nexec cp "{library}" "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def calls(compiler: Path) -> int:
    log = compiler.parent / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process looks for the kernel again, as if it had none; the next test has the one that is loaded."""
    monkeypatch.setattr(cpp, "_obstacle", None)
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))


def formulas_because() -> str:
    """Why the formulas serve a call, which they do without a warning."""
    h, f = torch.randn(4, 8), torch.randn(4, 8)
    name, reason = spheret.which_backend(h, f)
    out = spheret.retract(h, f, alpha=0.7)
    torch.testing.assert_close(out.double(), spheret.retract(h.double(), f.double(), alpha=0.7), rtol=1e-5, atol=1e-5)
    assert name == "autograd"
    return reason


def ask(in_new_process: NewProcess, **environment: str | None) -> tuple[str, str, int, str]:
    """Backend, reason, number of warnings and their text."""
    out = in_new_process(ASK, SPHERET_BACKEND=None, **environment)
    assert out.returncode == 0, out.stderr
    name, reason, warned, text = out.stdout.strip().split("|")
    return name, reason, int(warned), text


# --- a cache that works ---


def test_it_is_built_at_the_first_use_alone(compiler: Path, tmp_path: Path, in_new_process: NewProcess) -> None:
    """And says so, with the seconds."""
    cache = tmp_path / "cache"
    first, second = (in_new_process(ASK, CXX=str(compiler), SPHERET_CACHE=str(cache)) for _ in range(2))
    for out in (first, second):
        assert out.stdout.startswith("cpp|") and f"{INSTRUCTIONS} instructions" in out.stdout
        assert out.stdout.split("|")[2] == "0"
    assert "compiling the CPU kernel (once per PyTorch version and processor)" in first.stderr
    assert re.search(rf"compiled in \d+ s: .*{re.escape(NAME)}", first.stderr)
    assert "spheret:" not in second.stderr
    assert calls(compiler) == 1 and (cache / "kernels" / NAME).exists()
    assert not [p for p in (cache / "kernels").iterdir() if p.name.startswith(".build")]


def test_an_import_compiles_nothing(compiler: Path, tmp_path: Path, in_new_process: NewProcess) -> None:
    out = in_new_process("import spheret", CXX=str(compiler), SPHERET_CACHE=str(tmp_path / "cache"))
    assert out.returncode == 0 and calls(compiler) == 0 and not (tmp_path / "cache").exists()


def test_of_processes_that_start_at_once_one_builds(compiler: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env |= {"CXX": str(compiler), "SPHERET_CACHE": str(tmp_path / "cache")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", ASK], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.startswith("cpp|"), err
    assert calls(compiler) == 1


def test_a_library_that_is_cut_short_is_built_again(
    library: Path, compiler: Path, tmp_path: Path, in_new_process: NewProcess
) -> None:
    """As a full disk leaves it. To load it can end the process by a signal."""
    kept = tmp_path / "cache" / "kernels" / NAME
    kept.parent.mkdir(parents=True)
    for share in (0.0, 0.1, 0.5):
        kept.write_bytes(library.read_bytes()[: int(share * library.stat().st_size)])
        assert not cpp._is_whole(kept)
    name, _, warned, _ = ask(in_new_process, CXX=str(compiler), SPHERET_CACHE=str(tmp_path / "cache"))
    assert name == "cpp" and warned == 0 and calls(compiler) == 1
    assert kept.read_bytes().startswith(library.read_bytes())


def test_the_name_holds_all_that_the_library_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {cpp.library_name(instructions) for instructions in ("AVX512", "AVX2", "DEFAULT")}
    monkeypatch.setattr(cpp.torch, "__version__", "1.2.3")
    names.add(cpp.library_name("DEFAULT"))
    other = tmp_path / "retract.cpp"
    other.write_bytes(cpp.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(cpp, "SOURCE", other)
    names.add(cpp.library_name("DEFAULT"))
    assert len(names) == 5


# --- a cache that does not ---


def test_without_a_usable_cache_it_is_built_for_this_process(
    compiler: Path, tmp_path: Path, in_new_process: NewProcess
) -> None:
    blocked = tmp_path / "cache"
    blocked.write_text("")
    name, _, warned, text = ask(in_new_process, CXX=str(compiler), SPHERET_CACHE=str(blocked / "deeper"))
    assert name == "cpp" and calls(compiler) == 1
    assert warned == 1 and "built for this process only" in text and str(blocked) in text


def test_without_a_home_it_is_built_for_this_process(compiler: Path, in_new_process: NewProcess) -> None:
    """A container whose user id is in no list of users."""
    code = "import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n" + ASK
    out = in_new_process(code, CXX=str(compiler), HOME=None, SPHERET_CACHE=None, SPHERET_BACKEND=None)
    assert out.returncode == 0, out.stderr
    name, _, warned, text = out.stdout.strip().split("|")
    assert (name, warned) == ("cpp", "1") and "home" in text and calls(compiler) == 1


# --- no compiler ---


def test_without_a_compiler_the_formulas_serve(tmp_path: Path, in_new_process: NewProcess) -> None:
    """And where the C++ kernel is forced, the reason is the error."""
    empty = tmp_path / "empty"
    empty.mkdir()
    code = ASK + "with spheret.backend('cpp'): spheret.retract(h, f)"
    out = in_new_process(code, PATH=str(empty), CXX=None, SPHERET_CACHE=str(tmp_path / "cache"), SPHERET_BACKEND=None)
    name, reason, warned, _ = out.stdout.strip().split("|")
    assert (name, warned) == ("autograd", "0")
    assert "no C++ compiler: install g++ or clang++, or name one in $CXX" in reason
    assert out.returncode == 1 and "'cpp' cannot serve this call: no C++ kernel: no C++ compiler" in out.stderr


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(
    ("cxx", "expected"), [("/bin/false", "/bin/false could not compile"), ("/no/such", "/no/such")]
)
def test_a_compiler_that_fails_is_the_reason(cxx: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", cxx)
    assert expected in formulas_because()


@pytest.mark.usefixtures("without_library")
def test_an_error_in_the_source_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its first line with an error; that it names a folder of /home changes nothing."""
    script = tmp_path / "cxx"
    script.write_text('#!/bin/sh\necho "note: in file" >&2\necho "/home/x.cpp:3: error: no such type" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert formulas_because().endswith("/home/x.cpp:3: error: no such type")


# --- built ahead ---


def test_a_library_beside_the_source_needs_no_compiler(compiler: Path, tmp_path: Path) -> None:
    """As in a wheel or an image: built by ``python -m spheret.kernels.cpp``."""
    site = tmp_path / "site"
    source = Path(spheret.__file__).parent
    shutil.copytree(source, site / "spheret", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    path = os.pathsep.join([str(site), *(p for p in sys.path if p and Path(p).resolve() != source.parent)])
    env = {**os.environ, "PYTHONPATH": path, "CXX": str(compiler), "SPHERET_CACHE": str(tmp_path / "cache")}
    build = subprocess.run([sys.executable, "-m", "spheret.kernels.cpp"], env=env, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    beside = site / "spheret" / "kernels" / "csrc" / NAME
    assert build.stdout.strip() == str(beside) and beside.exists() and calls(compiler) == 1
    env = {**env, "PATH": str(tmp_path / "nothing")}
    del env["CXX"]
    out = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.startswith("cpp|"), out.stderr
    assert not (tmp_path / "cache").exists()


# --- every processor ---


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["AVX2", "DEFAULT"])
def test_other_instruction_sets_give_results_of_the_same_precision(instructions: str, tmp_path: Path) -> None:
    """The tests against the formulas again, on a processor that PyTorch takes for an older one."""
    if INSTRUCTIONS in (instructions, "DEFAULT"):
        pytest.skip(f"this processor has {INSTRUCTIONS} instructions")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env |= {"ATEN_CPU_CAPABILITY": instructions.lower(), "SPHERET_CACHE": str(tmp_path)}
    chosen = "formulas or any_angle or squares or layout"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    command.append(str(Path(__file__).with_name("test_ops.py")))
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stdout
    kept = {name for name in os.listdir(tmp_path / "kernels") if not name.endswith(".lock")}
    assert kept == {cpp.library_name(instructions)}
