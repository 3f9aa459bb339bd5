"""Computes the machines that a config needs, and chooses a cloud's machine type for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError

# One decodes 500 to 1,000 images/s; an H100 trains a ResNet-50 on 2,500 to 3,000.
_CPUS_PER_GPU = 8
_TORCH_GIB, _RAY_GIB = 4, 4  # host memory of a worker besides its data; of Ray and the driver
_SMALL_GIB = 2  # of a worker on CPUs with the built-in data, which are small


@dataclass(frozen=True)
class Machines:
    """What the workers of a config need: `nodes` machines, each with these resources."""

    nodes: int
    cpus: int
    gpus: int
    memory_gib: int


@dataclass(frozen=True)
class Type:
    """A cloud's machine type, with at most one GPU."""

    name: str
    cpus: int
    memory_gib: int


# By cloud, and whether they have a GPU; from small to large: name, CPUs and GiB of memory.
_TYPES = {
    ("aws", True): "g6.xlarge 4 16, g6.2xlarge 8 32, g6.4xlarge 16 64, g6.8xlarge 32 128, "
    "g6.16xlarge 64 256",
    ("aws", False): "m7i.large 2 8, m7i.xlarge 4 16, m7i.2xlarge 8 32, m7i.4xlarge 16 64, "
    "m7i.8xlarge 32 128",
    ("gcp", True): "g2-standard-4 4 16, g2-standard-8 8 32, g2-standard-12 12 48, "
    "g2-standard-16 16 64, g2-standard-32 32 128",
    ("gcp", False): "n2-standard-2 2 8, n2-standard-4 4 16, n2-standard-8 8 32, "
    "n2-standard-16 16 64, n2-standard-32 32 128",
    ("azure", True): "Standard_NC4as_T4_v3 4 28, Standard_NC8as_T4_v3 8 56, "
    "Standard_NC16as_T4_v3 16 110",
    ("azure", False): "Standard_D2s_v5 2 8, Standard_D4s_v5 4 16, Standard_D8s_v5 8 32, "
    "Standard_D16s_v5 16 64, Standard_D32s_v5 32 128",
}


def machines(config: TrainConfig, most_per_node: int) -> Machines:
    """The minimum number of equal nodes for all workers of a config that sets their number.

    With `scaling.placement` STRICT_PACK all are on one node, with SPREAD each has its own.

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


def smallest_type(cloud: str, need: Machines) -> Type:
    """The smallest known machine type of a cloud that is sufficient for one of `need`.

    Raises:
        ConfigError: there is none.
    """
    rows = (row.split() for row in _TYPES[cloud, need.gpus > 0].split(","))
    types = [Type(name, int(cpus), int(memory_gib)) for name, cpus, memory_gib in rows]
    fitting = [t for t in types if t.cpus >= need.cpus and t.memory_gib >= need.memory_gib]
    if need.gpus > 1 or not fitting:
        largest = types[-1]
        raise ConfigError(
            f"no known machine of {cloud} has {need.gpus} GPUs, {need.cpus} CPUs and "
            f"{need.memory_gib} GiB; the largest is {largest.name} with {min(need.gpus, 1)}, "
            f"{largest.cpus} and {largest.memory_gib}. Set --scaling.placement PACK, lower "
            "--scaling.cpus-per-worker or --data.memory-mib, or fill in a larger one in "
            f"clusters/{cloud}.yaml by hand."
        )
    return fitting[0]
