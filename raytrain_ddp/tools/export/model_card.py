"""The README.md of an export."""

from __future__ import annotations

import json

from raytrain_ddp.checkpoint.run_folder import LOG_FILE, recorded
from raytrain_ddp.config.recipe import dumps, publishable
from raytrain_ddp.events import Eval
from raytrain_ddp.records import log_records
from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_CARD = """\
# {name}

`{model}`, trained by raytrain_ddp {version} on `{source}`. The export was {checked}.

```python
{use}```

`preprocessing.json` has the names of the outputs in order, the sizes to which RGB images are
resized and cropped, their normalization, and the activation that makes probabilities of logits.

## Metrics

{metrics}

## Origin

- checkpoint: `{checkpoint}`, its `model.safetensors` has the sha256 `{sha256}`
- training data: fingerprint `{data}`

```toml
{config}```
"""


def model_card(model: LoadedModel, use: str, checked: str) -> str:
    """How to use it, metrics with their counts, hashes, and config.

    Args:
        use: code that computes logits.
        checked: how the export compares with the model.
    """
    config, manifest = publishable(model.config), model.checkpoint.manifest
    rows = recorded(model.checkpoint).get("data", {}).get("eval_rows") or 0
    log = log_records(json.loads(model.checkpoint.read(LOG_FILE)))
    evals = [each.metrics for each in log if isinstance(each, Eval) and each.step == manifest.step]
    metrics = []
    for name, value in (evals[-1] if evals else manifest.metrics).items():
        counted = f" ({round(value * rows)} of {rows})" if name in ("top1", "top5") and rows else ""
        metrics.append(f"- {name}: {value:.6f}{counted}")
    return _CARD.format(
        name=config.name,
        model=config.model.name,
        version=manifest.written_by,
        source=config.data.source,
        checked=checked,
        use=use,
        metrics="\n".join(metrics or ["The run has not been evaluated."]),
        checkpoint=model.checkpoint.name,
        sha256=manifest.files["model.safetensors"].sha256,
        data=manifest.data_fingerprint,
        config=dumps(config),
    )
