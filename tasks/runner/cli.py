"""The command line: finds the command, imports only its module, turns user errors into one line.

Standard library only, and so are the heads of the command modules: `./xsa --help` must answer before
anything is installed.
"""

import argparse
import errno
import importlib
import os
import sys
from types import ModuleType
from typing import NoReturn

from tasks.errors import UserError

PACKAGE = "tasks.runner.commands"
# name -> what it does, in the order a newcomer meets them. The module has the same name.
COMMANDS = {
    "quickstart": "train a plain and an exclusive GPT side by side, in about three minutes",
    "test": "run the test suite",
    "info": "versions, devices, precision, attention backends and why some are missing",
    "run": "train one experiment: ./xsa run text/quick attention=xsa seed=3",
    "config": "print the resolved config of an experiment and its hash",
    "report": "turn the records of runs into tables and figures",
    "sample": "write text with a trained model",
    "eval": "score a trained model on the tasks of lm-evaluation-harness",
    "export": "write a trained model as safetensors, usable without the suite",
    "data": "prepare text for training (FineWeb, Parquet, JSON lines, text), or verify it",
    "sweep": "run the cells of a suite, or of KEY=A,B axes, that have no record yet",
    "probe": "measure how far a trained model's attention points along the own values",
    "plan": "memory, speed and days of a run on given GPUs",
    "bench": "measure speed and memory side by side: attention, step, data, eval, gpu",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other error here."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting."""
        raise UserError(f"{message}; see ./xsa {self.prog.removeprefix('./xsa ')} --help")


def overview() -> str:
    """Return the text of `./xsa --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ./xsa COMMAND [OPTIONS]",
            "",
            "Exclusive Self Attention (XSA): train, compare and report. The first command that needs",
            "packages installs them into .venv (about 8 GB); this text needs none.",
            "",
            *lines,
            "",
            "./xsa COMMAND --help tells a command's options.",
            "Environment: XSA_PYTHON=/path/to/python uses an interpreter as it is; XSA_VENV=DIR puts the",
            "environment elsewhere; XSA_CACHE=DIR is where corpora and compiled kernels are kept.",
        ]
    )


def version() -> str:
    """Return the suite's version, read without importing torch."""
    from xsa_core import __version__

    return __version__


def parse(arguments: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Return the command's module and its options; UserError for a command or option that is not there."""
    name, *rest = arguments
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UserError(f"unknown command '{name}'; {hint}the commands are {', '.join(COMMANDS)}")
    command = importlib.import_module(f"{PACKAGE}.{name}")
    parser = Parser(
        prog=f"./xsa {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return command, parse_options(parser, rest)


def parse_options(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Return the options, which may stand anywhere among overrides: `seed=1 --fresh loop.max_steps=9`.

    A command that passes all its words on (REMAINDER) gets them as they are, a leading option included,
    which argparse alone would refuse.
    """
    actions = parser._actions
    rest = next((action for action in actions if action.nargs == argparse.REMAINDER), None)
    if rest is not None and words[:1] not in (["-h"], ["--help"]):
        options = parser.parse_args([])
        setattr(options, rest.dest, words)
        return options
    if any(action.nargs in {argparse.REMAINDER, argparse.PARSER} for action in actions):
        return parser.parse_args(words)
    for action in actions:
        if action.nargs == argparse.ZERO_OR_MORE:
            action.required = False  # or it is named among what is missing
    return parser.parse_intermixed_args(words)


def dispatch(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(overview())
        return 0
    if arguments[0] == "--version":
        print(version())
        return 0
    command, options = parse(arguments)
    return command.run(options) or 0


def missing_package(package: str) -> str:
    """Return what to do about a package that the interpreter lacks."""
    if os.environ.get("XSA_PYTHON"):
        return (
            f"{sys.executable} has no package '{package}'; install requirements.lock into it, "
            "or unset XSA_PYTHON and let ./xsa make its own environment"
        )
    return f"{sys.executable} has no package '{package}'; remove {sys.prefix}, then ./xsa makes it anew"


def silence_output() -> None:
    """Let nothing more be written where nothing can be: the interpreter would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: list[str]) -> int:
    """Run a command; a user's mistake becomes one line on standard error and status 2."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without some letters shows the others
    try:
        status = dispatch(arguments)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"xsa: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in {"", "tasks", "xsa_core", "results", "optimizers"}:
            raise
        print(f"xsa: error: {missing_package(package)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # `./xsa ... | head`: the reader has what it wanted.
        silence_output()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(
            f"xsa: error: {error.filename or 'output'}: no space left; make room, then run again",
            file=sys.stderr,
        )
        silence_output()
        return 2
    except KeyboardInterrupt:
        print("xsa: stopped", file=sys.stderr)
        return 130
