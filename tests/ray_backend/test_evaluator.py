"""The evaluating worker when its storage fails, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from raytrain_ddp.checkpoint.evaluation_file import read_evaluation
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.errors import DivergedError, RetriesExhausted, UnreachableError
from raytrain_ddp.ray_backend import evaluator as module
from raytrain_ddp.ray_backend.evaluator import Evaluator, _Actor

NAME = "step-00000010-a0001"


class Failing:
    """An actor whose evaluations fail a given number of times."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.asked = [*errors], 0
        self.evaluate = SimpleNamespace(remote=self.ask)

    def ask(self, *_: object) -> int:
        self.asked += 1
        return self.asked

    def get(self, _: object) -> None:
        if self.errors:
            raise RayTaskError("evaluate", "traceback", self.errors.pop(0))


def looked(monkeypatch: pytest.MonkeyPatch, actor: Failing, times: int) -> Evaluator:
    made = Evaluator.__new__(Evaluator)
    made._actor, made._given, made._asked, made._failed = actor, None, {}, {}
    monkeypatch.setattr(module.ray, "wait", lambda pending, **_: (pending, []))
    monkeypatch.setattr(module.ray, "get", actor.get)
    monkeypatch.setattr(module, "_AGAIN_S", -1.0)
    made.ask(NAME)
    for _ in range(times):
        made.look()
    return made


def test_an_evaluation_is_retried_after_a_storage_failure(monkeypatch: pytest.MonkeyPatch):
    unreachable = UnreachableError("Storage s3://b did not respond within 25 s")
    actor = Failing(OSError(5, "AWS Error"), TimeoutError("no answer"), unreachable)
    made = looked(monkeypatch, actor, 8)
    assert (actor.asked, made._asked, made._failed) == (4, {NAME: None}, {})
    with pytest.raises(RetriesExhausted, match=f"evaluation of {NAME} failed: OSError"):
        looked(monkeypatch, Failing(*[OSError(5, "again")] * 50), 60)
    with pytest.raises(DivergedError):
        looked(monkeypatch, Failing(DivergedError("nan")), 1)


def test_a_checkpoint_with_a_damaged_manifest_is_noted_as_not_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Later evaluations must not wait for it."""
    run = open_storage(str(tmp_path))
    store = CheckpointStore(run.join("checkpoints"))
    manifest = Manifest(10, 0, 1, 1, {}, "")
    path = Path(store.commit(manifest, {"model.safetensors": b"abc"}).storage.path)
    whole = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(whole[:-9])
    for name in ("apply_settings", "from_dict", "require_folder", "end_with_raylet"):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(module, "run_storage", lambda _: run)
    monkeypatch.setattr(module, "_loaded", lambda _: (None,) * 4)
    given: Any = SimpleNamespace(config={}, lease="")
    _Actor().evaluate(given, NAME)
    found = read_evaluation(run.join("checkpoints").join(NAME))
    assert found is not None
    assert "The manifest is truncated" in found.error
