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
    file_stamp,
    read_json_or_empty,
    remove_path,
    settings_hash,
    write_json,
)

MANIFEST_FILE = "manifest.json"
SUMMARY_NAME, FAILURES_FILE = "summary", "failures.csv"
NO_PARQUET_NOTE = (
    "summary.parquet was not written, as pyarrow is not installed: "
    'pip install "napari-beerlanet[cluster]".'
)
_MANIFEST_KIND, _MANIFEST_VERSION = "napari-beerlanet study", 1
_SEEN_IN_FOLDER = ("formats", "previews", "reports", "density_maps", "normalized_format")

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


class StudyRecords:
    """The records of a study: a file for each image in a folder of their own."""

    overlay_size = 2048

    def __init__(self, out: Path, settings: StudySettings) -> None:
        self.out, self.settings = out, settings

    def find(self, job: ImageJob) -> tuple[str, Record | None]:
        """The name of an image's results, and its record if it is done with these settings."""
        name, record, source = find_earlier_result(
            job, lambda name: read_json_or_empty(self._path(name))
        )
        if not self.settings.has_hash(record.get("settings")) or not is_unchanged(record, source):
            return name, None
        for where, facts in record.get("outputs", {}).items():
            if _size(self.out / where) != facts["size"]:
                return name, None
        return name, record

    def write(self, name: str, source: Mapping[str, Any], result: ImageResult) -> Record:
        """Write an image's results and then its record; `source` is its file's stamp."""
        files = output_files(self.out, name, self.settings)
        write_outputs(files, result)
        content: Record = {
            "kind": f"{_MANIFEST_KIND} record",
            "version": _MANIFEST_VERSION,
            "software": f"napari-beerlanet {__version__}",
            "finished": _utc_now(),
            "name": name,
            "source": {**source},
            "source_sha256": result.sha256,
            "settings": self.settings.hash(),
            "outputs": {
                path.relative_to(self.out).as_posix(): {"size": _size(path), "sha256": _hash(path)}
                for path in files.values()
            },
            "row": summary_row(name, result),
        }
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
        return content

    def _path(self, name: str) -> Path:
        return self.out / RECORDS_FOLDER / f"{name}.json"


class FileRecords:
    """Records inside the results: in the file of the detections, or else in that of the spectra.

    With neither, in the file that says how an image was normalized.
    """

    overlay_size = 4096

    def __init__(self, out: Path, settings: StudySettings) -> None:
        self.out, self.settings = out, settings
        self.kind = "spectra" if settings.decompose else "normalization"
        self.kind = "record" if settings.has_objects else self.kind

    def find(self, job: ImageJob) -> tuple[str, Record | None]:
        """The name of an image's results, and its record if it is done with these settings."""
        name, record, source = self._earlier(job)
        # `Path.exists` raises where a name is too long, which is the error of this image alone.
        there = all(map(os.path.exists, self._files(name).values()))
        current = record.get("settings") == self._settings() and is_unchanged(record, source)
        return name, record if current and there else None

    def write(self, name: str, source: Mapping[str, Any], result: ImageResult) -> Record:
        """Write an image's results, of which one holds the record."""
        files = self._files(name)
        before = read_json_or_empty(files[self.kind])
        extra = {"settings": self._settings(), "source": {**source}}
        current = before.get("settings") == extra["settings"] and is_unchanged(before, {**source})
        write_outputs(files, result, (self.kind, extra))
        if before and not current:
            # No result of other settings, or of another image, may stand beside these.
            endings = SUFFIXES_OF_ONE_RESULT.get(self.kind, ())
            others = {self.out / (name + ending) for ending in endings}
            for path in others.difference(files.values()):
                remove_path(path)
        return {"name": name, **extra, "row": summary_row(name, result)}

    def _earlier(self, job: ImageJob) -> tuple[str, Record, Record]:
        return find_earlier_result(
            job, lambda name: read_json_or_empty(self._files(name)[self.kind])
        )

    def _files(self, name: str) -> dict[str, Path]:
        files = output_files(self.out, name, self.settings)
        if self.kind == "record":
            files["record"] = self.out / (name + DETECTIONS_RECORD_SUFFIX)
        return files

    def _settings(self) -> Record:
        """All settings that decide what is in the files, and hashes of files that they name."""
        values = self.settings.hashed()
        values = {name: values[name] for name in values if name not in _SEEN_IN_FOLDER}
        for name in ("detections_file", "annotations_file"):
            if name in values:
                values[name] = file_hash(Path(values[name]))
        plain: Record = json.loads(json.dumps(values))
        return plain


class ReportRecords:
    """The record of a report, inside of it; the report is all that is written."""

    overlay_size = 2048

    def __init__(self, out: Path, settings: StudySettings) -> None:
        self.out, self.settings = out, settings

    def find(self, job: ImageJob) -> tuple[str, Record | None]:
        """The name of an image's results, and its record if it is done with these settings."""
        from napari_beerlanet.core.report.report import read_report_record

        record = read_report_record(self._path(job.name))
        source = file_stamp(job.source)
        current = record.get("settings") == self._settings() and is_unchanged(record, source)
        return job.name, {"name": job.name, **record} if current else None

    def write(self, name: str, source: Mapping[str, Any], result: ImageResult) -> Record:
        """Write an image's report with its record, which does not tell where files lie."""
        from napari_beerlanet.core.report.report import write_report

        stamp = {fact: value for fact, value in source.items() if fact != "path"}
        record: Record = {"settings": self._settings(), "source": stamp}
        subject = report_subject(result)
        counted = subject.counted_detections
        record["counts"] = counted.counts()
        record |= {"types": counted.type_counts()} if counted.types else {}
        write_report(self._path(name), replace(subject, record=record), self.settings.one_page)
        return {"name": name, **record, "row": summary_row(name, result)}

    def _path(self, name: str) -> Path:
        return self.out / (self.settings.report_file or name + REPORT_SUFFIX)

    def _settings(self) -> str:
        """A hash of the settings, and of what is in the files that they name."""
        chosen = self.settings
        files = [chosen.detections_file, chosen.annotations_file]
        contents = [file_hash(Path(file)) if file else "" for file in files]
        own = chosen.hash("detections_file", "annotations_file", "report_file")
        return settings_hash({"settings": own, "contents": contents})


Records = StudyRecords | FileRecords | ReportRecords


def records_of(layout: Layout, out: Path, settings: StudySettings) -> Records:
    """The records of a folder."""
    kinds: dict[Layout, type[Records]] = {
        "study": StudyRecords,
        "files": FileRecords,
        "report": ReportRecords,
    }
    return kinds[layout](out, settings)


def _size(path: Path) -> int:
    """Bytes of a file or of all files in a folder; -1 where there is none."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.is_file() else -1


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
        "settings_sha256": settings_hash(settings.as_dict()),
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
