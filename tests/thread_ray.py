"""A stand-in for Ray in this process, for what `run` needs: each actor is an object with threads,
and each reference is a future. All seats are on one node."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import pytest


class RayError(Exception): ...


class RayActorError(RayError): ...


class GetTimeoutError(RayError): ...


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("a traceback\nof many lines")
        self.cause = cause


class Actor:
    """``actor.method.remote(...)`` of an object of this process."""

    def __init__(self, made: Any) -> None:
        self.made, self._pool = made, ThreadPoolExecutor(8)

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=lambda *args: self._pool.submit(self._call, name, args))

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(self.made, name)(*args)
        except Exception as error:
            raise RayTaskError(error) from error

    def end(self) -> None:
        self.made.clean()
        self._pool.shutdown(wait=False)


class ThreadRay(types.ModuleType):
    """Connected, with one node of some CPUs."""

    def __init__(self, cpus: float = 4.0) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(
            RayError=RayError,
            RayActorError=RayActorError,
            GetTimeoutError=GetTimeoutError,
            RayTaskError=RayTaskError,
        )
        self.cloudpickle = types.SimpleNamespace(
            register_pickle_by_value=lambda _: None, unregister_pickle_by_value=lambda _: None
        )
        self.util: Any = types.ModuleType("ray.util")
        self.util.placement_group = lambda *_, **__: types.SimpleNamespace(wait=lambda _: True)
        self.util.remove_placement_group = lambda _: None
        self.util.get_node_ip_address = lambda: "127.0.0.1"
        self.strategies: Any = types.ModuleType("ray.util.scheduling_strategies")
        self.strategies.PlacementGroupSchedulingStrategy = lambda *_, **__: None
        self.actors: list[Actor] = []
        self._cpus = cpus

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self._cpus}}]

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: "here", get_accelerator_ids=dict)

    def remote(self, kind: Callable[..., Any]) -> Any:
        def made(*args: Any) -> Actor:
            self.actors.append(Actor(kind(*args)))
            return self.actors[-1]

        return types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=made))

    def wait(
        self, refs: list[Future[Any]], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        when = FIRST_COMPLETED if num_returns == 1 else "ALL_COMPLETED"
        done, _ = wait_for(refs, timeout, when)
        return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]

    def get(self, ref: Future[Any], timeout: float | None = None) -> Any:
        return ref.result(timeout)

    def kill(self, actor: Actor, no_restart: bool) -> None:
        actor.end()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setitem(sys.modules, "ray", self)
        patch.setitem(sys.modules, "ray.util", self.util)
        patch.setitem(sys.modules, "ray.util.scheduling_strategies", self.strategies)
