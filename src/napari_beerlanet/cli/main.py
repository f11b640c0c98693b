"""Entry point of the command line: parse arguments, run a command, turn errors into exit codes.

Everything but argparse is imported where it is used, and a command's options are made only if it
is chosen, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from napari_beerlanet._version import __version__
from napari_beerlanet.cli import (
    benchmark,
    classify,
    convert,
    demo,
    evaluate,
    export,
    info,
    train,
)
from napari_beerlanet.cli.common import (
    PROGRAM,
    Stopped,
    UsageError,
    print_message,
    raise_if_interrupted,
    received_signals,
)
from napari_beerlanet.cli.study_commands import STUDY_COMMANDS

_COMMANDS: dict[str, Any] = {
    "decompose": STUDY_COMMANDS["decompose"],
    "detect": STUDY_COMMANDS["detect"],
    "classify": classify,
    "malaria": STUDY_COMMANDS["malaria"],
    "normalize": STUDY_COMMANDS["normalize"],
    "evaluate": evaluate,
    "batch": STUDY_COMMANDS["batch"],
    "benchmark": benchmark,
    "report": STUDY_COMMANDS["report"],
    "convert": convert,
    "export": export,
    "info": info,
    "train": train,
    "demo": demo,
}
"""Modules, or studies, with HELP and DESCRIPTION, `add_options` and `run`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file's name may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    before = _install_signal_handlers()
    try:
        status: int = options.run(options)
        raise_if_interrupted()  # a script shall not go on, however late the signal came
        return status
    except UsageError as error:
        print_message(str(error))
        return 2
    except (KeyboardInterrupt, Stopped) as stop:
        sent = stop.args[0] if isinstance(stop, Stopped) else signal.SIGINT
        word = "terminated" if sent == signal.SIGTERM else "interrupted"
        print_message(f"{word}; finished results are saved.")
        return 128 + sent
    except Exception as error:
        if options.debug:
            raise
        from napari_beerlanet.core.common.messages import error_message

        print_message(error_message(error, " (--debug shows where)"))
        return 1
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the chosen command, and its function as `run`."""
    parser = _Parser(
        prog=PROGRAM,
        description="Decompose the stains of microscope images, detect cells and classify them.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    chosen = next((word for word in arguments if not word.startswith("-")), "")
    for name, module in _COMMANDS.items():
        command = verbs.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        if name == chosen:
            module.add_options(command)
            command.add_argument("--debug", action="store_true", help="print an error's traceback")
        command.set_defaults(run=module.run)
    return parser.parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from napari_beerlanet.core.common.messages import printable

        text = printable(message.rstrip("."))
        self.exit(2, f"{PROGRAM}: {text}. `{self.prog} --help` says more.\n")


def _install_signal_handlers() -> dict[int, Any]:
    """Have Ctrl-C and SIGTERM noted; returns what to restore. Only the main thread can."""
    received_signals.clear()
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {s: signal.signal(s, _on_signal) for s in (signal.SIGINT, signal.SIGTERM)}


def _on_signal(signum: int, frame: Any) -> None:
    # An exception from here could fall into compiled code, which loses it, or between writing and
    # tidying up. So the first signal is looked at where it is safe; a second does not wait.
    if received_signals:
        raise KeyboardInterrupt
    received_signals.append(signum)


if __name__ == "__main__":
    sys.exit(main())
