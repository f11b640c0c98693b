"""What a study has done: a record beside each image's results, and a manifest over all of them.

Whoever works on an image writes its record last, so a record says that the results are there; the
manifest is put together from records and can be lost. Both hold hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from napari_beerlanet import __version__

from .files import atomic_path
from .inputs import Job
from .results import read_record
from .stamps import earlier_result, unchanged

MANIFEST, RECORDS = "manifest.json", "records"
_KIND, _VERSION = "napari-beerlanet study", 1

Status = Literal["waiting", "done", "skipped", "failed"]


@dataclass
class Entry:
    """An image of a study and what became of it; `error` is one sentence."""

    job: Job
    status: Status = "waiting"
    error: str = ""
    record: dict[str, Any] = field(default_factory=dict)


def file_hash(path: Path) -> str:
    """SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settings_hash(settings: Mapping[str, Any]) -> str:
    """The same for the same settings, whatever their order."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def record_path(out: Path, name: str) -> Path:
    """Where the record of an image is."""
    return out / RECORDS / f"{name}.json"


def write_record(
    out: Path,
    name: str,
    source: Mapping[str, Any],
    source_sha256: str,
    settings: str,
    outputs: Sequence[Path],
    row: Mapping[str, Any],
) -> dict[str, Any]:
    """Write down that an image is done; `source` is its file's stamp, `settings` their hash."""
    path = record_path(out, name)
    content = {
        "kind": f"{_KIND} record",
        "version": _VERSION,
        "software": f"napari-beerlanet {__version__}",
        "finished": _now(),
        "name": name,
        "source": {**source},
        "source_sha256": source_sha256,
        "settings": settings,
        "outputs": {
            p.relative_to(out).as_posix(): {"size": p.stat().st_size, "sha256": file_hash(p)}
            for p in outputs
        },
        "row": dict(row),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return content


def find_record(
    out: Path, job: Job, settings: str, verify: bool = False
) -> tuple[str, dict[str, Any] | None]:
    """What an image's results are called, and its record if it is done with these settings.

    `verify` also compares the hashes of the results.
    """
    name, record, source = earlier_result(job, lambda name: read_record(record_path(out, name)))
    if record.get("settings") != settings or not unchanged(record, source):
        return name, None
    for where, facts in record.get("outputs", {}).items():
        path = out / where
        if not path.is_file() or path.stat().st_size != facts["size"]:
            return name, None
        if verify and file_hash(path) != facts["sha256"]:
            return name, None
    return name, record


def write_manifest(
    out: Path, entries: Sequence[Entry], settings: Mapping[str, Any], started: str
) -> Path:
    """Write the manifest as things stand."""
    counts = {s: sum(e.status == s for e in entries) for s in ("done", "skipped", "failed")}
    content = {
        "kind": _KIND,
        "version": _VERSION,
        "software": f"napari-beerlanet {__version__}",
        "started": started,
        "updated": _now(),
        "settings": dict(settings),
        "settings_sha256": settings_hash(settings),
        "counts": {**counts, "waiting": sum(e.status == "waiting" for e in entries)},
        "images": [_described(entry) for entry in entries],
    }
    write_json(out / MANIFEST, content)
    return out / MANIFEST


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    with atomic_path(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _described(entry: Entry) -> dict[str, Any]:
    record = entry.record
    names = ("source_sha256", "finished", "outputs")
    known: dict[str, Any] = {k: record[k] for k in names if k in record}
    error = {"error": entry.error} if entry.error else {}
    name = record.get("name", entry.job.name)
    return {"name": name, "path": str(entry.job.source), "status": entry.status, **error, **known}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
