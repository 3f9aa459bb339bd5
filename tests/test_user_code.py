"""The user's modules in another process: the sources of the first process, wherever the files
are."""

from __future__ import annotations

import hashlib
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import warm_python
from tiny import tiny_config

from raytrain_ddp import fit_locally, user_code
from raytrain_ddp.data.loading.loader import LoaderThreads
from raytrain_ddp.data.loading.loader_processes import LoaderProcesses
from raytrain_ddp.data.loading.sources import Data, MapSource
from raytrain_ddp.data.order import Draws
from raytrain_ddp.user_code import UserCode

cloudpickle = pytest.importorskip("cloudpickle")

FILES = {
    "mine.py": "import beside\nfrom kit.inner import parts\nfrom loose import thing\n"
    "from deep.er import mod\n"
    "VALUE = 'first ' + beside.VALUE + parts.VALUE + thing.VALUE\n"
    "def fails(): raise KeyError(VALUE)\n",
    "beside.py": "VALUE = 'b'\n",
    "kit/__init__.py": "",
    "kit/inner/__init__.py": "",
    "kit/inner/parts.py": "from .. import later_name\nVALUE = 'p'\n",
    "kit/later_name.py": "",
    "kit/data.txt": "words",
    "kit/lazily.py": "VALUE = 'lazy'\n",
    "deep/er/mod.py": "VALUE = 'd'\n",
    "loose/thing.py": "import os\nVALUE, FOLDER = 't', os.path.dirname(__file__)\n",
}
FAILS = "def fails(): raise KeyError(VALUE)"
SHOW = """
import pickle, sys
sys.path.insert(0, sys.argv[2])
code = pickle.load(open(sys.argv[1], "rb"))
import mine, inspect
from loose import thing
from kit import lazily
from importlib.resources import files
words = files("kit").joinpath("data.txt")
print(mine.VALUE, thing.FOLDER, inspect.getsource(mine.fails).strip(), lazily.VALUE, sep="|")
print(words.read_text() if words.is_file() else "none")
"""


@pytest.fixture
def imported(tmp_path: Path) -> Iterator[Path]:
    """A folder with the user's modules, which are imported in this process."""
    folder = tmp_path / "here"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    importlib.import_module("mine")
    yield folder
    sys.path.remove(str(folder))
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
    for name in ("kit", "loose", "deep", "deep.er"):
        sys.modules.pop(name, None)


def ran(script: str, code: UserCode, file: Path, *words: str) -> str:
    """The output of a process that reads the code from a file."""
    file.write_bytes(pickle.dumps(code))
    done = warm_python.run([sys.executable, "-c", script, str(file), *words])
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def shown(code: UserCode, folder: Path, file: Path) -> list[str]:
    """What another process finds with the folder on its import path."""
    return ran(SHOW, code, file, str(folder)).replace("\n", "|").strip("|").split("|")


def test_only_the_users_modules_are_sent(imported: Path) -> None:
    sources = user_code.loaded().sources
    names = {name for name, (path, _) in sources.items() if path.startswith(str(imported))}
    assert names == {
        *("mine", "beside", "kit", "kit.inner", "kit.inner.parts", "kit.later_name", "loose.thing"),
        *("deep.er.mod", "kit.lazily"),
    }
    others = {name.partition(".")[0] for name in sources}
    assert others.isdisjoint({"raytrain_ddp", "pytest", "torch", "json", "importlib", "__main__"})


def test_later_edits_of_imported_files_are_not_sent(imported: Path, tmp_path: Path) -> None:
    code = user_code.loaded()
    for path in imported.rglob("*.py"):
        path.write_text("raise RuntimeError('edited')\n")
    wanted = ["first bpt", str(imported / "loose"), FAILS, "lazy", "words"]
    assert shown(code, imported, tmp_path / "code") == wanted


def test_another_node_needs_no_source_files(imported: Path, tmp_path: Path) -> None:
    code = user_code.loaded()
    imported.rename(tmp_path / "elsewhere")
    wanted = ["first bpt", str(imported / "loose"), FAILS, "lazy", "none"]
    assert shown(code, tmp_path / "empty", tmp_path / "code") == wanted
    # If the files are elsewhere on that node, modules look for data files there.
    wanted[1], wanted[4] = str(tmp_path / "elsewhere" / "loose"), "words"
    assert shown(code, tmp_path / "elsewhere", tmp_path / "code") == wanted


@pytest.fixture
def receiving(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets what this process received, after the test."""
    before = [*sys.meta_path]
    monkeypatch.setattr(user_code, "_finder", user_code._Sources())
    yield
    sys.meta_path[:] = before


@pytest.mark.usefixtures("receiving")
def test_loader_processes_import_what_their_worker_has_received(tmp_path: Path) -> None:
    file = tmp_path / "dataset_of_mine.py"
    source = b"def collate(items):\n    return items, 'first'\n"
    pickle.loads(pickle.dumps(UserCode({"dataset_of_mine": (str(file), source)})))
    file.write_text("raise RuntimeError('edited')\n")
    sys.path.insert(0, str(tmp_path))
    try:
        collate = importlib.import_module("dataset_of_mine").collate
        processes = LoaderProcesses(Data(MapSource(range(9)), collate))
        draws = iter([Draws(0, 0, np.array([3]))])
        try:
            assert [*processes.batches(draws, LoaderThreads(1))] == [([3], "first")]
        finally:
            processes.close()
        assert user_code.loaded().sources["dataset_of_mine"] == (str(file), source)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("dataset_of_mine", None)


RECEIVED = """
import pickle, sys
from raytrain_ddp import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.task_loading import check_task_name
task = TrainConfig(task="/no/such/folder/own_task.py:Own").task
try:
    check_task_name(task)
except ConfigError:
    pickle.load(open(sys.argv[1], "rb"))
    check_task_name(task)
    print("found")
"""


def test_a_received_task_needs_no_source_file(tmp_path: Path) -> None:
    code = UserCode({"own_task": ("/no/such/folder/own_task.py", b"")})
    assert ran(RECEIVED, code, tmp_path / "code") == "found\n"


def test_a_tasks_file_is_hashed_without_being_imported(tmp_path: Path):
    (tmp_path / "own.py").write_text("raise SystemExit")
    name = f"{tmp_path}/own.py:Task"
    before = user_code.hashes(name)
    assert before == {"own": hashlib.sha256(b"raise SystemExit").hexdigest()}
    (tmp_path / "own.py").write_text("1 / 0")
    assert user_code.hashes(name)["own"] != before["own"]
    for unknown in ("nothing.at.all:Task", "gone.py:Task", "image-classification", "timm:resnet50"):
        assert user_code.hashes(unknown) == {}


def test_a_complete_run_reports_that_its_code_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "own_task.py").write_text("from tiny import TinyTask as Task\n")
    config = tiny_config(tmp_path, "run", epochs=1, task=f"{tmp_path}/own_task.py:Task")
    fit_locally(config)
    fit_locally(config)
    assert "has changed" not in capsys.readouterr().out
    with (tmp_path / "own_task.py").open("a") as file:
        file.write("# edited\n")
    fit_locally(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "the code of own_task has changed since step-" in said
