"""The `spheret` command: parses the command line, runs the command, turns an error into one line and an exit code.

Every subcommand is a frozen dataclass, from which tyro makes the flags and the help.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import tyro

from spheret import __version__
from spheret.cli import bench, compare, plan, schemes, train
from spheret.cli.console import UsageError, as_flags, end_output, explain, flags_checked, replace_unencodable
from spheret.comparison.compare import ComparisonBusy
from spheret.recipes import recipe
from spheret.training import RunBusy
from spheret.training.config import warmup_settings
from spheret.training.run_folder import CONFIG, read_config
from spheret.training.settings import flags_of

DESCRIPTION = """Sphere-retraction residual connections for transformers: compare schemes, train, report.

Example: spheret compare --schemes pre-ln proj --seeds 3
`spheret COMMAND --help` explains a command. SPHERET_DEBUG=1 shows the traceback of an error."""

COMMANDS: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "compare": (compare.CompareCommand, compare.run),
    "train": (train.TrainCommand, train.run),
    "prepare": (train.PrepareCommand, train.run_prepare),
    "report": (compare.ReportCommand, compare.run_report),
    "plan": (plan.PlanCommand, plan.run),
    "bench": (bench.BenchCommand, bench.run),
    "schemes": (schemes.SchemesCommand, schemes.run),
}
# Errors that a user can act on, shown as one line. Others, such as a RuntimeError of PyTorch, keep their traceback.
USER_ERRORS = (UsageError, ValueError, OSError, ImportError, ComparisonBusy, RunBusy)


def main(arguments: list[str] | None = None) -> None:
    """Parse and run. Exit codes: 0, 1 if a run failed, 2 for an error that a user can act on, 128 + signal."""
    words = sys.argv[1:] if arguments is None else arguments
    replace_unencodable()
    if words in (["--version"], ["-V"]):
        print(f"spheret {__version__}")
        sys.exit(0)
    code = _run(words or ["--help"])
    end_output()
    sys.exit(code)


def _run(words: list[str]) -> int:
    classes = {name: command for name, (command, _) in COMMANDS.items()}
    try:  # a configuration checks itself when it is built, so a bad value raises here already
        given = with_stored(with_recipe(without_warmup(with_paths(words))))
        command = tyro.extras.subcommand_cli_from_dict(classes, args=given, prog="spheret", description=DESCRIPTION)
        return next(run for kind, run in COMMANDS.values() if type(command) is kind)(command)
    except KeyboardInterrupt as stop:
        with suppress(OSError):  # after SIGHUP there is no terminal
            print("spheret: interrupted", file=sys.stderr)
        return getattr(stop, "exit_code", 130)
    except BrokenPipeError:  # `| head`: nobody wants the rest, and nobody would see a message
        return 128 + int(getattr(signal, "SIGPIPE", 13))
    except USER_ERRORS as error:
        if os.environ.get("SPHERET_DEBUG"):
            raise
        name = words[0]
        kind = classes.get(name)
        with suppress(OSError):
            print(f"spheret {name}: {as_flags(explain(error), kind) if kind else explain(error)}", file=sys.stderr)
        return 2


# --- rewriting the command line before tyro parses it ---


def with_paths(words: list[str]) -> list[str]:
    """The command line with `~` as the user's home: the shell expands it only at the start of a word.

    UsageError: an empty value, which as a path would be the current folder; or there is no home.
    """
    expanded = []
    for before, word in pairwise(["", *words]):
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if not value and (equals or not flag):
            name = flag or (before if before.startswith("--") else "an argument")
            raise UsageError(f"{name} is empty: give it a value, or omit it")
        prefix, path = ("gpt2:", value[5:]) if value.startswith("gpt2:~") else ("", value)
        home = os.path.expanduser(path)
        if home == path and (path == "~" or path.startswith("~/")):
            raise UsageError(f"{path}: this user has no home folder; set HOME, or give the whole path")
        expanded.append(f"{flag}{equals}{prefix}{home}" if equals or not flag else word)
    return expanded


def with_recipe(words: list[str]) -> list[str]:
    """The command line with its recipe in the form that tyro's commands take.

    `plan` and `train` both accept a recipe as `--recipe NAME` and as their first word. For `plan`, it becomes the first
    word. For `train`, the recipe's flags are put before the user's, and a flag of the user replaces that of the recipe.
    UsageError: an unknown recipe or scheme.
    """
    name = _given(words, "--recipe")
    if words[:1] == ["plan"]:
        # Also accept `--scheme`, as `train` does. Not as an alias in tyro: its help would show the alias first.
        words = [re.sub(r"^--scheme(?=$|=)", "--schemes", word) for word in words]
        return words if name is None else ["plan", name, *_without(words, "--recipe")[1:]]
    if words[:1] != ["train"]:
        return words
    if len(words) > 1 and not words[1].startswith("-"):
        name, words = words[1], ["train", "--recipe", *words[1:]]
    if not name:
        return words
    with flags_checked():
        planned = recipe(name, scheme=_given(words, "--scheme")).flags()
    return ["train", *_not_given(planned, words), *words[1:]]


def with_stored(words: list[str]) -> list[str]:
    """For `train --resume`, put the settings of the run in --out before the user's flags, which replace them.

    ValueError: the run's config.json is damaged.
    """
    folder = Path(_given(words, "--out") or train.TrainCommand.out)
    if words[:1] != ["train"] or "--resume" not in words or not (folder / CONFIG).exists():
        return words
    config = read_config(folder)
    if _given(words, "--steps") is not None:  # more steps must not prolong a warm-up that is over
        config = dataclasses.replace(config, warmup_steps=config.total_warmup_steps)
    return ["train", *_not_given(flags_of(config), words), *words[1:]]


def _not_given(planned: list[str], words: list[str]) -> list[str]:
    """The planned flags, each followed by its values, without those that are on the command line."""
    given = {_flag(word) for word in words}
    if given & {"--warmup-steps", "--warmup-ratio"}:  # two ways to set one thing: either replaces the other
        given |= {"--warmup-steps", "--warmup-ratio"}
    kept, keep = [], True
    for word in planned:
        if word.startswith("--"):
            keep = word not in given
        if keep:
            kept.append(word)
    return kept


def without_warmup(words: list[str]) -> list[str]:
    """Replace `--warmup X` of earlier versions by `--warmup-ratio X` (X below 1) or `--warmup-steps X`.

    A notice goes to stderr. UsageError: X is neither a share nor a whole number.
    """
    value = _given(words, "--warmup")
    if words[:1] not in (["train"], ["compare"]) or value is None:
        return words
    try:
        warmup = float(value)
    except ValueError:
        raise UsageError(f"--warmup {value}: give --warmup-steps N or --warmup-ratio X") from None
    with flags_checked():
        ((field, number),) = warmup_settings(warmup).items()
    flag = f"--{field.replace('_', '-')}"
    print(f"spheret {words[0]}: --warmup is deprecated; this is {flag} {number}", file=sys.stderr)
    return [*_without(words, "--warmup"), flag, str(number)]


def _given(words: list[str], flag: str) -> str | None:
    """The value of a flag on a command line, written `--flag value` or `--flag=value`; None without the flag.

    The last one counts, as for tyro.
    """
    found = None
    for word, following in pairwise([*words, ""]):
        if _flag(word) == flag:
            found = word.partition("=")[2] if "=" in word else following
    return found


def _without(words: list[str], flag: str) -> list[str]:
    """The words without this flag and its value."""
    place = next(i for i, word in enumerate(words) if _flag(word) == flag)
    return words[:place] + words[place + (1 if "=" in words[place] else 2) :]


def _flag(word: str) -> str:
    """`--n_layer=3` -> `--n-layer`, the spelling of flags that recipes use."""
    return word.partition("=")[0].replace("_", "-")
