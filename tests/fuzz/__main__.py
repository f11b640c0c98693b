"""Open thousands of bad files and see that each ends in a result or in one sentence, at low cost.

    python tests/fuzz [--seconds 120] [--count N] [--seed S] [--keep FOLDER]
    python tests/fuzz --corpus

Good files and the hostile ones of corpus.py are changed at random and opened in a process of its
own, under the promise of docs/security.md: no more than 1 GB beyond what the process had,
10 seconds, and nothing but a result or one sentence. What breaks it is kept, and the exit status
is 1. Linux only: elsewhere the kernel does not tell what a file cost. With `--corpus` nothing is
changed: what each hostile file costs as it is, is printed as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from corpus import good_files, hostile_files, small_files  # noqa: E402
from mutate import mutate  # noqa: E402
from opener import MAX_BYTES, MAX_SECONDS  # noqa: E402

MAX_BROKEN = 20
MAX_WAIT_S = 6 * MAX_SECONDS  # by the clock, as the machine may be busy: after that it hangs


@dataclass
class Tally:
    """What was tried and what it cost."""

    opened: int = 0
    results: int = 0
    slowest: float = 0.0
    largest: float = 0.0
    broken: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


class Opener:
    """The process that opens files; started again where it dies or hangs."""

    def __init__(self, warm: list[Path]) -> None:
        self._warm, self._process = warm, None

    def open(self, path: Path) -> dict[str, object]:
        """What it says of a file."""
        process = self._started()
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        return self._line(MAX_WAIT_S) or {
            **{"answer": f"unexpected: the process ended ({process.poll()})", "seconds": 0.0},
            "megabytes": 0.0,
        }

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("opener.py")), *map(str, self._warm)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            if not (self._line(300) or {}).get("ready"):
                raise SystemExit("the process that opens files does not start")
        return self._process

    def _line(self, seconds: float) -> dict[str, object] | None:
        process = self._process
        if not select.select([process.stdout], [], [], seconds)[0]:
            process.kill()
            process.wait()
            return {"answer": "unexpected: it hangs", "seconds": seconds, "megabytes": 0.0}
        line = process.stdout.readline()
        return json.loads(line) if line else None


def check(opener: Opener, path: Path, tally: Tally, keep: Path) -> None:
    """Open a file, count it, keep it if it breaks the promise."""
    said = opener.open(path)
    text, seconds, megabytes = str(said["answer"]), float(said["seconds"]), float(said["megabytes"])
    tally.opened += 1
    tally.kinds[path.name.partition(".")[2]] += 1
    tally.results += text == "result"
    tally.slowest, tally.largest = max(tally.slowest, seconds), max(tally.largest, megabytes)
    if tally.opened % 1000 == 0:
        print(f"{tally.opened} files, {len(tally.broken)} outside the promise", flush=True)
    if text.startswith("unexpected") or seconds > MAX_SECONDS or megabytes * 2**20 > MAX_BYTES:
        keep.mkdir(parents=True, exist_ok=True)
        kept = keep / f"{len(tally.broken)}-{path.name}"
        kept.write_bytes(path.read_bytes())
        tally.broken.append(f"{kept}: {text} ({seconds:.1f} s, {megabytes:.0f} MB)")
        print(tally.broken[-1], flush=True)
        if len(tally.broken) >= MAX_BROKEN:
            raise SystemExit(f"{MAX_BROKEN} files broke the promise; that is enough.")


def print_corpus(opener: Opener, paths: list[Path]) -> None:
    """What each file costs, and what is said of it."""
    print("| file | bytes | s | MB | answer |\n|---|---|---|---|---|")
    for path in paths:
        said = opener.open(path)
        answer = str(said["answer"]).replace(f"{path}: ", "").replace("|", "/")
        cost = f"{said['seconds']:.1f} | {max(float(said['megabytes']), 0):.0f}"
        print(f"| {path.name} | {path.stat().st_size} | {cost} | {answer} |", flush=True)


def main() -> int:
    """Run for so long, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--count", type=int, help="files to open, instead of a time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--corpus", action="store_true", help="the hostile files as they are")
    options = parser.parse_args()
    os.environ.update(YOLO_OFFLINE="true", YOLO_CONFIG_DIR=tempfile.mkdtemp())
    rng, tally = random.Random(options.seed), Tally()
    with tempfile.TemporaryDirectory() as folder:
        good = good_files(Path(folder) / "good")
        hostile = hostile_files(Path(folder) / "hostile")
        small = small_files(Path(folder) / "small")
        opener = Opener(good)
        if options.corpus:
            print_corpus(opener, [*hostile, *small])
            opener.close()
            return 0
        for path in [*good, *hostile, *small]:
            check(opener, path, tally, options.keep)
        # Files of which many are read in a second come as often as models, which take longer.
        sources = [(path.name.partition(".")[2], path.read_bytes()) for path in [*good, *hostile]]
        sources = [(kind, data) for kind, data in sources if len(data) < 1 << 20]
        start = time.monotonic()
        while (
            tally.opened < options.count
            if options.count
            else time.monotonic() - start < options.seconds
        ):
            kind, data = rng.choice(sources)
            path = Path(folder) / f"bad.{kind}"
            path.write_bytes(mutate(data, kind, rng))
            check(opener, path, tally, options.keep)
        opener.close()
    kinds = ", ".join(f"{n} {suffix}" for suffix, n in sorted(tally.kinds.items()))
    print(f"seed {options.seed}: {tally.opened} files opened ({kinds})")
    print(
        f"{tally.results} gave a result, the others a sentence; {len(tally.broken)} broke the "
        f"promise. Longest {tally.slowest:.1f} s, most memory {tally.largest:.0f} MB."
    )
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
