"""Lists names of earlier versions that were withdrawn, and what to use instead."""

from __future__ import annotations

from typing import Any

_EXAMPLE = "use examples/{0}.py of this package's repository: fit examples/{1}.toml"
_ROWS: dict[str, tuple[Any, str]] = {  # (default, what to use instead); ...: not a field
    "allow_change": (..., "remove it; a note lists the differences"),
    "audit": (..., "use --log.audit"),
    "char-lm": (..., _EXAMPLE.format("char_lm", "char-lm")),
    "data.cache": (None, "use data.source filecache::s3://...: fsspec keeps local copies"),
    "data.cache_gib": (100.0, "remove it; the size of a filecache:: folder is not limited"),
    "ddp.compression=powersgd": (..., "use bf16 or fp16, in a new run"),
    "ddp.powersgd_rank": (4, "use ddp.compression bf16 or fp16"),
    "ddp.shard_optimizer": (False, "remove it; each worker has the state, and the run continues"),
    "emit=ray-up": (..., "use a file of clusters/, and the command that --emit command prints"),
    "eval.asynchronous": (False, "remove it; use evaluate RUN --follow alongside the run"),
    "format=hf": (..., "use safetensors, onnx or torch-export; docs/trained-model.md has the Hub"),
    "format=timm": (..., "use safetensors, onnx or torch-export"),
    "format=torchscript": (..., "use torch-export, onnx or safetensors"),
    "license": (..., "write it into the model card"),
    "micro_batch=auto": (..., "use the number that --find-micro-batch prints"),
    "model.unfreeze_epoch": (0, "use two runs, the second with --model.weights FIRST"),
    "profile": (..., "use --log.profile-steps 5"),
    "node_kills": (..., "use the tests marked lab, which power hosts off"),
    "nodes": (..., "use the tests marked lab, which power hosts off"),
    "per_trial": (..., "use --scaling.cpus-per-worker and --scaling.gpus-per-worker"),
    "print_completion": (..., "use shtab, as docs/reference/commands.md says"),
    "scaling.max_preemptions": (-1, "remove it; preemptions never count as failures"),
    "scaling.on_divergence": ("stop", "remove it; a run whose weights differ ends with status 6"),
    "scheduler": (..., "use --asha EPOCHS of sweep, or --schedule.name"),
    "search=grid": (..., "use only lists, and as many --trials as there are combinations"),
    "scaling.spares": (1, "remove it; one process of each node waits to replace a worker"),
    "settled": ([], "remove it; auto stays what it was when the run began"),
    "stats_images": (..., "use --data.mean and --data.std of fit"),
    "tabular": (..., _EXAMPLE.format("tabular", "tabular")),
    "task=raytrain_ddp.tasks.char_lm:CharLM": (..., _EXAMPLE.format("char_lm", "char-lm")),
    "task=raytrain_ddp.tasks.tabular:Tabular": (..., _EXAMPLE.format("tabular", "tabular")),
    "turns": (..., "use a loop of your own, as examples/dcgan.py"),
    "tta": (..., "use model(images.flip(-1)) with model = raytrain_ddp.load(RUN)"),
    "verify": (..., "compare the files with the sha256 in dataset.json"),
    "watch": (..., "use raytrain report STORAGE --every 30"),
}
WITHDRAWN = {name: instead for name, (_, instead) in _ROWS.items()}
DEFAULTS = {name: default for name, (default, _) in _ROWS.items() if default is not ...}
"""Defaults of withdrawn fields, which the configs of earlier runs and checkpoints contain."""
DECIDING = {"model.unfreeze_epoch"}  # a run with a value other than the default cannot continue
_IGNORED = {"settled"}  # ignored whatever their value


def withdrawn(name: str) -> str:
    """Returns ``" It was withdrawn: ..."``, or "" for any other name."""
    name = name if name in WITHDRAWN else name.replace("-", "_")
    return f" It was withdrawn: {WITHDRAWN[name]}." if name in WITHDRAWN else ""


def is_ignored(name: str, value: object, for_training: bool = True) -> bool:
    """Whether a field of an earlier run is withdrawn and its value had no effect; or none on
    anything but training."""
    if not for_training and (name in DEFAULTS or (name, value) == ("ddp.compression", "powersgd")):
        return True
    return name in _IGNORED or (name, value) in DEFAULTS.items()
