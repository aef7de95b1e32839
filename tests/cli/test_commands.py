"""The commands as a user meets them: help, its examples, training and resuming, the list of schemes."""

from __future__ import annotations

import inspect
import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from spheret.cli.console import LOG_WIDTH
from spheret.cli.main import COMMANDS, main
from spheret.connections import list_schemes
from spheret.training import config_from_dict

SCALE = {
    "--steps": ["3"],
    "--seeds": ["2"],
    "--lrs": ["1e-3", "1e-2"],
    "--tokenizer": ["bpe:300"],
    "--rounds": ["1"],
}
SHAPE = "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --batch-size 2 --eval-windows 4 --device cpu"


def example(command: str) -> list[str]:
    """The words of the example in a command's help."""
    found = re.search(r"Example: spheret (.*)", inspect.getdoc(COMMANDS[command][0]) or "")
    assert found, f"`spheret {command} --help` has no example"
    words = shlex.split(found[1])
    assert words[0] == command
    return words


def scaled(words: list[str]) -> list[str]:
    """The same with tiny values for the flags that decide how long it takes."""
    result: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word in SCALE
            result += [word, *SCALE.get(word, [])]
        elif not dropping:
            result.append(word)
    return result


def write_corpus(folder: Path, corpus: Path) -> None:
    folder.mkdir()
    for file in corpus.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def test_examples_of_compare_and_report(spheret: Any, tiny: list[str]) -> None:
    code, out, err = spheret(shlex.join(scaled(example("compare"))), *tiny)
    assert code == 0 and not err
    assert "Traceback" not in out and "Report:" in out
    assert max(map(len, re.findall(r"^ .*$", out, re.MULTILINE))) <= LOG_WIDTH
    code, again, err = spheret(shlex.join(example("report")))
    assert code == 0 and not err and "Report:" in again and list(Path("figures").glob("*.svg"))
    first = [entry["scheme"] for entry in json.loads(Path("runs/first/results.json").read_text())["schemes"]]
    assert all(scheme in out and scheme in again for scheme in first)


def test_a_report_that_is_replaced_is_announced(spheret: Any, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spheret.cli.compare.write_report", lambda out, **_: out)  # drawing takes most of the time
    words = "compare --schemes pre-ln --lrs 1e-2 --seeds 1 --steps {} --out runs/same"
    _, first, _ = spheret(words.format(2), *tiny)
    _, repeated, _ = spheret(words.format(2), *tiny)
    _, changed, _ = spheret(words.format(3), *tiny)
    assert "holds another comparison" not in first + repeated
    assert "holds another comparison" in changed and "--steps 2" in changed


def test_a_sweep_and_all_pairs(spheret: Any, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spheret.cli.compare.write_report", lambda out, **_: out)  # drawing takes most of the time
    words = "compare --schemes pre-ln --sweep p=1,inf --lrs 1e-2 --seeds 2 --steps 2 --out swept"
    code, out, _ = spheret(f"{words} --all-pairs", *tiny)
    assert code == 0 and "Comparing pre-ln, proj, spheret:p=inf: 6 runs" in out
    assert "Loss over p of spheret" in out and "All pairs" in out
    command = json.loads(Path("swept/results.json").read_text())["command"]
    code, again, _ = spheret(command.removeprefix("spheret "))
    assert code == 0 and "another comparison" not in again and again.count("reused") == 6 and "All pairs" in again
    code, plain, _ = spheret(words, *tiny)
    assert code == 0 and "All pairs" not in plain
    assert "All pairs" not in spheret("report swept")[1] and "All pairs" in spheret("report swept --all-pairs")[1]


def test_example_of_train(spheret: Any, corpus: Path) -> None:
    write_corpus(Path("my_texts"), corpus)
    code, out, _ = spheret(shlex.join(scaled(example("train"))), *SHAPE.split())
    assert code == 0 and "finished at step 3" in out


def test_example_of_prepare(spheret: Any, corpus: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write_corpus(Path("more"), corpus)
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    parquet.write_table(pyarrow.table({"text": texts}), "corpus.parquet")
    code, out, _ = spheret(shlex.join(scaled(example("prepare"))))
    assert code == 0 and "train_tokens" in out and Path("shards").is_dir()


def test_example_of_bench(spheret: Any) -> None:
    code, out, _ = spheret(shlex.join(scaled(example("bench"))), *SHAPE.partition(" --eval-windows")[0].split())
    assert code == 0 and "nanogpt" in out and "proj" in out


def test_example_of_schemes(spheret: Any) -> None:
    code, out, _ = spheret(shlex.join(example("schemes")))
    assert code == 0 and "arctan" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, spheret: Any) -> None:
    code, out, _ = spheret(f"{command} --help")
    assert code == 0 and f"Example: spheret {command}" in out


def test_help_lists_the_commands(spheret: Any) -> None:
    code, out, _ = spheret("")
    assert code == 0 and all(name in out for name in COMMANDS)


def test_every_scheme_has_a_line_of_its_own(spheret: Any) -> None:
    code, out, _ = spheret("schemes")
    lines = dict(re.findall(r"^(\S+[^:\s]) +(.+)$", out, re.MULTILINE))
    lines = {name: text for name, text in lines.items() if name in list_schemes()}
    assert code == 0 and list(lines) == list_schemes()
    assert len(set(lines.values())) == len(lines)
    assert max(map(len, out.splitlines())) <= LOG_WIDTH


@pytest.mark.parametrize("columns", [80, 100])
def test_the_list_of_schemes_fits_the_terminal(spheret: Any, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = spheret("schemes")
    assert code == 0 and max(map(len, out.splitlines())) <= columns
    for fact in ("equation", "normalised", "parameters", "cost", "source"):
        assert len(re.findall(rf"^    {fact} +\S", out, re.MULTILINE)) >= 6


@pytest.mark.parametrize(
    ("scheme", "parameters"),
    [
        ("pre-ln", "d in a connection, d at the two ends"),
        ("pre-ln:bias=true", "2d in a connection, 2d at the two ends"),
        ("peri-ln", "2d in a connection, 2d at the two ends"),
        ("pre-dyt", "d + 1 in a connection, d + 2 at the two ends"),
        ("spheret:p=learn", "1 in a connection, d + 2 at the two ends"),
        ("proj:final-norm=none,learn-radius=false", "1 in a connection, none at the two ends"),
    ],
)
def test_parameters_are_counted(spheret: Any, scheme: str, parameters: str) -> None:
    _, out, _ = spheret(f"schemes {scheme}")
    assert re.search(rf"^parameters +{re.escape(parameters)}", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("scheme", "caution"),
    [
        ("proj", ""),
        ("cay", ""),
        ("pre-ln", ""),
        ("geonorm", "Because p > 2, a large step (beta > 3.14) rotates the hidden state past its antipode."),
        ("spheret:p=4", "Because p > 2, a large step (beta > 4) rotates the hidden state past its antipode."),
        ("spheret:p=learn", "A learned p can grow above 2."),
    ],
)
def test_a_scheme_whose_steps_can_pass_the_antipode_says_so(
    scheme: str, caution: str, spheret: Any, tiny: list[str]
) -> None:
    _, explained, _ = spheret(f"schemes {scheme}")
    assert (
        re.search(rf"^caution +{re.escape(caution)}", explained, re.MULTILINE)
        if caution
        else "caution" not in explained
    )
    code, trained, _ = spheret(f"train --scheme {scheme} --steps 2 --out run", *tiny)
    assert code == 0
    if not caution:
        assert "Caution" not in trained
        return
    assert trained.startswith(f"Caution, {scheme}: {caution}") and trained.count("Caution") == 1


def test_a_comparison_says_each_caution_once(spheret: Any) -> None:
    names = "pre-ln geonorm spheret:p=learn spheret:p=learn-per-layer"
    code, out, _ = spheret(f"compare --schemes {names} --data nowhere.txt")  # said before the corpus is prepared
    first, *cautions = out.splitlines()
    assert code == 2 and first.startswith("Comparing") and len(cautions) == 2
    assert cautions[0].startswith("Caution, geonorm: Because")
    assert cautions[1].startswith("Caution, spheret:p=learn, spheret:p=learn-per-layer: A learned p")


def test_the_list_of_schemes_holds_the_cautions(spheret: Any) -> None:
    _, out, _ = spheret("schemes")
    assert out.count("    caution") == 2 and re.search(r"caution +Because p > 2", out.partition("gpt-qknorm")[0])


@pytest.mark.parametrize("scheme", list_schemes())
def test_every_option_has_a_meaning(spheret: Any, scheme: str) -> None:
    _, out, _ = spheret(f"schemes {scheme}")
    options = out.partition("Options")[2].splitlines()[1:]
    named = [line.split(maxsplit=1) for line in options if re.match(r"  [a-z-]+=", line)]
    assert named and all(len(words) == 2 for words in named), out


def test_a_scheme_is_explained_with_its_options(spheret: Any) -> None:
    _, out, _ = spheret("schemes spheret:p=0.5,alpha=2")
    assert "theta" in out and "p=0.5" in out and "alpha=2" in out and "preset=paper" in out


@pytest.mark.parametrize(
    ("flag", "steps"), [("--warmup-steps 4", 4), ("--warmup-ratio 0.5", 10), ("--warmup 0.5", 10), ("--warmup=4", 4)]
)
def test_warmup_as_steps_and_as_a_ratio(spheret: Any, tiny: list[str], flag: str, steps: int) -> None:
    code, _, err = spheret(f"train --steps 20 {flag} --out run", *tiny)
    assert code == 0 and ("--warmup is deprecated" in err) == ("-steps" not in flag and "-ratio" not in flag)
    config = config_from_dict(json.loads(Path("run/config.json").read_text()))
    assert config.total_warmup_steps == steps


def test_train_shows_progress_and_resumes(spheret: Any, tiny: list[str]) -> None:
    command = "train --scheme proj --steps 20 --out runs/one"
    code, out, _ = spheret(command, *tiny)
    assert code == 0
    assert re.search(r"^step 20/20 .*val_loss \d.*left 0m00s", out, re.MULTILINE)
    assert len(list(Path("runs/one/checkpoints").iterdir())) == 1

    code, _, err = spheret(command, *tiny)
    assert code == 2 and "already holds a run" in err and "--resume" in err
    code, out, _ = spheret(f"{command} --resume", *tiny)
    assert code == 0 and "finished at step 20" in out
    code, out, err = spheret(f"{command} --resume --lr 1", *tiny)
    assert code == 2 and "runs/one has --lr 0.1 (not 1.0)" in err and "continuing" not in out


@pytest.mark.parametrize("refused", ["--steps 10", "--lr 1", "--seed 3", "--n-layer 2"])
def test_a_refused_resume_does_not_say_that_it_continues(spheret: Any, tiny: list[str], refused: str) -> None:
    """Also where the run was stopped, so that there is something to continue."""
    command = "train --scheme proj --steps 20 --checkpoint-interval 10 --out run"
    assert spheret(command, *tiny)[0] == 0
    Path("run/run.json").unlink()
    code, out, err = spheret(f"{command} --resume", *tiny, *refused.split())  # the last of two equal flags counts
    assert code == 2 and f"the run in run has {refused.split()[0]} " in err and "continuing" not in out
    code, out, _ = spheret("train --resume --out run")
    assert code == 0 and "continuing from step_0000020 of 20" in out


def test_damaged_state_is_explained_and_the_weights_can_be_used(spheret: Any, tiny: list[str]) -> None:
    command = "train --scheme proj --steps 20 --checkpoint-interval 10 --keep-checkpoints 1 --out run"
    assert spheret(command, *tiny)[0] == 0
    Path("run/run.json").unlink()
    Path("run/checkpoints/step_0000020/state.pt").write_bytes(b"half")
    code, _, err = spheret(f"{command} --resume", *tiny)
    assert code == 2 and len(err.splitlines()) == 1
    assert "step_0000020/state.pt cannot be read" in err
    (weights,) = re.findall(r"--init-from (\S+)", err)
    code, out, _ = spheret(f"{command.replace('--out run', '--out other')} --init-from {weights}", *tiny)
    assert code == 0 and "finished at step 20" in out
    code, _, err = spheret("train --out new --init-from nowhere --data missing.txt")
    assert code == 2 and "no checkpoint in nowhere" in err


def test_what_the_terminal_cannot_encode_is_replaced(
    start: Any, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process whose environment also names a notebook's matplotlib, and for terminals that have more letters."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("MPLBACKEND", "module://a_notebook")
    process = start("compare --schemes pre-ln cay --lrs 1e-2 --seeds 2 --steps 2 --jobs 1 --out folder", *tiny)
    assert process.wait() == 0, Path("err").read_text()
    assert Path("folder/report.html").exists() and Path("folder/results.csv").exists()
    shown = {"ascii": Path("out").read_bytes()}
    for encoding in ("latin-1", "cp437"):
        terminal = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding=encoding))
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["report", "folder"])
        shown[encoding] = terminal.getvalue()
    for encoding, text in shown.items():
        assert "Report:" in text.decode(encoding) and ("\u00b1" in text.decode(encoding)) == (encoding != "ascii")


def test_files_are_written_before_anything_is_printed(
    spheret: Any, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("the terminal is gone")

    monkeypatch.setattr("spheret.cli.compare.print_table", fail)
    assert spheret("compare --schemes pre-ln --lrs 1e-2 --seeds 1 --steps 2 --out folder", *tiny)[0] == 2
    files = [Path("folder") / name for name in ("report.html", "results.csv")]
    assert all(file.exists() for file in files)
    for file in files:
        file.unlink()
    assert spheret("report folder")[0] == 2
    assert all(file.exists() for file in files)


def test_resume_needs_the_folder_alone(spheret: Any, tiny: list[str]) -> None:
    flags = "--scheme spheret:p=0.5 --steps 12 --schedule constant --lr 0.01 --seed 7 --tokenizer bpe:300"
    command = f"train {flags} --checkpoint-interval 6 --out run"
    assert spheret(command, *tiny)[0] == 0
    Path("run/run.json").unlink()
    before = json.loads(Path("run/config.json").read_text())
    code, out, err = spheret("train --resume --out run")
    assert code == 0 and "continuing from step_0000012 of 12" in out, err
    assert json.loads(Path("run/config.json").read_text()) == before
    code, out, err = spheret("train --resume --out run --steps 18")
    assert code == 0 and "finished at step 18" in out, err
    code, out, err = spheret("train --resume --out run --scheme pre-ln")
    assert code == 2 and "the run in run has --scheme 'spheret:p=0.5' (not 'pre-ln')" in err
    code, _, err = spheret("train --resume --out nowhere")
    assert code == 2 and "no run in nowhere" in err
