"""Rows of the table of errors: each command, and each exit status."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from PIL import Image
from refused import Row

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.storage import open_storage

LONG = "a" * 300
TASK = """
from torch import nn
from raytrain_ddp import ArraySource, Data, Task
class Mine(Task):
    def model(self): return nn.Linear(1, 1)
    def train_data(self): return Data(ArraySource({"x": __import__("numpy").zeros((64, 1), "f4")}))
    def eval_data(self): return None
    def loss(self, model, batch): return None
    def metrics(self): return {}
    def evaluate(self, model, batch, metrics): ...
"""
MINE, SCRIPT = {"mine.py": TASK}, {"a.py": ""}
SMALL = "--local --batch-size 8 --micro-batch 8 --scaling.use-gpu False"


def another_run(folder: Path) -> AbstractContextManager[object]:
    return Lease.take(open_storage(str(folder / "runs/held")))


@contextmanager
def another_conversion(folder: Path) -> Iterator[None]:
    staging = folder / ".out.converting"
    staging.mkdir()
    with (staging / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def photo(path: Path) -> None:
    Image.new("RGB", (8, 8)).save(path)


def half_a_photo(path: Path) -> None:
    photo(path)
    path.write_bytes(path.read_bytes()[:40])


def unreadable_checkpoint(path: Path) -> None:
    """A run all of whose checkpoints are damaged."""
    path.mkdir()
    (path / "checkpoints/step-00000004-a0001").mkdir(parents=True)
    (path / "checkpoints/step-00000004-a0001/manifest.json").write_text('{"format"')
    (path / "config.toml").write_text('name = "damaged"\n')


PHOTOS = {
    f"photos/{split}/{name}/{number}.png": photo
    for split in ("train", "val")
    for name in "ab"
    for number in range(8)
}
DAMAGED_PHOTO = {**PHOTOS, "photos/train/a/3.png": half_a_photo}
DAMAGED_RUN = {"runs/damaged": unreadable_checkpoint}
ROWS_OF_LIST = "".join(f"{number}.png,{number % 2}\n" for number in range(20))
LISTED = {f"{number}.png": photo for number in range(20) if number != 17}
LISTED["list.csv"] = f"image,label\n{ROWS_OF_LIST}"

ROWS = [
    # 1: the user's code.
    Row(f"{SMALL} --task mine.py:Mine", 1, "loss", MINE, writes=True),
    # 2: what is typed.
    Row(f"{SMALL} --dry-run --task mine.py:Mine --task-options.depth 3", 2, "depth", MINE),
    Row("--epoch 3", 2, "--epochs", light=True),
    Row("--epochs three", 2, "epochs three", light=True),
    Row("--model.name resnet51", 2, "model.name 'resnet51' 'resnet50'"),
    Row("--name a/b", 2, "name a/b", light=True),
    Row("bad.toml", 2, "bad.toml not valid TOML", {"bad.toml": "epochs = [\n"}, light=True),
    Row("wrong.toml", 2, "wrong.toml epoch 'epochs'", {"wrong.toml": "epoch = 3\n"}, light=True),
    Row("latin1.toml", 2, "latin1.toml", {"latin1.toml": b"name = '\xe9'\n"}, light=True),
    Row("deep.toml", 2, "deep.toml", {"deep.toml": f"seed = {'[' * 100000}\n"}, light=True),
    Row("two.toml", 2, "epoch epochs seed", {"two.toml": "epoch = 3\nseed = -1\n"}, light=True),
    Row("digit.toml", 2, "digit.toml", {"digit.toml": f"seed = {'9' * 5000}\n"}, light=True),
    Row("lines.toml", 2, r"lines.toml a\nb", {"lines.toml": '"a\\nb" = 1\n'}, light=True),
    Row("folder.toml", 2, "folder.toml digits", {"folder.toml": Path.mkdir}, light=True),
    Row("nothere.toml", 2, "nothere.toml digits", light=True),
    Row(f"{LONG}.toml", 2, LONG, light=True),
    Row(f"--dry-run --resume-from {LONG}", 2, LONG),
    Row("--task no_such_module:Task", 2, "task no_such_module", light=True),
    Row("--task missing.py:Task", 2, "task missing.py", light=True),
    Row("--task mine.py:Taks", 2, "mine.py 'Task'", {"mine.py": "class Task: ...\n"}, light=True),
    Row("--scaling.num-workers 8 --batch-size 4 --micro-batch 1", 2, "batch_size 8", light=True),
    Row("--storage s3:/bucket/runs", 2, "s3://", light=True),
    Row("run --num-workers 2", 2, "script", light=True),
    Row("run --num-wrokers 2 a.py", 2, "--num-workers", SCRIPT, light=True),
    Row(f"run --num-workers 1 {LONG}", 2, LONG),
    Row("evaluate", 2, "RUN", light=True),
    Row("evaluate '\x1b[2J'", 2, "U+001B", light=True),
    Row("evaluate x --out none/f.json", 2, "--out none/f.json", light=True),
    Row("evaluate x --out .", 2, "--out", light=True),
    Row("evaluate x --out s3://bucket/f.json", 2, "s3://bucket/f.json", light=True),
    Row("predict x y --out p.txt", 2, "--out p.txt .csv"),
    Row("export x --format onyx", 2, "--format onyx onnx", light=True),
    Row("convert photos", 2, "DST", light=True),
    Row("convert photos out --quality 101", 2, "quality 101", PHOTOS, light=True),
    Row("sweep digits --space optim.lrr=1,2", 2, "optim.lrr optim.lr", light=True),
    Row("report x --out r.pdf", 2, "--out r.pdf .html", light=True),
    Row("report nothing", 2, "nothing"),
    Row("evaluate runs/nothing", 2, "runs/nothing", light=True),
    Row("evaluate .", 2, ".", light=True),
    Row("evaluate damage", 2, "'damaged'", DAMAGED_RUN),
    Row("predict nothing x --out p.csv", 2, "nothing"),
    Row("export nothing --format onnx", 2, "nothing"),
    Row("--resume-from nothing --name new", 2, "nothing"),
    Row("doctor --run nothing", 2, "nothing"),
    Row("doctor --jsno", 2, "--json", light=True),
    Row("doctor --optim.name adm", 2, "optim.name 'adm'", light=True),
    Row("doctor --run x --epochs 3", 2, "--epochs --run", light=True),
    Row("doctor digits --run x", 2, "digits --run", light=True),
    Row("chaos --kils 3", 2, "--kills", light=True),
    Row("report nothing --device cpu --no-predict", 2, "--device"),
    Row("run --num-workers 2 aa.py", 2, "'aa.py' 'a.py'", SCRIPT, light=True),
    Row("run torchrun --nproc-per-node 2 a.py", 2, "torchrun", SCRIPT, light=True),
    Row("run --num-workers 0 a.py", 2, "--num-workers", SCRIPT, light=True),
    Row("--scaling.cpus-per-worker many", 2, "scaling.cpus-per-worker", light=True),
    # 3: where it runs.
    Row("run --num-workers 999 a.py", 3, "1 CPU: want 999", SCRIPT, light=True),
    Row("--address ray://127.0.0.1:9", 3, "ray://127.0.0.1:9 --address"),
    Row("--scaling.num-workers 64 --batch-size 1024", 3, "64 --scaling.num-workers", light=True),
    Row("--scaling.num-workers 1 --scaling.use-gpu True", 3, "scaling.use-gpu", light=True),
    Row("--local --storage /proc/none", 3, "/proc/none"),
    Row("--local --storage nonsense://bucket/runs", 3, "nonsense://"),
    Row("--address 127.0.0.1:1", 3, "127.0.0.1:1", needs="ray"),
    Row("run --address 127.0.0.1:1 --num-workers 1 a.py", 3, "127.0.0.1:1", SCRIPT, needs="ray"),
    Row("doctor --address 127.0.0.1:1", 3, "127.0.0.1:1", needs="ray"),
    # 4: the data.
    Row("--data.source nowhere/x", 4, "data.source nowhere/x", light=True),
    Row("doctor --data.source nowhere", 4, "data.source nowhere", light=True),
    Row("--data.eval-source nowhere", 4, "data.eval_source nowhere", light=True),
    Row("--data.source *.parquet", 4, "data.source *.parquet", light=True),
    Row(f"{SMALL} --data.source list.csv --data.holdout 0.2", 4, "17.png", LISTED, writes=True),
    Row(f"{SMALL} --data.source photos", 4, "photos/train/a/3.png", DAMAGED_PHOTO, writes=True),
    Row("convert nowhere out", 4, "nowhere", light=True),
    Row("convert photos out --workers 1", 4, "a/3.png", DAMAGED_PHOTO, writes=True),
    # 5: checkpoints.
    Row("evaluate damaged", 5, "step-00000004-a0001", DAMAGED_RUN),
    Row(f"{SMALL} --name damaged", 5, "step-00000004-a0001", DAMAGED_RUN, writes=True),
    # 6, 8: numbers, another owner. For 7, see test_errors.py.
    Row(f"{SMALL} --optim.lr 1e30 --steps 9", 6, "step loss", writes=True),
    Row(f"{SMALL} --name held", 8, "held pid", during=another_run),
    Row("convert photos out --workers 1", 8, "out", PHOTOS, during=another_conversion, writes=True),
]
