"""Ray Train's process group over NCCL, with this package's settings in each worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.train.torch import TorchConfig

from raytrain_ddp.training.runtime.nccl_settings import set_missing


@dataclass
class NcclConfig(TorchConfig):  # type: ignore[misc]
    """Sets environment variables that the worker's node has not set, before the group is made.

    Args:
        settings: the variables.
    """

    settings: dict[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type[Any]:
        base: type[Any] = super().backend_cls

        class WithSettings(base):  # type: ignore[misc]
            def on_start(self, worker_group: Any, backend_config: NcclConfig) -> None:
                worker_group.execute(set_missing, backend_config.settings)
                super().on_start(worker_group, backend_config)

        return WithSettings
