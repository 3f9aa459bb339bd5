"""The README.md of an export."""

from __future__ import annotations

import json

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.checkpoint.run_folder import LOG_FILE, recorded
from raytrain_ddp.config.recipe import dumps, publishable
from raytrain_ddp.events import Eval
from raytrain_ddp.records import log_records
from raytrain_ddp.tools.inference.loaded_model import LoadedModel
from raytrain_ddp.training.runtime.world import software_versions

_CARD = """\
# {name}

`{model}`, trained by raytrain_ddp on `{source}`. The export was {checked}.

```python
{use}```

`preprocessing.json` has the names of the outputs in order, the sizes to which RGB images are
resized and cropped, their normalization, and the activation that makes probabilities of logits.

## Metrics

{metrics}

## Origin

{origin}

## Config

```toml
{config}```
"""


def model_card(model: LoadedModel, use: str, checked: str) -> str:
    """How to use it, metrics with their counts, hashes, versions, and config.

    Args:
        use: code that computes logits.
        checked: how the export compares with the model.
    """
    config, manifest = publishable(model.config), model.checkpoint.manifest
    data = recorded(model.checkpoint).get("data", {})
    rows = data.get("eval_rows") or 0
    origin = {
        "checkpoint": f"`{model.checkpoint.name}`, step {manifest.step}",
        "its `model.safetensors`": f"sha256 `{manifest.files['model.safetensors'].sha256}`",
        "training data": f"{data.get('train_rows', '?')} rows, `{manifest.data_fingerprint}`",
        "evaluation data": f"{rows or 'no'} rows, `{data.get('eval') or 'none'}`",
        "raytrain_ddp": f"{manifest.written_by} (training), {package_version()} (export)",
        **software_versions(),
    }
    log = log_records(json.loads(model.checkpoint.read(LOG_FILE)))
    evals = [each.metrics for each in log if isinstance(each, Eval) and each.step == manifest.step]
    metrics = [
        f"- {name}: {value:.6f}"
        + (f" ({round(value * rows)} of {rows})" if name in ("top1", "top5") and rows else "")
        for name, value in (evals[-1] if evals else manifest.metrics).items()
    ]
    return _CARD.format(
        name=config.name,
        model=config.model.name,
        source=config.data.source,
        checked=checked,
        use=use,
        metrics="\n".join(metrics or ["The run has not been evaluated."]),
        origin="\n".join(f"- {what}: {value}" for what, value in origin.items()),
        config=dumps(config),
    )
