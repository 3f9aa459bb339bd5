"""What a config refuses: values by field, and rows of the table of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from refused import Row

# Field -> values that its constructor refuses; the others have their defaults.
VALUES: Mapping[str, Sequence[Any]] = {
    "name": ["../x", "..", "a/b", "", "x" * 129, "new\n", 5],
    "storage": ["", "a\rb"],
    "task": ["a\n.py:Mine"],
    "seed": [-1, 2**63, "1"],
    "epochs": [0, 1.5, True, "3"],
    "batch_size": [0, 50, 10**12],
    "micro_batch": [0, 65],
    "exact": [1],
    "task_options": [{"a": {"b": 1}}, {"a": "\x1b[2J"}, {"a\u2028": "b"}, 3],
    "data.source": ["", "a\0b", 3],
    "data.image_size": [-1, 2**20, "224"],
    "data.eval_size": [-1],
    "data.eval_crop": [0.0, 1.1],
    "data.classes": [("a\nb", "c")],
    "data.mean": [(124.0, 117.0, 104.0), (-0.5, 0.5, 0.5), (0.5, 0.5)],  # of 0 to 1
    "data.std": [(1.0, 0.0, 1.0), (58.0, 57.0, 57.0), ("a", 1, 1)],
    "data.holdout": [20.0],  # percent
    "data.shuffle": ["sometimes"],
    "data.shuffle_window": [0],
    "data.prefetch": [0],
    "data.workers": [-1, 10**6],
    "data.max_bad": [-1],
    "data.memory_mib": [0],
    "data.prefetch_mib": [0],
    "augment.scale": [(0.0, 1.0), (0.9, 0.5), (0.5, 1.5)],
    "augment.operations": [0],
    "augment.magnitude": [31],
    "augment.jitter": [(0.0, 0.0, -0.1, 0.0), (0.0, 0.0, 0.0, 0.6), (40.0, 40.0, 40.0, 0.1)],
    "augment.erase": [1.1],
    "augment.mixup": [-1.0],
    "augment.cutmix": [-1.0],
    "augment.repeats": [0, 3],
    "model.dropout": [1.0, math.nan],
    "model.args": [{"a": "b\n"}, {"img size": 3}, {"layers": [2, 2]}],
    "model.freeze": ["fc"],
    "optim.name": ["adam"],
    "optim.lr": [0.0, math.nan, math.inf, "0.1"],
    "optim.momentum": [1.0, 0.0],
    "optim.betas": [(0.9, 1.5), (0.9,)],
    "optim.weight_decay": [-1.0],
    "optim.clip_norm": [-1.0],
    "optim.max_nonfinite": [-1],
    "optim.label_smoothing": [1.0],
    "optim.layer_decay": [0.0, 1.5],
    "optim.head_lr": [0.0],
    "optim.groups": [
        *(("lr=0.1",), ("layer1",), ("layer1", "lr=0"), ("layer1", "lr=fast")),
        *(("layer1", "weight_decay=-1"), ("layer1", "momentum=0.1")),
    ],
    "loss.gamma": [0.5],
    "schedule.warmup_epochs": [-1.0],
    "schedule.final_lr": [1.5],
    "schedule.step_epochs": [0.0],
    "schedule.gamma": [-0.1, 10.0, None],
    "ddp.bucket_cap_mb": [0.0],
    "eval.every_epochs": [-1],
    "checkpoint.every_epochs": [-1],
    "checkpoint.every_steps": [-1],
    "checkpoint.every_s": [-1.0, "sometimes"],
    "checkpoint.max_failed": [0],
    "checkpoint.keep_last": [1],
    "scaling.num_workers": [0, -1, 5, "3:2", "0:2", "many", "1:2:3", [1]],
    "scaling.cpus_per_worker": [0.00001],
    "scaling.gpus_per_worker": [0.0, 2.0],
    "scaling.max_failures": [-1],
    "scaling.wait_s": [-1.0],
    "scaling.resize_s": [0.0],
    "scaling.start_timeout_s": [0.0, "long"],
    "scaling.hang_s": [-1.0, "long"],
    "scaling.check_every_steps": [-1],
    "log.every_steps": [0],
}

A_SWEEP = dict.fromkeys(("runs/rates/sweep.json", "runs/rates/trial-1/config.toml"), "")
ROWS = [
    Row("--task image-clasification", 2, "'image-classification'", light=True),
    Row("--optim.name adamw --optim.momentum 0.9", 2, "optim.momentum optim.name", light=True),
    Row("char-lm --describe", 2, "char-lm examples/char_lm.py", light=True),
    Row("--no-ddp.shard-optimizer", 2, "ddp.shard", light=True),
    Row("--local --address auto", 2, "--address --local", light=True),
    Row("--storage taken/runs", 3, "taken/runs", {"taken": ""}),
    Row("evaluate rates", 2, "rates trial-1", A_SWEEP),
    # What ends a run, averages, exact mode, patterns of parameters.
    Row("--max-time 90", 2, "max_time '90'", light=True),
    Row("--limit-train-batches 3 --overfit-batches 2", 2, "overfit_batches", light=True),
    Row("--limit-eval-batches -1", 2, "limit_eval_batches -1", light=True),
    Row("--ema.decay 1", 2, "ema.decay 1", light=True),
    Row("--exact --ddp.compression bf16", 2, "exact ddp.compression", light=True),
    Row("--exact --ddp.sync-batchnorm", 2, "exact ddp.sync_batchnorm", light=True),
    Row("--exact --compute.deterministic false", 2, "exact compute.deterministic", light=True),
    Row("--exact --compute.compile", 2, "exact compute.compile", light=True),
    Row("--dry-run --model.freeze feature", 2, "model.freeze 'feature' 'features'"),
    Row("--dry-run --optim.groups body lr=1", 2, "optim.groups 'body'"),
    Row("--dry-run --model.freeze head --optim.head-lr 1", 2, "optim.head_lr frozen"),
    Row("--dry-run --optim.layer-decay 0.5", 2, "optim.layer_decay 0.5"),
]
