"""The evaluation of a checkpoint that was committed without one: a file in its folder.

It is not part of the checkpoint: any evaluation may write it again, with the same metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raytrain_ddp.checkpoint.storage import Storage

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True)
class Evaluation:
    """Metrics, or the reason why there are none.

    Args:
        metrics: name -> value. tables: as those of events.Eval. seconds: that it took.
        error: why the checkpoint cannot be evaluated; "": it is.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def write_evaluation(folder: Storage, evaluation: Evaluation) -> None:
    """Raises OSError if the storage does not respond."""
    folder.write_atomic(EVALUATION_FILE, json.dumps(asdict(evaluation)).encode())


def read_evaluation(folder: Storage) -> Evaluation | None:
    """None if there is none, or it is damaged; raises OSError if the storage does not respond."""
    try:
        content = json.loads(folder.read(EVALUATION_FILE))
        metrics = {str(name): float(value) for name, value in content["metrics"].items()}
        seconds, error = float(content["seconds"]), str(content["error"])
        return Evaluation(metrics, dict(content["tables"]), seconds, error)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
