"""``--emit``: fills this run's workers, memory, storage and command into the files of clusters/.

Uses the files in clusters/ as templates, so there is one source. Imports neither torch nor Ray.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal

from raytrain_ddp.config.paths import is_by_name
from raytrain_ddp.config.recipe import default_name, publishable, shipped_recipes
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import require
from raytrain_ddp.driver.config_flags import FIT, command
from raytrain_ddp.files import absolute

Kind = Literal["slurm", "kuberay", "ray-up", "command"]

FOLDER = Path(__file__).parents[1] / "clusters"  # a link to clusters/ beside the package
# Defaults, if a config says nothing about the machines.
_WORKERS = 2
_WORKERS_PER_NODE = 4  # half or all of the GPUs of common nodes
_PODS_WAIT_S, _CLOUD_WAIT_S = 600, 1800  # time to pull images; to rent and set up machines
# A CPU decodes 500 to 1,000 images/s; an H100 trains a ResNet-50 on 2,500 to 3,000 images/s.
_CPUS_PER_GPU = 8
_TORCH_GIB, _RAY_GIB = 4, 4  # host memory of a worker without its data; of Ray and the driver
_SMALL_GIB = 2  # host memory of a worker on CPUs with the built-in data, which are small
_CLOUD_OF = {"s3": "aws", "gs": "gcp", "gcs": "gcp", "abfs": "azure", "abfss": "azure"}
_BUCKET_NAME = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,221}")
_TYPE_LINE = {
    "aws": "      InstanceType: ",
    "gcp": "      machineType: ",
    "azure": "        vmSize: ",
}


@dataclass(frozen=True)
class Machines:
    """What the workers of a config need: `nodes` machines, each with these resources."""

    nodes: int
    cpus: int
    gpus: int
    memory_gib: int

    def __str__(self) -> str:
        return f"{self.cpus} CPUs, {self.gpus} GPUs and {self.memory_gib} GiB"


def object_name(run: str | None) -> str:
    """The name of a Slurm job, a cluster or a Kubernetes object, which must begin with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", (run or "run").lower())[:40].strip("-") or "run"
    return f"run-{name}" if name[0].isdigit() else name


def emit(config: TrainConfig, kind: Kind, recipe: str | None = None) -> tuple[str, list[str]]:
    """The file for this run, and notes for its reader.

    Args:
        recipe: the source of the config; the command names it if it is a shipped recipe.

    Raises:
        ConfigError: the storage has no valid bucket, or a value cannot be written in a command.
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
        text = _slurm(filled, base, name)
    elif kind == "kuberay":
        text = _kuberay(_waiting(filled, _PODS_WAIT_S), base, name)
        filled_notes += _unshared(filled, "pods")
    else:
        cloud = _CLOUD_OF.get(filled.storage.partition("://")[0])
        if cloud:
            filled_notes.append(f"storage = {filled.storage}: clusters/{cloud}.yaml, filled in.")
            text = _cloud(_waiting(filled, _CLOUD_WAIT_S), cloud, base, name)
        else:
            filled_notes += _unshared(filled, "machines")
            text = _lan(filled, base, name)
    return text, notes + filled_notes


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


def _waiting(config: TrainConfig, wait_s: float) -> TrainConfig:
    """The config with a longer wait for workers, unless the user has chosen one."""
    if config.scaling.wait_s != ScalingConfig().wait_s:
        return config
    return replace(config, scaling=replace(config.scaling, wait_s=wait_s))


def _unshared(config: TrainConfig, those: str) -> list[str]:
    """Notes about files on this machine's disk that all machines would need."""
    notes = []
    if "://" not in config.storage:
        notes.append(
            f"storage = {config.storage} is a folder, which the {those} do not share unless it is "
            "mounted at the same path on each: use s3://, gs:// or abfs://."
        )
    for field in ("source", "eval_source"):
        value = getattr(config.data, field) or "digits"
        if "://" not in value and not is_by_name(value):
            notes.append(f"data.{field} = {value} must exist on each of the {those}.")
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
    """The RayJob of the file, without the RayCluster."""
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
    return _with_folder(config, head + mark + workers)


def _lan(config: TrainConfig, base: str | None, name: str) -> str:
    need = machines(config, 1)
    blank = "worker_ips: [192.168.1.11] # fill in"
    filled = f"{blank}; {need.nodes} machines with {need}, head included, or fewer larger ones"
    return _with_folder(config, _launched("lan", config, base, name, {blank: filled}))


def _cloud(config: TrainConfig, cloud: str, base: str | None, name: str) -> str:
    need = machines(config, 1)
    text = _launched(cloud, config, base, name, _bucket(config.storage))
    head, mark, worker = text.partition("  worker:\n")
    gpu = f', "GPU": {need.gpus}' if need.gpus else ""
    lines = {
        "    max_workers: ": need.nodes,
        "    resources: ": f'{{"CPU": {need.cpus}{gpu}}}',
        _TYPE_LINE[cloud]: f"FILL-IN # {need}, or more",
    }
    return _put(head, {"max_workers: ": need.nodes}) + mark + _put(worker, lines)


def _launched(
    file: str, config: TrainConfig, base: str | None, name: str, blanks: Mapping[str, str]
) -> str:
    """A file for `ray up`, with its name, its blanks filled in, and the command in its opening."""
    text = _read(f"{file}.yaml").replace(f"clusters/{file}.yaml", f"{name}.yaml")
    for blank, value in blanks.items():
        # Its first occurrence is in the list of what the reader must fill in.
        text = text.replace(f" {blank},", "", 1).replace(blank, value)
    job = shlex.quote(f"ray job submit -- {command(config, base)}")
    lines = {
        "cluster_name: ": f"raytrain-{name}",
        "#   train       ": f"ray exec {name}.yaml {job}",
    }
    return _put(text, lines)


def _bucket(storage: str) -> dict[str, str]:
    """The replacements for the storage's placeholders in the cloud files."""
    scheme, _, rest = storage.partition("://")
    place, _, path = rest.partition("/")
    names = {"BUCKET": place}
    if scheme.startswith("abfs"):
        container, _, host = place.rpartition("@")
        names = {"CONTAINER": container or path.partition("/")[0]}
        names["ACCOUNT"] = host.partition(".")[0]
    for name in names.values():
        plain = bool(_BUCKET_NAME.fullmatch(name))
        rule = f"{name!r} is not a valid bucket, account or container name"
        require(plain, "storage", storage, rule)
    return names


def _with_folder(config: TrainConfig, text: str) -> str:
    """Adds a comment about a storage folder to the file, where it is read later."""
    if "://" in config.storage:
        return text
    comment = (
        f"# storage is the folder {config.storage}: each machine must reach the same one there."
    )
    first, _, rest = text.partition("#\n")
    return f"{first}#\n{comment}\n#\n{rest}"


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
