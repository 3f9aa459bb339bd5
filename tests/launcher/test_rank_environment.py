"""Ranks of the workers of `run`, and the environment and command of each."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from raytrain_ddp.launcher.code_shipping import path_in_copy
from raytrain_ddp.launcher.rank_environment import (
    Placement,
    RankedGroup,
    assign_ranks,
    base_environment,
    rank_variables,
)
from raytrain_ddp.launcher.run_options import RunFlags, RunOptions

OWN = {
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_JOB_ID": "123",
    "GROUP_NAME": "mine",
    "ROLE_ARN": "arn",
    "TORCHELASTIC_ENABLE_FILE_TIMER": "1",
    "MASTER_KEY": "k",
}
OTHERS = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NODELIST": "n",
    "NODE_RANK": "3",
    "GROUP_RANK": "3",
    "ROLE_NAME": "x",
    "MASTER_PORT": "1",
    "RAY_ADDRESS": "x",
    "TORCHELASTIC_RUN_ID": "old",
}


def three_on_two_nodes() -> RankedGroup:
    """Two workers on the driver's node and one on another; given in a different order."""
    seats = [
        Placement(0, "b", "10.0.0.9", "w9", ["0"]),
        Placement(1, "a", "10.0.0.10", "w10", ["10"]),
        Placement(2, "a", "10.0.0.10", "w10", ["2"]),
    ]
    return RankedGroup(assign_ranks(seats), 23456, "0123456789abcdef", attempt=1)


@pytest.mark.parametrize(("local", "kind"), [(True, "torchrun"), (False, "slurm")])
def test_the_scripts_variables_are_kept_and_those_of_another_group_removed(local: bool, kind: str):
    group = three_on_two_nodes()
    base = base_environment({**OWN, **OTHERS}, {}, local)
    assert base == OWN
    env = rank_variables(RunFlags(env=kind), group, group.workers[2], base)
    assert {name: env[name] for name in OWN} == OWN
    assert not {name for name, value in OTHERS.items() if env.get(name) == value}


def test_ranks_are_ordered_by_node_then_gpu():
    workers = three_on_two_nodes().workers
    assert [w.seat.number for w in workers] == [0, 2, 1]
    places = [(w.rank, w.local_rank, w.node_rank) for w in workers]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 1)]
    assert [w.gpus for w in workers] == [["0"], ["2", "10"], ["2", "10"]]
    assert [w.rank for w in assign_ranks([w.seat for w in workers], first_node="a")] == [0, 1, 2]
    assert assign_ranks([w.seat for w in workers], first_node="a")[0].seat.number == 2


def test_a_rank_gets_torchruns_environment_variables_and_those_of_its_flags():
    """All of them are compared with torchrun's in test_run_local.py, on one node."""
    group = three_on_two_nodes()
    expected = {"RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}
    expected |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "2", "ROLE_NAME": "me"}
    expected |= {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "23456", "CUDA_VISIBLE_DEVICES": "2,10"}
    expected |= {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "0123456789abcdef"}
    for flags, base, changed in (
        (RunFlags(role="me", cpus_per_worker=4), {}, {"OMP_NUM_THREADS": "4"}),
        (RunFlags(role="me"), {"OMP_NUM_THREADS": "7"}, {"OMP_NUM_THREADS": "7"}),
        (RunFlags(role="me", cpus_per_worker=0.5), {}, {"OMP_NUM_THREADS": "1"}),
        (
            RunFlags(role="me", rdzv_id="job", virtual_local_rank=True),
            {},
            {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "10"},
        ),
    ):
        env = rank_variables(flags, group, group.workers[2], base)
        wanted = expected | changed
        assert {name: env[name] for name in wanted} == wanted
    alone = rank_variables(RunFlags(), group, group.workers[0], {})
    assert "OMP_NUM_THREADS" not in alone  # on its node


def test_the_drivers_environment_is_sent_without_machine_specific_variables():
    driver = {
        "PATH": "/driver",
        "WANDB_API_KEY": "k",
        "NCCL_DEBUG": "INFO",
        "PYTHONHASHSEED": "0",
        "PYTHONHOME": "/home",
        "PYTHONPATH": "/here/src::lib",
        "RAY_ADDRESS": "x",
        "RANK": "5",
        "VIRTUAL_ENV": "/v",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    node = {"PATH": "/node", "NCCL_DEBUG": "WARN", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1"}
    node |= {"PYTHONBREAKPOINT": "ray.util.rpdb.set_trace", "PYTHONPATH": "/site:lib"}
    there = partial(path_in_copy, here=Path("/here"), there="/copy")
    expected = {
        "PATH": "/node",
        "NCCL_DEBUG": "WARN",
        "WANDB_API_KEY": "k",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": "/copy/src:lib:/site",
    }
    assert base_environment(driver, node, False, moved=there) == expected


def test_placeholders_are_filled_in_and_other_braces_are_unchanged():
    group = three_on_two_nodes()
    order = RunOptions(
        RunFlags(legacy_local_rank=True),
        "old.py",
        ("--r={rank}/{world_size}", "{init_method}", "{'lr': 1}", "{ranks}", "{{rank}}"),
    )
    command = order.command("python", group.placeholders(group.workers[1]))
    assert command[:4] == ["python", "-u", "old.py", "--local_rank=0"]
    assert command[4:] == ["--r=1/3", "tcp://10.0.0.9:23456", "{'lr': 1}", "{ranks}", "{1}"]
    order = RunOptions(
        RunFlags(no_python=True), "./go.sh", ("{node_rank}", "{master_addr}:{master_port}")
    )
    command = order.command("python", group.placeholders(group.workers[1]))
    assert command == ["./go.sh", "1", "10.0.0.9:23456"]
