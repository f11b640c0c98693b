"""The command line: the same core without a viewer.

Everything but argparse is imported where it is used, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from napari_beerlanet import (
    __version__,
    batch_command,
    commands,
    convert_command,
    demo_command,
    detect_command,
    report_command,
    train_command,
)
from napari_beerlanet.arguments import count, or_word, penalty
from napari_beerlanet.commands import (
    PROGRAM,
    Stopped,
    UsageError,
    asked_to_stop,
    say,
    sentence,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: {message.rstrip('.')}. `{self.prog} --help` says more.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file's name may hold what a terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    before = _listen_for_signals()
    try:
        status: int = options.run(options)
        return status
    except UsageError as error:
        say(str(error))
        return 2
    except (KeyboardInterrupt, Stopped) as stop:
        sent = stop.args[0] if isinstance(stop, Stopped) else signal.SIGINT
        word = "terminated" if sent == signal.SIGTERM else "interrupted"
        say(f"{word}; what was finished is kept.")
        return 128 + sent
    except Exception as error:
        if options.debug:
            raise
        say(sentence(error))
        return 1
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _listen_for_signals() -> dict[int, Any]:
    """Have Ctrl-C and SIGTERM noted; returns what to restore. Only the main thread can."""
    asked_to_stop.clear()
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {s: signal.signal(s, _note) for s in (signal.SIGINT, signal.SIGTERM)}


def _note(signum: int, frame: Any) -> None:
    # An exception from here could fall into compiled code, which loses it, or between writing and
    # tidying up. So the first signal is looked at where it is safe; a second does not wait.
    if asked_to_stop:
        raise KeyboardInterrupt
    asked_to_stop.append(signum)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="See the stains of microscope images apart, and find their cells."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _add_decompose(verbs)
    detect_command.add_parsers(verbs, _finish)
    batch_command.add_parser(verbs, _finish)
    report_command.add_parser(verbs, _finish)
    convert_command.add_parser(verbs, _finish)
    train_command.add_parser(verbs, _finish)
    demo_command.add_parser(verbs, _finish)
    return parser


def _add_decompose(verbs: Any) -> None:
    about = "Decompose images into background light, stain colours and stain densities."
    command = verbs.add_parser(
        "decompose",
        help="decompose images into their stains",
        description=f"{about} For each image NAME this writes NAME.densities.ome.tiff, "
        "NAME.spectra.json and NAME.preview.png. Images that are done are skipped.",
    )
    add = command.add_argument
    add("images", nargs="+", metavar="IMAGE", help="files, folders, or patterns such as '*.tif'")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the results")
    add("--recursive", action="store_true", help="look into the folders within folders, too")
    add("--overwrite", action="store_true", help="also redo what is done")
    add("--format", choices=("ome-tiff", "zarr"), default="ome-tiff", help="of the densities")
    add("--no-preview", action="store_true", help="write no preview pictures")
    _add_solver(command.add_argument_group("how to decompose"))
    add("--quiet", action="store_true", help="say nothing but errors and the summary")
    _finish(command, commands.decompose)


def _add_solver(group: Any) -> None:
    add = group.add_argument
    number: dict[str, Any] = {"metavar": "NUMBER", "default": "auto"}
    number["type"] = or_word("auto", penalty)
    add("--components", type=count, default=8, metavar="R", help="at most so many (default 8)")
    add(
        "--iterations",
        type=or_word("converge", count),
        default="converge",
        metavar="K",
        help="steps of the algorithm, or 'converge' (default): until nothing changes",
    )
    add("--lam", help="penalty on components (default auto)", **number)
    add("--gamma", help="penalty on dense ones (default auto)", **number)
    add("--domain", choices=("log", "intensity"), default="log", help="log is Beer-Lambert")
    add("--method", choices=("auto", "palette", "dense"), default="auto", help="how it computes")
    add("--spectra", type=Path, metavar="FILE.json", help="start from the spectra of a result")
    add("--device", default="auto", help="auto (default), cpu, cuda:0, mps; not for converge")


def _finish(command: argparse.ArgumentParser, run: Any) -> None:
    command.add_argument("--debug", action="store_true", help="show where an error comes from")
    command.set_defaults(run=run)


if __name__ == "__main__":
    sys.exit(main())
