"""Rows of the table of errors: what ends a run, averages, exact mode, patterns of parameters."""

from __future__ import annotations

from refused import Row

ROWS = [
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
