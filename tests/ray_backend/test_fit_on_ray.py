"""Real Ray: one Ray for all tests in this file, and few fits, because each starts its workers
cold."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from logs import log_of
from rich.console import Console

import raytrain_ddp.predict.__main__ as predict
from raytrain_ddp import FitResult, TrainConfig, fit, fit_locally
from raytrain_ddp.checkpoint.run_folder import CLOCKS, checkpoint_store, run_storage
from raytrain_ddp.config.automatic import settled_without_gpu
from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.sections import CheckpointConfig, LogConfig, ScalingConfig
from raytrain_ddp.display.progress_display import Display
from raytrain_ddp.errors import PreflightError, RetriesExhausted, TaskError
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.predict.output_parts import OutputParts
from raytrain_ddp.ray_backend.ray_settings import SETTINGS, quick_start
from raytrain_ddp.warm.warm_start import py_executable, start_early

HERE = Path(__file__).parents[1]
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module", autouse=True)
def ray_for_all(unchanged_process: None) -> Iterator[None]:
    """A Ray of this test session that `fit` finds and leaves running.

    Its processes are forked: a result equal to a torchrun run therefore also holds for normal
    processes.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update({"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", **SETTINGS})
    import ray

    start_early("always", 1)
    with quick_start(is_warm=True, has_dashboard=False):
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"py_executable": py_executable("always", os.getpid(), 1, 1)},
        )
    started = "\n".join(" ".join(_command(p)) for p in psutil.Process().children(recursive=True))
    assert "/raylet " in started
    for idle in ("dashboard/dashboard.py", "log_monitor.py", "autoscaler/_private/monitor.py"):
        assert idle not in started
    yield
    ray.shutdown()


def shown() -> tuple[Display, io.StringIO]:
    """A display that writes plain lines into a string."""
    text = io.StringIO()
    return Display(Console(file=text, width=120), live=False), text


def weights(config: TrainConfig) -> bytes:
    """The model and optimizer files of the newest checkpoint: equal bytes mean equal bits."""
    newest = checkpoint_store(run_storage(config)).latest()
    assert newest is not None
    return newest.read("model.safetensors") + newest.read("optimizer.safetensors")


def timeless(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in records]


def three_workers(storage: Path, name: str, **options: object) -> TrainConfig:
    config = TrainConfig(
        name=name,
        storage=str(storage),
        epochs=3,
        scaling=ScalingConfig(num_workers=3),
        log=LogConfig(every_steps=1),
        task=f"{HERE / 'ray_tasks.py'}:Paced",
        task_options={"slow": str(storage / "slow")},
    )
    return replace(config, **options)  # type: ignore[arg-type]


def without_ray(config: TrainConfig, workers: int) -> None:
    """Runs the config under torchrun."""
    run_storage(config).mkdir()
    recipe = Path(config.storage) / f"{config.name}.toml"
    from raytrain_ddp.config.recipe import dumps

    recipe.write_text(dumps(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
    command = [*torchrun, "--standalone", "-m", "raytrain_ddp.fit", str(recipe)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=200)


def actor_is_gone(actor: str, within_s: float = 20) -> bool:
    """Whether this session's Ray no longer has such an actor."""
    for _ in range(int(within_s / 0.2)):
        below = psutil.Process().children(recursive=True)
        titles = [line for process in below for line in _command(process)[:1]]
        if not any(title.startswith(f"ray::{actor}") for title in titles):
            return True
        time.sleep(0.2)
    return False


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def interrupt_at(step: int, config: TrainConfig) -> threading.Thread:
    """Sends Ctrl-C to this process once the log has reached `step`."""
    return at_step(step, config, lambda _: os.kill(os.getpid(), signal.SIGINT))


def at_step(step: int, config: TrainConfig, do: Callable[[int], object]) -> threading.Thread:
    """Runs an action once the log has reached `step`, with the step reached."""
    log = Path(config.storage) / str(config.name) / "metrics.jsonl"

    def watch() -> None:
        for _ in range(12_000):  # ten minutes: startup is slow on a busy machine
            lines = log.read_text().splitlines() if log.exists() else []
            if lines and json.loads(lines[-1]).get("step", 0) >= step:
                do(json.loads(lines[-1])["step"])
                return
            time.sleep(0.05)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_fit_trains_the_digits_and_writes_every_file_of_the_run(tmp_path: Path) -> None:
    display, text = shown()
    config = TrainConfig(storage=str(tmp_path))
    result = fit(config, display=display)
    assert isinstance(result, FitResult)
    assert result.status == "finished"
    assert result.exit_status == 0
    assert result.metrics["top1"] >= 0.985
    assert result.step == result.total_steps == 12 * 23
    run = tmp_path / "digits"
    for name in ("config.toml", "metrics.jsonl", "checkpoints", "curves.png", "tensorboard"):
        assert (run / name).exists(), name
    assert (run / "logs" / "rank-1.log").exists()
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [r["step"] for r in result.history if r["kind"] == "eval"] == [*range(23, 277, 23)]
    data = replace(config.data, classes=tuple("0123456789"))
    wanted = settled_without_gpu(replace(config, name="digits", data=data), 2)
    assert load(str(run / "config.toml")) == wanted
    out = text.getvalue()
    for words in ("placing 2 workers", "preparing the model", "64 = 4 slots x 16", "finished"):
        assert words in out
    assert "raytrain_ddp.evaluate" in out
    assert f"raytrain_ddp.predict {run} --out digits.csv" in out

    display, text = shown()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    again = fit(config, display=display)
    assert again.status == "already complete"
    assert again.metrics == result.metrics
    assert "already complete" in text.getvalue()
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of three processes under torchrun."""
    config = three_workers(tmp_path_factory.mktemp("reference"), "undisturbed")
    without_ray(config, workers=3)
    return config


def test_fault_01_13_a_killed_worker_and_ctrl_c_on_ray_lose_nothing(
    undisturbed: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three Ray workers is killed and replaced while the others survive and the task's files
    are broken; then Ctrl-C and the same command again.

    Weights and log are those of three undisturbed processes under torchrun.
    """
    monkeypatch.setenv(VARIABLE, "train.after_backward:kill@rank=1,step=33")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fired"))
    (tmp_path / "slow").touch()
    sources = {"own_paced.py": "from own_base import Paced\n\nclass Own(Paced): ...\n"}
    sources["own_base.py"] = "from ray_tasks import Paced\n"
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    config = three_workers(tmp_path, "disturbed", task=f"{tmp_path / 'own_paced.py'}:Own")
    # Where Ray Train would keep its state: if it is not writable, Ray Train fails.
    (tmp_path / "disturbed" / "checkpoint_manager_snapshot.json").mkdir(parents=True)
    display, text = shown()
    edited: list[int] = []

    def edit(step: int) -> None:
        for name in sources:
            (tmp_path / name).write_text("1 / 0\n")
        edited.append(step)

    editing = at_step(20, config, edit)
    watch = interrupt_at(step=50, config=config)
    stopped = fit(config, display=display)
    watch.join(timeout=10)
    editing.join(timeout=10)
    assert edited[0] < 33, "before the worker died"
    assert len(list((tmp_path / "fired").iterdir())) == 1
    (reported,) = [line for line in text.getvalue().splitlines() if "rank 1 failed" in line]
    # Step 33, or the step of the last event.
    assert re.search(r"at step 3[0-3];", reported)
    for words in ("crashed, or was killed", "only its process is replaced", "1 of at most 3"):
        assert words in reported
    assert "rank 1 replaced; continuing after step 32 of 69" in text.getvalue()
    assert "restarted" not in text.getvalue()
    assert stopped.status == "interrupted"
    assert stopped.exit_status == 130
    assert 50 <= stopped.step < 69

    (tmp_path / "slow").unlink()
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    display, text = shown()
    finished = fit(config, display=display)
    assert finished.status == "finished"
    assert f"step-{stopped.step:08d}" in text.getvalue()
    assert weights(config) == weights(undisturbed)
    assert log_of(undisturbed) == timeless([dict(r) for r in finished.history])
    steps = [record["step"] for record in finished.history if record["kind"] == "train"]
    assert steps == list(range(1, 70))


def test_workers_are_placed_individually_if_the_others_continue_without_them() -> None:
    """The Ray of these tests has capacity for four."""
    from raytrain_ddp.ray_backend.placement import Layout
    from raytrain_ddp.ray_backend.replacing import start_of  # imports Ray

    def start(
        least: int, most: int, placement: str = "PACK", backend: str = "gloo", **options: Any
    ) -> tuple[int, ...]:
        made_of = {key: options.pop(key) for key in [*options] if key != "exact"}
        scaling = ScalingConfig(placement=placement, **made_of)  # type: ignore[arg-type]
        layout = Layout(least, most, "nccl" in backend, {"CPU": 1.0}, backend)
        made = start_of(TrainConfig(scaling=scaling, **options), layout)
        return made.placed.most, made.least, made.size

    assert start(3, 3) == (3, 3, 3)
    assert start(3, 3, exact=True) == (1, 1, 3)
    assert start(2, 3) == (1, 2, 3)
    assert start(2, 8) == (1, 2, 4)
    assert start(6, 8) == (1, 6, 6), "these are waited for"
    assert start(3, 3, "STRICT_SPREAD", exact=True) == (3, 1, 3)
    assert start(2, 8, replace_workers=False) == (8, 0, 0)
    nccl = "cpu:gloo,cuda:nccl"
    assert start(2, 8, backend=nccl) == (8, 0, 0)
    assert start(2, 8, backend=nccl, replace_workers=True) == (1, 2, 4)
    assert start(2, 8, backend=nccl, replace_workers=True, hang_s=0.0) == (8, 0, 0)
    assert start(1, 1, exact=True) == (1, 0, 0)


@pytest.mark.slow
def test_fault_48_a_worker_that_dies_at_the_same_step_three_times_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = "train.before_step:kill@rank=1,step=5"
    monkeypatch.setenv(VARIABLE, ";".join([dies] * 8))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fired"))
    config = TrainConfig(
        storage=str(tmp_path),
        checkpoint=CheckpointConfig(every_s=0),
        scaling=ScalingConfig(max_failures=100),
    )
    display, text = shown()
    again = r"rank 1 crashed, .* at step [1-5], as it did before"
    with pytest.raises(RetriesExhausted, match=again):
        fit(config, display=display)
    # On a busy machine, Ray may end rank 0 before it has reported its step: then the driver knows
    # the step only roughly, and needs one more death.
    died = len(list((tmp_path / "fired").iterdir()))
    assert 3 <= died < 8
    assert text.getvalue().count("rank 1 failed") == died - 1


@pytest.mark.slow
def test_fault_33_a_stopped_worker_is_named_and_replaced_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = ScalingConfig(num_workers=3, hang_s=2.0)
    whole, hung = (three_workers(tmp_path, name, scaling=scaling) for name in ("whole", "hung"))
    without_ray(whole, 3)
    monkeypatch.setenv(VARIABLE, "train.before_step:stop@rank=2,step=40")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "fired"))
    display, text = shown()
    fit(hung, display=display)
    assert "rank 2" in text.getvalue()
    assert "did not enter the all-reduce of step 40" in text.getvalue()
    assert "only its process is replaced (failure 1 of at most 3" in text.getvalue()
    assert "rank 2 replaced; continuing after step 39 of 69" in text.getvalue()
    assert weights(hung) == weights(whole)


def test_a_killed_mailbox_does_not_disturb_the_run(tmp_path: Path) -> None:
    """The actor between workers and driver is killed in mid-run, and once more at the end."""
    (tmp_path / "slow").touch()
    config = three_workers(tmp_path, "board", scaling=ScalingConfig(num_workers=2, max_failures=0))
    log = tmp_path / "board" / "metrics.jsonl"

    def kill_mailboxes() -> None:
        for lines in (10, 50):
            while not log.exists() or log.read_text().count("\n") < lines:
                time.sleep(0.05)
            for process in psutil.Process().children(recursive=True):
                if any(line.startswith("ray::Mailbox") for line in _command(process)[:1]):
                    process.kill()
                    killed.append(process.pid)

    killed: list[int] = []
    killing = threading.Thread(target=kill_mailboxes, daemon=True)
    killing.start()
    display, text = shown()
    result = fit(config, display=display)
    killing.join(10)
    assert len({*killed}) == 2
    assert result.status == "finished"
    assert "failed" not in text.getvalue()
    steps = [r["step"] for r in result.history if r["kind"] == "train"]
    assert steps == list(range(1, 70))
    assert len([line for line in text.getvalue().splitlines() if " eval " in line]) == 3


def test_a_killed_ray_train_controller_restarts_all_workers(tmp_path: Path) -> None:
    """There is capacity for one placement of the workers: that of the dead controller is freed."""
    (tmp_path / "slow").touch()
    config = three_workers(tmp_path, "controller")

    def kill_controller(_: int) -> None:
        for process in psutil.Process().children(recursive=True):
            if any(line.startswith("ray::TrainController") for line in _command(process)[:1]):
                process.kill()
        (tmp_path / "slow").unlink()

    at_step(30, config, kill_controller)
    display, text = shown()
    result = fit(config, display=display)
    assert result.status == "finished"
    failure = (
        "failed: Ray Train's controller crashed, or was killed; resuming from step 23 (failure 1"
    )
    assert failure in text.getvalue()
    steps = [r["step"] for r in result.history if r["kind"] == "train"]
    assert steps == list(range(1, 70))
    assert actor_is_gone("TrainController")
    assert actor_is_gone("RayTrainWorker")


def test_a_users_error_is_shown_once_as_the_users_own_traceback(tmp_path: Path) -> None:
    display, _ = shown()
    config = TrainConfig(storage=str(tmp_path), task=f"{HERE / 'ray_tasks.py'}:Faulty")
    with pytest.raises(TaskError) as caught:
        fit(config, display=display)
    message = str(caught.value)
    assert message.count("Traceback") == 1
    assert message.count("KeyError: 'no such key'") == 1
    assert 'return batch["no such key"]' in message
    assert "raytrain_ddp/training" not in message
    assert caught.value.exit_status == 1
    assert actor_is_gone("TrainController"), "it would start workers again and again"


def test_more_workers_than_the_cluster_has_are_refused_with_have_and_want(tmp_path: Path) -> None:
    config = TrainConfig(
        storage=str(tmp_path),
        batch_size=1024,
        scaling=ScalingConfig(num_workers=9, wait_s=1),
    )
    display, _ = shown()
    with pytest.raises(PreflightError, match=r"want 9 \(9 x 1\), have 4"):
        fit(config, display=display)
    assert not (tmp_path / "digits" / "config.toml").exists()


def test_predict_on_a_cluster_writes_the_bytes_of_one_process_despite_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver is interrupted, then a worker kills itself in its second batch."""
    monkeypatch.setattr(predict, "_ROWS_PER_PART", 64)
    bomb = tmp_path / "bomb"
    config = TrainConfig(
        name="run",
        storage=str(tmp_path),
        steps=2,
        log=LogConfig(tensorboard=False),
        task=f"{HERE / 'ray_tasks.py'}:DiesOnce",
        task_options={"bomb": str(bomb)},
    )
    fit_locally(config)
    run, whole, out = (str(tmp_path / name) for name in ("run", "whole.parquet", "p.parquet"))
    flags = ["--probabilities", "--layer", "head"]
    assert predict.main([run, *flags, "--device", "cpu", "--out", whole]) == 0

    write, written = OutputParts.write, list[int]()

    def interrupted(self: OutputParts, part: int, table: object) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        write(self, part, table)
        written.append(part)

    on_cluster = [run, *flags, "--address", "auto", "--workers", "2", "--out", out]
    monkeypatch.setattr(OutputParts, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        predict.main(on_cluster)
    monkeypatch.setattr(OutputParts, "write", write)
    assert actor_is_gone("_PartActor"), "they would keep their devices"
    assert len(list((tmp_path / ".p.parquet.predicting").glob("part-*"))) == 2
    bomb.touch()
    assert predict.main(on_cluster) == 0
    assert not bomb.exists(), "no worker died"
    assert Path(out).read_bytes() == Path(whole).read_bytes()
    shown = capsys.readouterr()
    assert "starting 2 workers, each with 2 CPUs" in shown.err
    assert "predicting 360 of 360 images" in shown.err
    with pytest.raises(PreflightError, match="--workers 9: the cluster has 4 CPUs"):
        predict.main([run, "--address", "auto", "--workers", "9", "--out", f"{out}.csv"])
