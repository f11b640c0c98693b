"""Copies of user data that an earlier version wrote, as if they had been written on this computer.

They lie in data/before_part_7, with the script that made them (commit e789a7e) and expected.json,
which holds what that version itself read from them.
"""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "before_part_7"
TIME = 1_700_000_000  # seconds: every file's time, which records of sources name


def restored(home: Path, *names: str) -> Path:
    """Copy folders of the data to `home`; paths, the computer's name and times are put right."""
    for name in names:
        shutil.copytree(DATA / name, home / name)
    places = {b"@ROOT@": str(home).encode(), b"@HOST@": socket.gethostname().encode()}
    for path in sorted(home.rglob("*"), reverse=True):
        if path.is_file():
            content = path.read_bytes()
            for mark, place in places.items():
                content = content.replace(mark, place)
            if content != path.read_bytes():
                path.write_bytes(content)
        os.utime(path, (TIME, TIME))
    return home


def expected(home: Path, name: str) -> Any:
    """What the earlier version read from a folder of the data."""
    text = (DATA / "expected.json").read_text(encoding="utf-8")
    return json.loads(text.replace("@ROOT@", str(home)))[name]
