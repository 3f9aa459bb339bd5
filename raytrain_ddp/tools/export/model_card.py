"""The model card of an export: README.md with the front matter of the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from raytrain_ddp.checkpoint.manifest import package_version
from raytrain_ddp.checkpoint.run_folder import LOG_FILE, STATE_FILE
from raytrain_ddp.config.recipe import dumps, publishable
from raytrain_ddp.errors import first_names
from raytrain_ddp.events import Eval
from raytrain_ddp.records import log_records
from raytrain_ddp.tools.inference.loaded_model import LoadedModel
from raytrain_ddp.training.runtime.world import software_versions

_SHARES = ("top1", "top5")  # of the samples, which give counts


def model_card(
    model: LoadedModel, facts: Mapping[str, Any], licence: str, use: str, checked: str
) -> str:
    """Data, metrics with their counts, config, versions, hashes, and how to use it.

    Args:
        facts: preprocessing and classes.
        licence: an identifier of the Hub, such as apache-2.0.
        use: code that loads the model.
        checked: how the export compares with the model.
    """
    checkpoint, config = model.checkpoint, model.config
    manifest = checkpoint.manifest
    known = json.loads(checkpoint.read(STATE_FILE)).get("data", {})
    metrics = _metrics(model)
    classifies = facts["activation"] != "none"
    kind = "image-classification" if classifies else "image-regression"
    front = {
        "license": licence,
        "library_name": "timm" if config.model.name.startswith("timm:") else "pytorch",
        **({"pipeline_tag": kind} if classifies else {}),
        "tags": [kind, "raytrain_ddp"],
    }
    rows = known.get("eval_rows", 0)
    described = [f"- {name}: {_with_count(name, value, rows)}" for name, value in metrics.items()]
    hashes = [
        f"- checkpoint: `{checkpoint.name}`, step {manifest.step}",
        f"- its `model.safetensors`: sha256 `{manifest.files['model.safetensors'].sha256}`",
        f"- training data: {known.get('train_rows', '?')} rows, fingerprint "
        f"`{manifest.data_fingerprint}`",
        f"- evaluation data: {rows or 'no'} rows, fingerprint `{known.get('eval') or 'none'}`",
    ]
    versions = {"raytrain_ddp": f"{manifest.written_by} (training), {package_version()} (export)"}
    versions |= software_versions()
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n",
        f"# {config.name}\n",
        f"`{config.model.name}` for {_predicted(facts)}, trained by raytrain_ddp on "
        f"`{publishable(config).data.source}`. {checked}\n",
        "## Use\n",
        f"```python\n{use}```\n",
        f"Images are RGB, uint8. {_resized(facts)} {_ACTIVATIONS[facts['activation']]} The "
        f"{'classes' if classifies else 'names of the outputs'}, in order, and all numbers are in "
        "`preprocessing.json`.\n",
        "## Metrics\n",
        "\n".join(described or ["The run has not been evaluated."]) + "\n",
        "## Origin\n",
        "\n".join(hashes) + "\n",
        "\n".join(f"- {name}: {version}" for name, version in versions.items()) + "\n",
        "## Config\n",
        f"```toml\n{dumps(publishable(config))}```\n",
    ]
    return "\n".join(parts)


_ACTIVATIONS = {
    "softmax": "The softmax of the logits gives probabilities.",
    "sigmoid": "The sigmoid of each logit gives the probability of its label.",
    "none": "The outputs are the predicted numbers.",
}


def _predicted(facts: Mapping[str, Any]) -> str:
    names, activation = facts["class_names"], facts["activation"]
    if activation == "softmax":
        return f"{len(names)} classes"
    listed = first_names([f"`{name}`" for name in names])
    return f"the {'labels' if activation == 'sigmoid' else 'numbers'} {listed}"


def _resized(facts: Mapping[str, Any]) -> str:
    size = facts["image_size"]
    if isinstance(size, list):
        height, width = size
        return f"They must be {height} pixels high and {width} wide; they are used as they are."
    return (
        f"Their shorter side is resized to {facts['resize_shorter_side']} pixels "
        f"({facts['interpolation']}, antialiased), and the central {size} x {size} pixels are "
        "used; images of exactly that size are used as they are."
    )


def _metrics(model: LoadedModel) -> Mapping[str, float]:
    """Of the evaluation at the checkpoint's step, as training logged it."""
    step = model.checkpoint.manifest.step
    log = log_records(json.loads(model.checkpoint.read(LOG_FILE)))
    evals = [record.metrics for record in log if isinstance(record, Eval) and record.step == step]
    return evals[-1] if evals else model.checkpoint.manifest.metrics


def _with_count(name: str, value: float, rows: int) -> str:
    counted = f" ({round(value * rows)} of {rows})" if name in _SHARES and rows else ""
    return f"{value:.6f}{counted}"
