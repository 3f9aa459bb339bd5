"""One lab and one cluster for all opt-in tests with several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import HOSTS, Cluster, Run
from lab import Lab, lacking
from slurm_cluster import SlurmCluster, lacking_slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Possibly not up: see `lan`."""
    why = lacking()
    if why:
        pytest.skip(why)
    shared = tmp_path_factory.mktemp("shared")
    lab = Lab([shared], HOSTS)
    yield Cluster(lab, shared)
    lab.down()


@pytest.fixture
def lan(cluster: Cluster) -> Cluster:
    """The cluster, brought up with the first command of lan.yaml, with all links up and all hosts
    on."""
    cluster.up()
    return cluster


@pytest.fixture(scope="session")
def undisturbed(cluster: Cluster) -> Run:
    """An undisturbed run with three workers."""
    cluster.up()
    with cluster.own("--scaling.num-workers 3") as run:
        run.finish()
    return run


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes; jobs are submitted in a folder that all hosts share, like the folders of the
    tests."""
    why = lacking() or lacking_slurm()
    if why:
        pytest.skip(why)
    folder, shared = tmp_path_factory.mktemp("slurm"), tmp_path_factory.getbasetemp()
    cluster = SlurmCluster(folder, shared)
    yield cluster
    cluster.down()
