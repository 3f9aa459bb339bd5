"""Which flag was meant by one that does not exist."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

# A flag, and its names in torchvision's references, timm, Lightning, Transformers and torchrun.
_OTHER_NAMES = """
name            run-name exp-name experiment job-name
storage         output output-dir out-dir save-dir default-root-dir
task-options    task-args task-kwargs
seed            random-seed manual-seed
epochs          num-epochs max-epochs n-epochs num-train-epochs
steps           max-steps num-steps num-train-steps train-iters
max-time        time-limit
limit-eval-batches     limit-val-batches limit-test-batches
stop.patience          patience early-stopping-patience
stop.min-delta         min-delta early-stopping-threshold
batch-size      bs global-batch-size train-batch-size
micro-batch     micro-batch-size per-device-train-batch-size gradient-accumulation-steps grad-accum
data.source     data dataset data-dir data-path train-dir train-data
data.eval-source       val-dir eval-dir val-data eval-data test-data eval-dataset
data.eval-split        val-split
data.holdout           val-fraction validation-fraction test-size
data.image-size        img-size imgsz image-size input-size crop-size resolution
data.workers           loader-workers dataloader-num-workers
data.prefetch          prefetch-factor
augment.flip           hflip horizontal-flip
augment.policy         auto-augment autoaugment aa augmentation
augment.erase          random-erase random-erasing reprob
augment.mixup          mixup-alpha
augment.cutmix         cutmix-alpha
augment.jitter         color-jitter
model.name             model arch model-name architecture
model.weights          pretrained
model.dropout          drop drop-rate
optim.name             opt optim optimizer optimizer-name
optim.lr               learning-rate base-lr max-lr
optim.weight-decay     wd decay l2
optim.clip-norm        clip-grad clip-grad-norm grad-clip gradient-clip-val max-grad-norm
optim.label-smoothing  smoothing
schedule.name          scheduler sched lr-scheduler schedule
schedule.warmup-epochs warmup lr-warmup-epochs
schedule.final-lr      min-lr lr-min
schedule.step-epochs   lr-step-size decay-epochs
schedule.gamma         lr-gamma
compute.precision      amp fp16 bf16 mixed-precision dtype
compute.compile        torchcompile torch-compile
ddp.sync-batchnorm     sync-bn
eval.every-steps       eval-steps val-check-interval
eval.every-epochs      eval-interval val-interval check-val-every-n-epoch
checkpoint.every-steps save-every save-steps checkpoint-interval
checkpoint.keep-last   keep save-total-limit checkpoint-hist
scaling.num-workers    gpus num-gpus ngpus n-gpus devices workers num-processes world-size
scaling.num-workers    nproc-per-node
scaling.use-gpu        gpu cuda use-cuda
scaling.max-failures   max-restarts
log.every-steps        log-interval print-freq logging-steps
"""


def meant(name: str, known: Collection[str]) -> list[str]:
    """The known flags that may have been meant by `name`; both without dashes in front."""
    name = name.lower().replace("_", "-")
    head, _, last = name.rpartition(".")
    last = last.removeprefix("no-")
    for line in _OTHER_NAMES.split("\n"):
        flag, *others = line.split() or [""]
        is_it = name in others or (last in others and head in ("", flag.partition(".")[0]))
        if is_it and flag in known:
            return [flag]
    same = [flag for flag in known if flag.rpartition(".")[2] == last]
    dotless = [flag for flag in known if flag.replace(".", "-") == name.replace(".", "-")]
    return dotless or same[:3] or _close(name, known) or _begun(name, known)


def _close(name: str, known: Collection[str]) -> list[str]:
    of_last = {flag.rpartition(".")[2]: flag for flag in known}
    found = get_close_matches(name, [*known], n=2, cutoff=0.75)
    return found or [of_last[last] for last in get_close_matches(name, of_last, n=2, cutoff=0.75)]


def _begun(name: str, known: Collection[str]) -> list[str]:
    return [flag for flag in known if name and flag.startswith(name)][:3]
