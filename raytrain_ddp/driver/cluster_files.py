"""``--emit``: fills this run's workers, memory, storage and command into the files of clusters/.

Uses the files in clusters/ as templates, so there is one source. Imports neither torch nor Ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal

from raytrain_ddp.config.recipe import default_name, is_by_name, publishable, shipped_recipes
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.recipe_args import FIT, command
from raytrain_ddp.files import absolute

Kind = Literal["slurm", "kuberay", "command"]

FOLDER = Path(__file__).parents[1] / "clusters"  # a link to clusters/ beside the package
# Defaults, if a config says nothing about the machines.
_WORKERS = 2
_WORKERS_PER_NODE = 4  # half or all of the GPUs of common nodes
_PODS_WAIT_S = 600  # time to pull images
# A CPU decodes 500 to 1,000 images/s; an H100 trains a ResNet-50 on 2,500 to 3,000 images/s.
_CPUS_PER_GPU = 8
_TORCH_GIB, _RAY_GIB = 4, 4  # host memory of a worker without its data; of Ray and the driver
_SMALL_GIB = 2  # host memory of a worker on CPUs with the built-in data, which are small


@dataclass(frozen=True)
class Machines:
    """What the workers of a config need: `nodes` machines, each with these resources."""

    nodes: int
    cpus: int
    gpus: int
    memory_gib: int


def object_name(run: str | None) -> str:
    """The name of a Slurm job or a Kubernetes object, which must begin with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", (run or "run").lower())[:40].strip("-") or "run"
    return f"run-{name}" if name[0].isdigit() else name


def emit(config: TrainConfig, kind: Kind, recipe: str | None = None) -> tuple[str, list[str]]:
    """The file for this run, and notes for its reader.

    Args:
        recipe: the source of the config; the command names it if it is a shipped recipe.

    Raises:
        ConfigError: a value cannot be written in a command.
    """
    base = recipe if recipe in shipped_recipes() else None
    if config.name is None and base is None:  # the command does not mention the recipe
        config = replace(config, name=default_name(recipe))
    shown = publishable(config)
    notes = [] if shown == config else ["parts of a URI that may be secret were omitted."]
    if kind == "command":
        return command(shown, base) + "\n", notes
    filled, filled_notes = _filled(shown)
    name = object_name(config.name or base)
    if kind == "slurm":
        return _slurm(filled, base, name), notes + filled_notes
    return _kuberay(filled, base, name), notes + filled_notes + _unshared(filled)


def _filled(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Replaces `auto` values that would mean an existing cluster; returns notes about that."""
    scaling, notes = config.scaling, []
    if scaling.use_gpu == "auto":
        scaling = replace(scaling, use_gpu=True)
        notes.append("scaling.use_gpu = auto: machines with GPUs; False for machines without.")
    if scaling.num_workers == "auto":
        scaling = replace(scaling, num_workers=min(_WORKERS, config.slots))
        notes.append(
            f"scaling.num_workers = auto: {scaling.num_workers}; set the number with "
            "--scaling.num-workers."
        )
    return replace(config, scaling=scaling), notes


def _unshared(config: TrainConfig) -> list[str]:
    """Notes about files on this machine's disk that all pods would need."""
    notes = []
    if "://" not in config.storage:
        notes.append(
            f"storage = {config.storage} is a folder, which the pods do not share unless it is "
            "mounted at the same path on each: use s3://, gs:// or abfs://."
        )
    for field in ("source", "eval_source"):
        value = getattr(config.data, field) or "digits"
        if "://" not in value and not is_by_name(value):
            notes.append(f"data.{field} = {value} must exist on each of the pods.")
    return notes


def machines(config: TrainConfig, most_per_node: int) -> Machines:
    """The minimum number of equal nodes for all workers of a config that sets their number.

    With `scaling.placement` STRICT_PACK, all are on one node; with SPREAD, each has its own.

    Args:
        most_per_node: GPUs per node, or workers if there are no GPUs.
    """
    scaling = config.scaling
    workers = scaling.worker_range()[1]
    per_gpu = int(1 / scaling.gpus_per_worker + 1e-9) if scaling.use_gpu else 1
    wanted = ceil(workers / per_gpu)
    if scaling.placement == "STRICT_PACK":
        most_per_node = wanted
    elif scaling.placement != "PACK":
        most_per_node, per_gpu, wanted = 1, 1, workers
    nodes = ceil(wanted / most_per_node)
    per_node = ceil(wanted / nodes)
    here = min(workers, per_node * per_gpu)
    cpus = here * scaling.cpus_without_gpu
    if scaling.use_gpu and scaling.cpus_per_worker == "auto":
        cpus = per_node * _CPUS_PER_GPU
    data_mib, torch_gib = config.data.prefetch_mib, _TORCH_GIB
    if config.data.source == "digits":
        data_mib, torch_gib = 0, _TORCH_GIB if scaling.use_gpu else _SMALL_GIB
    elif not config.data.source.startswith("torchvision:"):  # may be row groups of Parquet
        data_mib += 2 * config.data.memory_mib  # also for evaluation
    return Machines(
        nodes=nodes,
        cpus=max(1, ceil(cpus)),
        gpus=per_node if scaling.use_gpu else 0,
        memory_gib=here * (torch_gib + ceil(data_mib / 1024)) + _RAY_GIB,
    )


# ------------------------------------------------------------------ the files


def _slurm(config: TrainConfig, base: str | None, name: str) -> str:
    if "://" not in config.storage:
        config = replace(config, storage=absolute(config.storage))
    need = machines(config, _WORKERS_PER_NODE)
    lines = {
        "#   bring up and train   sbatch ": f"{name}.sbatch",
        "#SBATCH --job-name=": name,
        "#SBATCH --nodes=": need.nodes,
        "#SBATCH --cpus-per-task=": need.cpus,
        "#SBATCH --mem=": f"{need.memory_gib}G",
        "#SBATCH --gpus-per-node=": need.gpus,
        f"run=({FIT}": f'{command(config, base).removeprefix(FIT)} "$@")',
    }
    text = _put(_read("slurm.sbatch"), lines)
    return text.replace("#SBATCH --gpus-per-node=0\n", "")


def _kuberay(config: TrainConfig, base: str | None, name: str) -> str:
    """The RayJob of the file, without the RayCluster; it waits longer for workers, unless the user
    has chosen a time."""
    if config.scaling.wait_s == ScalingConfig().wait_s:
        config = replace(config, scaling=replace(config.scaling, wait_s=_PODS_WAIT_S))
    need = machines(config, _WORKERS_PER_NODE)
    least, most = config.scaling.worker_range()
    job = _read("kuberay.yaml").partition("\n---\n")[0] + "\n"
    job = re.sub(r", and\n# a RayCluster that stays.*?\n#\n", ".\n#\n", job, flags=re.DOTALL)
    job = re.sub(r"#\n# The same with .*?\n#\n", "#\n", job, flags=re.DOTALL)
    job = job.replace("clusters/kuberay.yaml -l raytrain=job", f"{name}.yaml")
    job = job.replace("job/raytrain", f"job/{name}").replace(" and BUCKET.", ".")
    head, mark, workers = job.partition("    workerGroupSpecs:\n")
    started = command(config, base).removeprefix(FIT)
    head = _put(head, {"  name: ": name, f"    {FIT}": started})
    size = f'cpu: "{need.cpus}", memory: {need.memory_gib}Gi'
    gpus = f', nvidia.com/gpu: "{need.gpus}"' if need.gpus else ""
    lines = {
        "      - groupName: ": "gpu" if need.gpus else "cpu",
        "        replicas: ": need.nodes,
        "        minReplicas: ": ceil(need.nodes * least / most),
        "        maxReplicas: ": need.nodes,
        "                  requests: ": f"{{{size}}}",
        "                  limits: ": f"{{{size}{gpus}}}",
    }
    workers = _put(workers, lines)
    if not need.gpus:
        workers = re.sub(r"(?m)^.*nvidia.*\n", "", workers)
    return head + mark + workers


def _read(file: str) -> str:
    return (FOLDER / file).read_text(encoding="utf-8")


def _put(text: str, lines: Mapping[str, object]) -> str:
    """Replaces the rest of the one line that begins with each key; keeps a trailing comment."""
    for start, value in lines.items():
        pattern = re.compile(rf"(?m)^({re.escape(start)})[^\n]*?((?: +# [^\n]*)?)$")
        new = str(value).replace("\\", r"\\")
        text, times = pattern.subn(rf"\g<1>{new}\g<2>", text)
        assert times == 1, f"{times} lines of a file in clusters/ begin with {start!r}"
    return text
