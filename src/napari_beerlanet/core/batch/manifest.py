"""Which images are done, and what is written over all of them: manifest, summary table, failures.

Whoever processes an image writes its record last, so a record says that the results are complete;
the manifest is put together from the records and can be lost. Both hold hashes.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from napari_beerlanet._version import __version__
from napari_beerlanet.core.batch.inputs import (
    REPORT_SUFFIX,
    SUFFIXES_OF_ONE_RESULT,
    ImageJob,
    find_earlier_result,
    is_unchanged,
)
from napari_beerlanet.core.batch.outputs import (
    DETECTIONS_RECORD_SUFFIX,
    ImageResult,
    image_facts,
    output_files,
    report_subject,
    summary_row,
    write_outputs,
)
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.common.jobs import RECORDS_FOLDER, JobEntry
from napari_beerlanet.core.common.storage import (
    atomic_path,
    csv_cell,
    file_hash,
    read_json_or_empty,
    remove_path,
    write_json,
)

MANIFEST_FILE = "manifest.json"
SUMMARY_NAME, FAILURES_FILE = "summary", "failures.csv"
NO_PARQUET_NOTE = (
    "summary.parquet was not written, as pyarrow is not installed: "
    'pip install "napari-beerlanet[cluster]".'
)
_MANIFEST_KIND, _MANIFEST_VERSION = "napari-beerlanet study", 1

Layout = Literal["study", "files", "report"]
"""How results lie in their folder: with records, a manifest and tables over all; alone, where the
file of the spectra or the detections says how they were made; or as a report and nothing else."""

Record = dict[str, Any]


@dataclass
class StudyEntry(JobEntry):
    """An image of a study and its outcome."""

    job: ImageJob

    @property
    def title(self) -> str:
        """The name of its file."""
        return self.job.source.name


class Records:
    """What is done in a folder of results: a record of each image, written after all else.

    It has a hash of the settings, the stamp of the image's file, and the outputs with their sizes.
    An image is done if these are what they would be now. Where a record lies depends on the
    layout: in a file of its own; inside the file on the detections, or else the normalization or
    the spectra; or inside the report.
    """

    def __init__(self, layout: Layout, out: Path, settings: StudySettings) -> None:
        self.layout, self.out, self.settings = layout, out, settings
        self.overlay_size = 4096 if layout == "files" else 2048
        self._digest = settings.hash()
        self._holder = ""  # the kind of the output that has the record
        if layout == "files":
            self._holder = "spectra" if settings.decompose else "normalization"
            self._holder = "record" if settings.has_objects else self._holder

    def find(self, job: ImageJob) -> tuple[str, Record | None]:
        """The name of an image's results, and its record if it is done with these settings."""
        name, record, source = find_earlier_result(job, self._read)
        done = self._is_current(record, source) and self._are_there(name, record)
        return name, {"name": name, **record} if done else None

    def write(self, name: str, source: Mapping[str, Any], result: ImageResult) -> Record:
        """Write an image's results with its record; `source` is its file's stamp."""
        record: Record = {
            "software": f"napari-beerlanet {__version__}",
            "finished": _utc_now(),
            "name": name,
            "source": {**source},
            "source_sha256": result.sha256,
            "settings_sha256": self._digest,
        }
        facts = image_facts(result)
        row = {"row": summary_row(name, result, facts)}
        files = self._files(name)
        if self.layout == "report":
            record |= facts | self._write_report(name, record, result)
        elif self.layout == "files":
            record |= facts
            record |= self._write_files(name, record, result)
        else:
            write_outputs(files, result)
            record |= facts | {"outputs": self._outputs(files, files)}
            head = {"kind": f"{_MANIFEST_KIND} record", "version": _MANIFEST_VERSION}
            (self.out / RECORDS_FOLDER).mkdir(parents=True, exist_ok=True)
            write_json(self.out / RECORDS_FOLDER / f"{name}.json", head | record | row)
        return record | row

    def _write_files(self, name: str, record: Record, result: ImageResult) -> Record:
        """Write the files of which one holds the record; none of other settings stays beside."""
        files = self._files(name)
        before = read_json_or_empty(files[self._holder])
        current = self._is_current(before, record["source"])
        kept = before.get("outputs", {}) if current else {}
        settings = json.loads(json.dumps(self.settings.as_dict()))
        added: Record = {}

        def finish(written: Mapping[str, Path]) -> Record:
            added["outputs"] = kept | self._outputs(files, written)
            return {"settings": settings, **record, **added}

        write_outputs(files, result, self._holder, finish)
        if before and not current:
            endings = SUFFIXES_OF_ONE_RESULT.get(self._holder, ())
            others = {self.out / (name + ending) for ending in endings}
            for path in others.difference(files.values()):
                remove_path(path)
        return added

    def _write_report(self, name: str, record: Record, result: ImageResult) -> Record:
        """Write a report and its record, which does not tell where the image lies."""
        from napari_beerlanet.core.report.report import write_report

        subject = report_subject(result)
        counted = subject.counted_detections
        added: Record = {"source": {k: v for k, v in record["source"].items() if k != "path"}}
        added |= {"counts": counted.counts()}
        added |= {"types": counted.type_counts()} if counted.types else {}
        subject = replace(subject, record=record | added)
        write_report(self._report(name), subject, self.settings.one_page)
        return added

    def _read(self, name: str) -> Record:
        """The record of the results of a name, {} if there are none."""
        if self.layout == "report":
            from napari_beerlanet.core.report.report import read_report_record

            return read_report_record(self._report(name))
        place = f"{RECORDS_FOLDER}/{name}.json" if self.layout == "study" else ""
        return read_json_or_empty(self.out / place if place else self._files(name)[self._holder])

    def _is_current(self, record: Record, source: Mapping[str, Any]) -> bool:
        same = record.get("settings_sha256") == self._digest
        return same and is_unchanged(record, dict(source))

    def _are_there(self, name: str, record: Record) -> bool:
        """Whether the outputs that the settings ask for are there as they were written."""
        sizes = {place: facts["size"] for place, facts in record.get("outputs", {}).items()}
        files = [path for kind, path in self._files(name).items() if kind != self._holder]
        return all(_size(path) == sizes.get(self._place(path)) for path in files)

    def _files(self, name: str) -> dict[str, Path]:
        """The files of an image by kind, but for a report that is all."""
        if self.layout == "report":
            return {}
        files = output_files(self.out, name, self.settings)
        if self._holder == "record":
            files["record"] = self.out / (name + DETECTIONS_RECORD_SUFFIX)
        return files

    def _report(self, name: str) -> Path:
        return self.out / (self.settings.report_file or name + REPORT_SUFFIX)

    def _outputs(self, files: Mapping[str, Path], written: Mapping[str, Path]) -> Record:
        """Size and hash of each file, which is `written` and gets its name later."""
        return {
            self._place(files[kind]): {"size": _size(path), "sha256": _hash(path)}
            for kind, path in written.items()
        }

    def _place(self, path: Path) -> str:
        return path.relative_to(self.out).as_posix()


def _size(path: Path) -> int:
    """Bytes of a file or of all files in a folder; -1 where there is none."""
    if os.path.isdir(path):  # `Path.is_dir` raises where a name is too long
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if os.path.isfile(path) else -1


def _hash(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files in a folder."""
    if not path.is_dir():
        return file_hash(path)
    total = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        total.update(f"{file.relative_to(path).as_posix()} {file_hash(file)}\n".encode())
    return total.hexdigest()


def write_manifest(
    out: Path, entries: Sequence[StudyEntry], settings: StudySettings, started: str
) -> None:
    """Write the manifest as things stand."""
    counts = {s: sum(e.status == s for e in entries) for s in ("done", "skipped", "failed")}
    content = {
        "kind": _MANIFEST_KIND,
        "version": _MANIFEST_VERSION,
        "software": f"napari-beerlanet {__version__}",
        "started": started,
        "updated": _utc_now(),
        "settings": settings.as_dict(),
        "settings_sha256": settings.hash(),
        "counts": {**counts, "waiting": sum(e.status == "waiting" for e in entries)},
        "images": [_describe_entry(entry) for entry in entries],
    }
    write_json(out / MANIFEST_FILE, content)


def _describe_entry(entry: StudyEntry) -> dict[str, Any]:
    record = entry.record
    names = ("source_sha256", "finished", "outputs")
    from_record: dict[str, Any] = {k: record[k] for k in names if k in record}
    error = {"error": entry.error} if entry.error else {}
    name = record.get("name", entry.job.name)
    status = {"name": name, "path": str(entry.job.source), "status": entry.status}
    return {**status, **error, **from_record}


def write_summary(out: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """A row per image: CSV, and Parquet where pyarrow is there; which were written."""
    import pandas as pd

    frame = pd.DataFrame(list(rows))
    paths = [out / f"{SUMMARY_NAME}.csv"]
    with atomic_path(paths[0]) as unfinished:
        _for_spreadsheets(frame).to_csv(unfinished, index=False)
    parquet = out / f"{SUMMARY_NAME}.parquet"
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        remove_path(parquet)  # an earlier run's is of other images
        return paths
    with atomic_path(parquet) as unfinished:
        frame.to_parquet(unfinished, index=False)
    return [*paths, parquet]


def _for_spreadsheets(frame: Any) -> Any:
    """A data frame whose names and texts no spreadsheet takes for formulas."""
    cells = frame.map(csv_cell)
    return cells.rename(columns=csv_cell)


def write_failures(out: Path, entries: Sequence[StudyEntry]) -> None:
    """Path and error of each image that failed; no file where there is none."""
    failed = [e for e in entries if e.status == "failed"]
    if not failed:
        remove_path(out / FAILURES_FILE)
        return
    with (
        atomic_path(out / FAILURES_FILE) as unfinished,
        unfinished.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["path", "error"])
        writer.writerows([csv_cell(str(e.job.source)), csv_cell(e.error)] for e in failed)


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
