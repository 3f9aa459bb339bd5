"""The model card of an export: README.md with the front matter of the Hugging Face Hub."""

from __future__ import annotations

import json
from typing import Any

import yaml

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.checkpoint.run_folder import LOG_FILE, recorded
from raytrain_ddp.config.recipe import dumps, publishable
from raytrain_ddp.errors import first_names
from raytrain_ddp.events import Eval
from raytrain_ddp.records import log_records
from raytrain_ddp.tools.export.formats import Facts
from raytrain_ddp.tools.inference.loaded_model import LoadedModel
from raytrain_ddp.training.runtime.world import software_versions

_CARD = """\
---
{front}---

# {name}

`{model}` for the {kind} {names}, trained by raytrain_ddp on `{source}`. {checked}

## Use

```python
{use}```

Images are RGB. {resized} {activation} The names of the outputs, in order, and all numbers are in
`preprocessing.json`.

## Metrics

{metrics}

## Origin

{origin}

## Config

```toml
{config}```
"""
_ACTIVATIONS = {
    "softmax": "The softmax of the logits gives probabilities.",
    "sigmoid": "The sigmoid of each logit gives the probability of its label.",
    "none": "The outputs are the predicted numbers.",
}
_KINDS = {"softmax": "classes", "sigmoid": "labels", "none": "numbers"}


def model_card(model: LoadedModel, facts: Facts, license_: str, use: str, checked: str) -> str:
    """Data, metrics with their counts, config, versions, hashes, and how to use it.

    Args:
        license_: an identifier of the Hub, such as apache-2.0.
        use: code that loads the model.
        checked: how the export compares with the model.
    """
    config, manifest = publishable(model.config), model.checkpoint.manifest
    data, activation = recorded(model.checkpoint).get("data", {}), facts["activation"]
    kind = "image-regression" if activation == "none" else "image-classification"
    front: dict[str, Any] = {"license": license_, "tags": [kind, "raytrain_ddp"]}
    front["library_name"] = "timm" if config.model.name.startswith("timm:") else "pytorch"
    if activation != "none":
        front["pipeline_tag"] = kind
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
        front=yaml.safe_dump(front, sort_keys=False),
        name=config.name,
        model=config.model.name,
        kind=_KINDS[activation],
        names=first_names([f"`{name}`" for name in model.class_names]),
        source=config.data.source,
        checked=checked,
        use=use,
        resized=_resized(facts),
        activation=_ACTIVATIONS[activation],
        metrics="\n".join(metrics or ["The run has not been evaluated."]),
        origin="\n".join(f"- {what}: {value}" for what, value in origin.items()),
        config=dumps(config),
    )


def _resized(facts: Facts) -> str:
    size = facts["image_size"]
    if isinstance(size, list):
        return f"They must be {size[0]} pixels high and {size[1]} wide; they are used as they are."
    return (
        f"Their shorter side is resized to {facts['resize_shorter_side']} pixels "
        f"({facts['interpolation']}, antialiased), and the central {size} x {size} pixels are "
        "used; images of exactly that size are used as they are."
    )
