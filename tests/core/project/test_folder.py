"""Two viewers, folders of others, newer versions, full disks, drives that vanish, kills."""

import csv
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from napari_beerlanet.core.common import locking
from napari_beerlanet.core.common.locking import FolderLock, LockedError
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats.dataset import check_dataset, read_dataset
from napari_beerlanet.core.project import folder
from napari_beerlanet.core.project.files import ProjectError
from napari_beerlanet.core.project.project import Project
from projects import NAMES, fill, smear, tree


@pytest.fixture
def project(tmp_path):
    with Project.create(tmp_path / "project", NAMES) as made:
        fill(made, [1, 2])
        yield made


def rest(project_path: Path) -> dict[str, bytes]:
    """Everything except for autosaved annotations, which are saved first."""
    return {k: v for k, v in tree(project_path).items() if not k.startswith("annotations")}


# --- two viewers ---------------------------------------------------------------------------------


def test_a_second_viewer_is_told_and_may_look(project):
    with pytest.raises(LockedError, match="open in another viewer") as error:
        Project.open(project.path)
    assert error.value.owner["process"] == os.getpid()
    with Project.open(project.path, read_only=True) as second:
        assert second.summary() == project.summary()
        source, _, annotations = smear(1)
        assert second.load_annotations(source) is not None
        with pytest.raises(ProjectError, match="read-only"):
            second.save_annotations(source, annotations)
        with pytest.raises(ProjectError, match="not possible to remove the image"):
            second.remove_image(source.id)


def test_when_the_first_is_closed_the_second_may_write(project):
    project.close()
    with Project.open(project.path) as second:
        assert not second.read_only
        with pytest.raises(ProjectError, match="closed"):
            project.save_annotations(smear(1)[0], smear(1)[2])


def test_a_killed_viewer_holds_nothing(project):
    path = project.path
    project.close()
    code = (
        "import sys, time\nfrom napari_beerlanet.core.project.project import Project\n"
        f"p = Project.open({str(path)!r})\nprint('open', flush=True)\ntime.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(LockedError, match=f"process {other.pid}"):
            Project.open(path)
        other.kill()
    with Project.open(path) as again:
        assert not again.read_only


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_does_not_keep_the_lock(project):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.read(reading, 1)
        os._exit(0)
    try:
        project.close()
        Project.open(project.path).close()
    finally:
        os.write(writing, b".")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("owner", "taken"),
    [
        ({"process": 2**22 + 7, "host": None}, False),
        ({"process": os.getppid(), "host": None}, True),
        ({"process": 5, "host": "another-computer"}, True),
        ({}, False),
    ],
)
def test_on_a_disk_without_locks_the_mark_decides(tmp_path, monkeypatch, owner, taken):
    monkeypatch.setattr(locking, "try_lock", lambda file: "unknown")
    if "host" in owner and owner["host"] is None:
        owner = {**owner, "host": locking.socket.gethostname()}
    path = tmp_path / ".lock"
    path.write_text(json.dumps(owner))
    if taken:
        with pytest.raises(LockedError):
            FolderLock(path)
        FolderLock(path, break_lock=True).release()
    else:
        FolderLock(path).release()


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_to_is_opened_to_look_at(project, monkeypatch):
    project.close()

    def refused(*arguments, **words):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("napari_beerlanet.core.project.folder.FolderLock", refused)
    with Project.open(project.path) as opened:
        assert "cannot be written to" in opened.read_only
        assert opened.summary()["images"] == 2
        with pytest.raises(ProjectError, match="cannot be written to"):
            opened.add_classes(["x"])


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions do not bind root")
@pytest.mark.parametrize("closed", ["", ".lock", "annotations"])
def test_a_folder_without_permission(project, closed):
    project.close()
    path = project.path / closed
    before = path.stat().st_mode
    path.chmod(0o500)
    try:
        with Project.open(project.path) as opened:
            assert "cannot be written to" in opened.read_only
    finally:
        path.chmod(before)
    with Project.open(project.path) as opened:
        assert not opened.read_only


def test_a_folder_in_which_no_file_can_be_made_is_opened_to_look_at(project, monkeypatch):
    project.close()
    before = tree(project.path)

    def refused(*arguments, **more):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refused)
    with Project.open(project.path) as opened:
        assert "cannot be written to" in opened.read_only
    monkeypatch.undo()
    assert tree(project.path) == before
    Project.open(project.path).close()


def test_a_folder_of_a_newer_version_is_not_written_to(project):
    project.close()
    file = project.path / "project.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "format": 99, "later": [1, 2]}))
    before = tree(project.path)
    with Project.open(project.path) as opened:
        assert "newer version" in opened.read_only
        assert opened.classes == NAMES
        with pytest.raises(ProjectError, match="update napari-beerlanet"):
            opened.save_annotations(smear(1)[0], smear(1)[2])
    assert tree(project.path) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", r" \(invalid JSON: .*\)"),
        ("{", r" \(invalid JSON: .*\)"),
        ("[" * 100_000, r" \(invalid JSON: .*\)"),
        ("[]", r" \(it should be an object, not \[\]\)"),
        ("{}", r" \(classes is missing\)"),
        ('{"classes": 5}', r" \(classes should be a valid array, not 5\)"),
        ('{"classes": [1]}', r" \(classes\.0 should be a valid string, not 1\)"),
        (
            '{"classes": ["a"], "training_size": "large"}',
            r" \(training_size should be a valid integer, not 'large'\)",
        ),
        (
            '{"classes": ["a"], "split": {"b": "test"}}',
            r" \(split\.b should be train or val, not 'test'\)",
        ),
        (
            '{"classes": ["a"], "split": {"b\\n\\u001b[2J": "test"}}',
            r" \(split\.b\\n\\x1b\[2J should be train or val, not 'test'\)",
        ),
    ],
)
def test_a_damaged_project_is_told(project, content, reason):
    project.close()
    (project.path / "project.json").write_text(content)
    said = rf"project\.json: damaged, or not a project of napari-beerlanet{reason}\.$"
    with pytest.raises(FileError, match=said):
        Project.open(project.path)


def test_a_damaged_table_is_told(project):
    project.close()
    table = project.path / "crops.csv"
    content = table.read_text()
    first = next(csv.DictReader(content.splitlines()))
    for old, new, reason in (
        (",train,", ",../../train,", "split should be train or val, not '../../train'"),
        (first["file"], "../x", "file should be a plain file name, not '../x"),
        ("sha256", "sha", "sha256 is missing"),
        (f"{first['width']},", "wide,", "width should be a valid integer, not 'wide'"),
    ):
        assert old in content
        table.write_text(content.replace(old, new))
        with pytest.raises(ProjectError, match=re.escape("crops.csv: damaged (" + reason)):
            Project.open(project.path)
    FolderLock(project.path / ".lock").release()


def test_a_damaged_annotation_is_told_and_others_are_read(project):
    path = project.save_annotations(*smear(1)[::2])
    path.write_text('{"format": 1')
    project.reload()
    assert "damaged" in project.notes[0]
    assert list(project.sources()) == [smear(2)[0].id]
    with pytest.raises(ProjectError, match="damaged"):
        project.load_annotations(smear(1)[0])


def test_there_is_no_project(tmp_path, project):
    with pytest.raises(ProjectError, match="no such folder"):
        Project.open(tmp_path / "nowhere")
    with pytest.raises(ProjectError, match="no project in this folder"):
        Project.open(tmp_path)
    with pytest.raises(ProjectError, match="already; open it"):
        Project.create(project.path, NAMES)
    (tmp_path / "foreign" / "images").mkdir(parents=True)
    (tmp_path / "foreign" / "images" / "a.png").touch()
    with pytest.raises(ProjectError, match="holds images of something else"):
        Project.create(tmp_path / "foreign", NAMES)


def test_a_drive_that_is_gone_is_told_and_no_folder_takes_its_place(project, tmp_path):
    shutil.move(project.path, tmp_path / "unplugged")
    source, rgb, annotations = smear(3)
    for work in (
        lambda: project.save_annotations(source, annotations),
        lambda: project.add_image(source, rgb, annotations, 128),
        lambda: project.remove_image(source.id),
        project.reload,
    ):
        with pytest.raises(ProjectError, match="folder is gone"):
            work()
    assert not project.path.exists()
    shutil.move(tmp_path / "unplugged", project.path)
    project.add_image(source, rgb, annotations, 128)
    assert project.summary()["images"] == 3


# --- full disks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(0, 12))
def test_a_full_disk_at_any_file_leaves_what_was_there(project, monkeypatch, after):
    before = rest(project.path)
    left = [after]
    real = os.fsync

    def full(handle):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    source, rgb, annotations = smear(3, shape=(96, 200))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        try:
            project.add_image(source, rgb, annotations, 96)
            said = ""
        except ProjectError as error:
            said = str(error)
    assert not said or "no space left on the disk" in said
    if said and not folder.has_unfinished_transaction(project.path):
        assert rest(project.path) == before
    project.close()
    with Project.open(project.path) as again:
        held = {row.source for row in again.crops}
        assert held == {smear(k)[0].id for k in (1, 2)} | ({source.id} & held)
        check_dataset(read_dataset(again.data))
        again.add_image(source, rgb, annotations, 96)
        assert again.summary()["images"] == 3


def test_a_full_disk_while_saving_keeps_the_last_state(project, monkeypatch):
    source, _, annotations = smear(1)
    project.save_annotations(source, annotations)

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ProjectError, match="no space left on the disk to save annotations"):
            project.save_annotations(source, annotations[[0]])
    assert len(project.load_annotations(source)) == len(annotations)
    assert not list((project.path / "annotations").glob(".*"))


# --- the journal ---------------------------------------------------------------------------------


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_a_change_interrupted_at_any_file_is_finished_at_the_next_opening(
    project, monkeypatch, moment
):
    """As a kill between two system calls: nothing of ours runs afterwards."""
    left = [moment]
    for name in ("replace", "unlink"):
        real = getattr(os, name)

        def counted(*arguments, real=real, **more):
            left[0] -= 1
            if left[0] < 0:
                raise _Killed
            return real(*arguments, **more)

        monkeypatch.setattr(os, name, counted)
    monkeypatch.setattr(folder, "remove_path", lambda path: None)
    source, rgb, annotations = smear(2, shape=(96, 128))
    extra = smear(3, shape=(96, 260))
    try:
        project.add_image(*extra, 96)
        project.add_image(source, rgb, annotations[[0, 1, 2]], 128)
    except _Killed:
        pass
    monkeypatch.undo()
    project.close()
    with Project.open(project.path) as again:
        assert_whole(again)
        by_source = {row.source: 0 for row in again.crops}
        for row in again.crops:
            by_source[row.source] += row.boxes
        assert by_source[source.id] in (len(annotations), 3)


def test_a_journal_that_leads_out_of_the_folder_is_refused(project, tmp_path):
    project.close()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    content = {"stage": "x", "moves": [], "removals": ["../victim"]}
    (project.path / folder.JOURNAL_FILE).write_text(json.dumps(content))
    with pytest.raises(FileError, match="not in the project"):
        Project.open(project.path)
    assert victim.read_text() == "mine"


def test_a_damaged_journal_is_told(project):
    project.close()
    (project.path / folder.JOURNAL_FILE).write_text('{"moves"')
    with pytest.raises(FileError, match="damaged, so a change"):
        Project.open(project.path)


def assert_whole(project: Project) -> None:
    """Table, folders and data.yaml agree, and nothing is left over."""
    images = {str(p.relative_to(project.path)) for p in project.path.glob("images/*/*")}
    labels = {str(p.relative_to(project.path)) for p in project.path.glob("labels/*/*")}
    assert images == {str(Path(row.image())) for row in project.crops}
    assert labels == {str(Path(row.label())) for row in project.crops}
    for row in project.crops:
        lines = (project.path / row.label()).read_text().splitlines()
        assert len(lines) == row.boxes
    left = [p.name for p in project.path.rglob(".*") if p.name != ".lock"]
    assert not left
    check_dataset(read_dataset(project.data))


# --- real kills ----------------------------------------------------------------------------------

KILLS = int(os.environ.get("PROJECT_KILLS", "20"))  # docs/security.md has the figures of 50

WORKER = """
import os
import random
import sys
from dataclasses import replace
sys.path[:0] = {folders!r}
import numpy as np
from napari_beerlanet.core.project.project import Project
from test_folder import field

fields = {{seed: field(seed) for seed in range(1, 5)}}

def say(*words):  # a line at once, or a kill may leave a part of it
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def work(path, number):
    chance, step = random.Random(number), 0
    with Project.open(path) as project:
        say("ready", os.getpid())
        while True:
            step += 1
            seed = chance.choice(list(fields))
            source, rgb, annotations = fields[seed]
            kind = chance.choices(("add", "image", "class", "remove"), (4, 2, 2, 2))[0]
            if kind == "remove" and seed < 3:  # two stay: without any there is no dataset to check
                kind = "add"
            if kind == "class":
                old = chance.choice(project.classes)
                new = f"{{old.split()[0]}} {{number}}.{{step}}"
                say("begin class")
                project.rename_class(old, new)
                say("class", *(c.replace(" ", "_") for c in project.classes))
            elif kind == "remove":
                say("begin crops", seed)
                project.remove_image(project.id_of(source))
                say("crops", seed, 0)
            else:
                if kind == "image":  # the same pixels, in a file of another name
                    source = replace(source, name=f"moved-{{number}}-{{step}}.png")
                kept = np.arange(len(annotations)) < 3 + chance.randrange(5)
                annotations = replace(annotations[kept], names=project.classes)
                what = "save", seed, len(annotations), source.name.replace(" ", "_")
                say("begin", *what)
                project.save_annotations(source, annotations)
                say(*what)
                say("begin crops", seed)
                added = project.add_image(source, rgb, annotations, 96)
                say("crops", seed, added.boxes)

for line in sys.stdin:  # a process for each: loading what it needs takes longer than what it does
    child = os.fork()
    if child == 0:
        work(sys.argv[1], int(line))
    say("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def field(seed):
    return smear(seed, shape=(96, 220 if seed > 2 else 128))


class Told:
    """What a project must hold: all that was said to be done, and at most one thing more."""

    def __init__(self, project):
        self.fields = {seed: field(seed)[0] for seed in range(1, 5)}
        self.classes = list(project.classes)
        self.saved = {seed: self._saved(project, seed) for seed in self.fields}
        self.crops = {seed: self._crops(project, seed) for seed in self.fields}

    def _saved(self, project, seed):
        """How many objects, under which name."""
        found = project.load_annotations(self.fields[seed])
        source = project.sources().get(project.id_of(self.fields[seed]))
        return None if found is None else (len(found), source.name.replace(" ", "_"))

    def _crops(self, project, seed):
        name = project.id_of(self.fields[seed])
        return sum(row.boxes for row in project.crops if row.source == name)

    def check(self, project, said):
        begun = None
        for words in map(str.split, said):
            if words[0] == "begin":
                begun = words[1:]
            elif words[0] == "class":
                self.classes, begun = [name.replace("_", " ") for name in words[1:]], None
            elif words[0] == "save":
                self.saved[int(words[1])], begun = (int(words[2]), words[3]), None
            else:
                self.crops[int(words[1])], begun = int(words[2]), None
        kind, seed = (begun[0], int(begun[1]) if len(begun) > 1 else 0) if begun else ("", 0)
        if kind != "class":
            assert project.classes == self.classes
        assert sum(a != b for a, b in zip(project.classes, self.classes, strict=True)) <= 1
        for file in (project.path / "annotations").glob("*.json"):
            assert json.loads(file.read_text())["classes"] == project.classes, "renamed in all"
        for number in self.fields:
            allowed = [self.saved[number]]
            if kind == "save" and seed == number:
                allowed.append((int(begun[2]), begun[3]))
            assert self._saved(project, number) in allowed
            if not (kind == "crops" and seed == number):
                assert self._crops(project, number) == self.crops[number]
        self.__init__(project)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends SIGKILL")
def test_killed_at_random_moments_the_project_is_old_or_new(project):
    """While images are added, renamed and removed, and classes are renamed."""
    told = Told(project)
    project.close()
    path = project.path
    moments = random.Random(5)
    here = Path(__file__)
    code = WORKER.format(folders=[str(here.parent), str(here.parents[2])])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    interrupted = set()
    with subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes) as parent:
        for kill in range(KILLS):
            parent.stdin.write(f"{kill}\n")
            parent.stdin.flush()
            word, process = parent.stdout.readline().split()
            assert word == "ready"
            time.sleep(moments.uniform(0.0, 0.5))
            os.kill(int(process), signal.SIGKILL)
            said = []
            while not (line := parent.stdout.readline()).startswith("ended "):
                assert line
                said.append(line)
            assert line == f"ended {-signal.SIGKILL}\n"
            with Project.open(path) as again:
                assert_whole(again)
                told.check(again, said)
            interrupted |= {tuple(said[-1].split()[:2])} if said else set()
        parent.stdin.close()
    print(f"{KILLS} kills, {sorted(what for word, what in interrupted if word == 'begin')}")
