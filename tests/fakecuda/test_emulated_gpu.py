"""Training on GPUs that are emulated: what of it does not need a real one.

It shows: that what is for GPUs runs and is right; when the host waits for the device; what is
copied from which memory; missing waits between streams. It does not
show NCCL, the results of CUDA's kernels, cuDNN and cuBLAS, nor speed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import building
import pytest

from raytrain_ddp.warm import fork_client

Report = dict[str, Any]  # per rank: the scenario's result, and the counts of emulated.report()


class Gpus:
    """Asks the server for scenarios; each is run once for all tests."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._answers, self._asked = folder, dict[str, list[Report]](), 0
        self._server = subprocess.Popen(
            [sys.executable, str(building.HERE / "gpu_server.py")],
            env=building.environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self,
        scenario: str,
        ranks: int = 1,
        into: str = "",
        dies: bool = False,
        backend: str = "cpu:gloo,cuda:gloo",
        **given: Any,
    ) -> list[Report]:
        """The reports of the ranks.

        Args:
            into: name of a folder that several scenarios share.
            dies: no rank answers.
            backend: of the process group; empty: the scenario makes it.
        """
        key = json.dumps([scenario, ranks, into, given], sort_keys=True)
        if key in self._answers:
            return self._answers[key]
        self._asked += 1
        folder = self._folder / (into or f"scenario-{self._asked}")
        folder.mkdir(exist_ok=True)
        request = {"scenario": scenario, "ranks": ranks, "gpus": ranks, "given": given}
        request |= {"folder": str(folder), "number": self._asked, "backend": backend}
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        statuses, reports = json.loads(self._server.stdout.readline())
        if not dies:
            for report in reports:
                assert report is not None, (key, statuses)
                assert "error" not in report["result"], report["result"]["text"]
        self._answers[key] = [report for report in reports if report]
        return self._answers[key]

    def all_reports(self) -> list[Report]:
        return [report for reports in self._answers.values() for report in reports]

    def end(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return building.built(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def gpus(libraries: Path) -> Iterator[Gpus]:
    server = Gpus(libraries)
    yield server
    server.end()


DIE = {"die_at": 14}
MIXED = {
    "augment": {"mixup": 0.2, "cutmix": 1.0, "erase": 0.3},
    "optim": {"name": "adamw", "lr": 0.002, "clip_norm": 1.0, "nonfinite": "skip"},
    "ema": {"decay": 0.9},
    "log": {"audit": True, "every_steps": 3, "tensorboard": False},
}
LOW_PRECISION = [
    {"compute": {"precision": "bf16", "channels_last": True}, "ddp": {"compression": "bf16"}},
    {"compute": {"precision": "fp16", "deterministic": False}},
]


def digest(reports: list[Report]) -> str:
    (found,) = {report["result"]["digest"] for report in reports}
    return str(found)


# ------------------------------------------------------------------ bits


def test_an_emulated_gpu_gives_the_same_weights_as_the_cpu(gpus: Gpus):
    """Everything except kernels: order, seeds, copies, skipped and empty slots, buffers."""
    assert digest(gpus("trains", device="cuda")) == digest(gpus("trains", device="cpu"))


def test_three_gpus_give_the_same_weights_as_three_cpus(gpus: Gpus):
    on_gpus = gpus("trains", 3, device="cuda", exact=False)
    assert digest(on_gpus) == digest(gpus("trains", 3, device="cpu", exact=False))


def test_exact_gives_the_same_weights_on_three_gpus_and_killed_and_resumed_on_two(gpus: Gpus):
    whole = gpus("trains", device="cuda", exact=True)
    assert digest(whole) == digest(gpus("trains", 3, device="cuda", exact=True))
    assert not gpus("trains", 1, "killed", dies=True, device="cuda", exact=True, script=DIE)
    resumed = gpus("trains", 2, "killed", device="cuda", exact=True)
    assert [report["result"]["start"] for report in resumed] == [10, 10]
    assert digest(resumed) == digest(whole)


def test_digits_with_mixup_averages_and_adamw_have_the_same_weights_as_on_the_cpu(gpus: Gpus):
    """On a GPU, averages are computed in another way, which skips a refused step without the
    host."""
    cpu, gpu = (
        gpus("fits", device=d, name="mixed", changes=MIXED)[0]["result"] for d in ("cpu", "cuda")
    )
    assert gpu["trained"] == cpu["trained"]
    assert gpu["evaluated"] == pytest.approx(cpu["evaluated"], rel=1e-5, abs=1e-5)


def test_two_gpus_in_low_precision_have_nearly_the_losses_of_fp32(gpus: Gpus):
    of = {"device": "cuda", "name": "low"}
    wanted = gpus("fits", 2, changes={}, **of)[0]["result"]["losses"]
    for changes, tolerance in zip(LOW_PRECISION, (0.03, 0.01), strict=True):
        found = [report["result"] for report in gpus("fits", 2, changes=changes, **of)]
        assert [result["step"] for result in found] == [6, 6]
        assert found[0]["losses"] == pytest.approx(wanted, rel=tolerance)
        assert found[0]["losses"] != wanted


# ------------------------------------------------------------------ waits, copies, streams


def waits_in(report: Report, steps: Sequence[int]) -> Counter[tuple[str, int]]:
    """How often the host waited for the device, or copied from memory that is not pinned: by (kind,
    step), without torch's own threads, DDP's forward pass, and the tests' own task."""
    found: Counter[tuple[str, int]] = Counter()
    for kind, place, step, count in report["waits"]:
        of_others = place.startswith(("native", "tiny.py", "training/gradients/reduction.py"))
        if step in steps and not of_others:
            found[kind, step] += count
    return found


@pytest.mark.parametrize("exact", [False, True])
def test_the_host_waits_once_a_step_for_the_flag_of_the_step_before(gpus: Gpus, exact: bool):
    steps = (3, 4, 7, 8, 9)  # neither with a log line nor after one
    for ranks in (1, 3):
        for report in gpus("trains", ranks, device="cuda", exact=exact):
            assert waits_in(report, steps) == {("event", step): 1 for step in steps}


def test_the_built_in_task_adds_no_host_waits_and_streams_do_not_race(gpus: Gpus):
    for changes in (MIXED, *LOW_PRECISION):
        name, ranks = ("mixed", 1) if changes is MIXED else ("low", 2)
        for report in gpus("fits", ranks, device="cuda", name=name, changes=changes):
            assert waits_in(report, (2, 4, 5)) == {("event", 5): 1}  # 1 and 3 have log lines
            assert "tasks/class_metrics.py" not in str(report["waits"])
    assert [report["races"] for report in gpus.all_reports() if report.get("races")] == []


def test_a_missing_stream_wait_in_the_feed_is_detected(gpus: Gpus):
    """On a GPU, the step would occasionally read half a batch."""
    (report,) = gpus("forgets")
    assert "read after write" in {kind for kind, *_ in report.pop("races")}


def test_the_emulator_detects_errors_that_fail_on_a_gpu(gpus: Gpus):
    (report,) = gpus("mistakes")
    assert report["result"] == {
        "not waited": ["read after write"],
        "not recorded": ["write after read"],
        "right": [],
        "uninitialized": True,
        "mixed devices": "EmulatedError",
        "too large": "OutOfMemoryError",
    }


# ------------------------------------------------------------------ torchrun


def test_each_process_of_torchrun_uses_a_gpu_of_its_own(gpus: Gpus):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = [report["result"] for report in gpus("joins", 2, backend="", port=port)]
    assert found == [["cuda:0", "cuda", "cpu"], ["cuda:1", "cuda", "cpu"]]


# ------------------------------------------------------------------ warm processes

OF_ONE_GPU = """
import json, os, torch
os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # Ray sets it in a process that runs already
import emulated
emulated.install()
ones = torch.ones(3, device="cuda")
print(json.dumps([os.getppid(), torch.cuda.device_count(), ones.sum().item()]))
"""


def test_a_fork_of_the_warm_server_uses_the_gpu_that_it_gets_afterward(
    libraries: Path, tmp_path: Path
):
    """The server has not looked for GPUs: torch would have kept their number, and refuse them."""
    environment, script = building.environment(libraries, gpus=2), tmp_path / "worker.py"
    script.write_text(OF_ONE_GPU)
    printed = tmp_path / "out"
    address = f"raytrain-fork-gpu-{os.getpid()}"
    server = fork_client.start_server(address, os.getpid(), 1, environment)
    try:
        request = {**fork_client.own_state([str(script)], environment), "waits": True}
        with printed.open("w") as out:
            files = 0, out.fileno(), out.fileno()
            worker = fork_client.forked(address, lambda: server, request, files)
        assert worker is not None
        assert worker.wait(120) == 0, printed.read_text()
        assert json.loads(printed.read_text()) == [server, 1, 3.0]
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


# ------------------------------------------------------------------ the tests for real GPUs

NOT_EMULATED = {
    "nccl": "there is no NCCL",
    "low_precision": "takes a CPU a minute",
    "slots_reach": "it keeps a GPU busy for longer than the host",
}


def test_the_tests_for_real_gpus_pass_on_an_emulated_gpu(libraries: Path, tmp_path: Path):
    """So that on a real GPU they do not fail because of errors in the tests."""
    tests = building.HERE.parent
    marked = [p for p in tests.rglob("test_*.py") if "mark.gpu" in p.read_text("utf-8")]
    files = [str(p) for p in marked if p.parent != building.HERE and "generations" not in p.name]
    chosen = f"not ({' or '.join(NOT_EMULATED)})"
    said = building.output_of_tests(libraries, tmp_path, 1, "-k", chosen, *files)
    assert "2 passed" in said
