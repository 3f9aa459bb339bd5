"""`run`: the environment of each process, how failures are reported, and that nothing is left
behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import run_cli

from raytrain_ddp.config.validation import LEAST_OF_RESOURCE
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.launcher import code_shipping, worker_group
from raytrain_ddp.launcher import script_launch as launching
from raytrain_ddp.launcher.agent import Agent
from raytrain_ddp.launcher.capacity import capacity_error, connected, layout_for, missing_capacity
from raytrain_ddp.launcher.exit_report import RankExit, failure_report, first_failure, format_ranks
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.rank_environment import (
    Placement,
    RankedGroup,
    assign_ranks,
    base_environment,
    not_passed_on,
    placeholder_values,
    rank_variables,
    rendezvous_address,
)
from raytrain_ddp.launcher.run_options import RunFlags, RunOptions, fill
from raytrain_ddp.launcher.script_launch import preview, run_script
from raytrain_ddp.launcher.worker_group import OF_AGENT, WorkerGroup
from raytrain_ddp.launcher.working_folder import provide_folders
from raytrain_ddp.ray_backend.ray_settings import SETTINGS, by_value
from raytrain_ddp.run import parse, split

ROOT = Path(__file__).parents[2]
GUARD = Path(code_shipping.__file__).with_name("supervisor.py")

# ------------------------------------------------------------------ the command line


def test_arguments_after_the_script_are_passed_to_it():
    own = ["--num_workers=3", "--use-gpu", "--max-restarts", "2"]
    order = parse([*own, "train.py", "--num-workers", "7", "--", "-m"])
    assert order.flags == RunFlags(num_workers=3, use_gpu=True, max_restarts=2)
    assert (order.program, order.module) == ("train.py", False)
    assert order.args == ("--num-workers", "7", "--", "-m")


def test_a_module_can_replace_the_script():
    order = parse(["-m", "--num-workers", "2", "package.train", "-m", "x"])
    assert (order.module, order.program, order.args) == (True, "package.train", ("-m", "x"))
    values = dict.fromkeys(("rank", "local_rank"), "0")
    assert order.command("py", values) == ["py", "-u", "-m", "package.train", "-m", "x"]


def test_a_double_dash_ends_our_flags():
    assert split(["--use-gpu", "--", "-odd.py", "--x"]) == ([("use-gpu", None)], ["-odd.py", "--x"])


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        (["--num-workers", "2"], "which script"),
        (["--nproc-per-node", "4", "--num-workers", "4", "train.py"], "--num-workers"),
        (["--nproc-per-node", "some", "train.py"], "auto, cpu or gpu"),
        (["--nnodes", "3:2", "train.py"], "1:4"),
        (["--standalone", "--address", "auto", "train.py"], "--address"),
        (["--signals-to-handle", "SIGKILL", "train.py"], "SIGKILL"),
        (["--num-workers", "0", "train.py"], "must be 1 or more"),
        (["--num-workers", "9" * 20, "train.py"], "must be below 100000"),
        (["--nproc-per-node", "9" * 5000, "train.py"], "below 100000"),
        (["--nnodes", "1:" + "9" * 5000, "train.py"], "below 100000"),
        (["--nnodes", "9999", "--nproc-per-node", "9999", "train.py"], "together, below 100000"),
        (["--num-workers", "2", "--show", "9" * 5000, "train.py"], "0,2,5"),
        (["--gpus-per-worker", "2", "train.py"], "--use-gpu"),
        (["--tee", "first", "train.py"], "0:1,1:3"),
        (["--show", "first", "train.py"], "0,2,5"),
        (
            ["--num-workers", "2", "--show", "2,5", "train.py"],
            "must name a rank below --num-workers = 2",
        ),
        (["--cpus-per-worker", "0.00001", "train.py"], "must be 0.0001 or more"),
        (["train\udcff.py"], "Ray takes words in UTF-8 only"),
        (["--no-python", "--legacy-local-rank", "train.sh"], "{local_rank}"),
    ],
)
def test_invalid_flags_are_refused_with_a_remedy(argv: list[str], reported: str):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert reported in str(caught.value)


TORCHRUNS = [
    "--nproc-per-node 4 train.py",
    "--nproc_per_node=4 train.py --nproc-per-node 9",
    "--nproc-per-node gpu --nnodes 1:4 --max-restarts=3 train.py -m x",
    "--standalone --nnodes=1 --nproc-per-node=2 train.py --lr 0.1",
    "-t 3 -r 0:1,1:2 --log-dir logs --nproc-per-node 2 train.py",
    "-t3 -r1 --nproc-per-node 2 train.py",
    "-r=1 --nproc-per-node 2 train.py",
    "--redirects 3 --tee 0 --nproc-per-node 2 train.py --tee 1",
    "-m --nproc-per-node 2 package.train --x -- y",
    "--module --nproc-per-node 2 package.train",
    "--no-python --nproc-per-node 2 ./go.sh -x",
    "--no_python --run_path --nproc-per-node 2 /a/train.py",
    "--rdzv-backend c10d --rdzv-endpoint host:29400 --rdzv-id 7 --rdzv-conf a=1 train.py",
    "--rdzv_backend=c10d --rdzv_endpoint=host:29400 --rdzv_id=job --nnodes 2 train.py -t 3",
    "--master-addr 10.0.0.1 --master-port 29501 --node-rank 0 --nproc-per-node 2 train.py",
    "--role trainer --monitor-interval 5 --start-method spawn --nproc-per-node 2 train.py",
    "--local-addr host --event-log-handler null --nproc-per-node 2 train.py",
    "--log-line-prefix-template [${rank}] --local-ranks-filter 0,1 --nproc-per-node 2 train.py",
    "--duplicate-stdout-filters a,b --logs-specs x --nproc-per-node 2 train.py",
    "--max-r 2 --stand --nproc-per-node 2 train.py",
    "--nproc-per-node 2 --nproc-per-node 3 train.py",
    "--nproc-per-node 2 -- train.py --a",
]


@pytest.mark.parametrize("line", TORCHRUNS)
def test_torchrun_command_lines_are_parsed_as_by_torchrun(line: str):
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    known = {flag.replace("_", "-") for action in parser._actions for flag in action.option_strings}
    used = line.replace(" -- ", " train.py ").partition("train")[0]
    missing = set(re.findall(r"--[a-z-]{6,}", used.replace("_", "-"))) - known
    if missing:
        pytest.skip(f"this torch's torchrun has no {', '.join(missing)}")
    order, theirs = parse(line.split()), parser.parse_args(line.split())
    assert (order.program, list(order.args)) == (
        theirs.training_script,
        list(theirs.training_script_args),
    )
    assert order.module == theirs.module
    for name in ("max_restarts", "tee", "redirects", "log_dir", "role", "no_python", "standalone"):
        assert getattr(order.flags, name) == getattr(theirs, name), name
    assert (order.flags.nproc_per_node or "1") == theirs.nproc_per_node
    assert (order.flags.nnodes or "1:1") == theirs.nnodes
    assert (order.flags.rdzv_id or "none") == theirs.rdzv_id
    port = order.flags.master_port or parser.get_default("master_port")
    assert port == theirs.master_port
    assert order.flags.local_ranks_filter == theirs.local_ranks_filter
    template = getattr(theirs, "log_line_prefix_template", None)
    template = template or RunFlags().log_line_prefix_template
    assert order.flags.log_line_prefix_template == template


def test_every_torchrun_flag_is_recognized():
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        names = {word.lstrip("-") for word in action.option_strings if "_" not in word}
        if not names or "print-completion" in names:
            continue
        for word in names:
            value = [] if action.nargs == 0 else ["1"]
            given, script = split([f"--{word}" if len(word) > 1 else f"-{word}", *value, "x.py"])
            assert script == ["x.py"], word
            assert len(given) == 1
    # The defaults are torchrun's, too.
    theirs = get_args_parser().parse_args(["x.py"])
    assert RunFlags().signals_to_handle == theirs.signals_to_handle
    assert (RunFlags().tee, RunFlags().redirects) == (theirs.tee, theirs.redirects)


def test_flags_without_effect_are_named_with_the_whole_command():
    line = "--nproc-per-node 2 --rdzv-backend c10d --rdzv-id 1 --start-method fork t.py -x 1"
    order = parse(line.split())
    assert order.notes == (
        "no effect here: --rdzv-backend c10d (Ray connects the nodes, and the ranks rendezvous at "
        "rank 0); --start-method fork (each rank is a separate main process)",
        "equivalent command: python -m raytrain_ddp.run --nproc-per-node 2 --rdzv-id 1 t.py -x 1",
    )
    assert parse(["--nproc-per-node", "2", "--standalone", "t.py"]).notes == ()


def test_a_command_for_another_node_is_refused_with_the_whole_command():
    line = "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr h t.py -x"
    with pytest.raises(ConfigError) as reported:
        parse(line.split())
    command = "python -m raytrain_ddp.run --nnodes 2 --nproc-per-node 4 t.py -x"
    assert str(reported.value).endswith(f"Run this on one machine only: {command}")


@pytest.mark.parametrize("flag", ["-n", "-np", "--np"])
def test_the_process_count_of_mpirun_is_the_total_number_of_workers(flag: str):
    assert parse([flag, "4", "t.py"]).flags.num_workers == 4


def test_shown_ranks_are_selected_by_keyword_or_list_also_with_tee():
    assert parse(["--tee", "none", "-n", "2", "t.py"]).flags.show == "none"
    assert parse(["--tee", "0,2", "-n", "2", "t.py"]).flags.show == "0,2"
    order = parse(["--tee", "0", "-n", "2", "t.py"])
    assert order.flags.show == "all"
    assert "--show 0" in order.notes[0]


def test_torchruns_environment_variables_set_the_defaults():
    environ = {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "2", "PET_STANDALONE": "0", "PET_X": "1"}
    flags = parse(["--nnodes", "1", "t.py"], environ).flags
    assert (flags.nproc_per_node, flags.nnodes, flags.standalone) == ("3", "1", False)
    assert parse(["t.py"], {"PET_STANDALONE": "1", "PET_NPROC_PER_NODE": "1"}).flags.standalone


def test_an_invalid_torchrun_variable_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"^PET_MAX_RESTARTS: --max-restarts takes an integer"):
        parse(["t.py"], {"PET_MAX_RESTARTS": "many"})
    with pytest.raises(ConfigError, match=r"^--max-restarts takes an integer"):
        parse(["--max-restarts", "some", "t.py"], {"PET_MAX_RESTARTS": "many"})


def test_an_argument_that_is_not_a_script_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "plain.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").touch()
    for words in (["plain.py"], ["package"], ["--no-python", "./plain.py"], ["--no-python", "ls"]):
        parse(words).require_possible(tmp_path, {})
    os.mkfifo(tmp_path / "pipe")
    for words, hint in (
        ([str(tmp_path / "pipe")], "there is no script"),
        (["--export", "NOT_SET", "plain.py"], "--export = 'NOT_SET': is not set in this shell"),
        (["torchrun", "--nproc-per-node", "2", "t.py"], "Leave torchrun out"),
        (["python", "t.py"], "Leave python out"),
        (["ls"], "need --no-python"),
        (["plan.py"], "Did you mean 'plain.py'"),
        (["--no-python", "./no.sh"], "there is no script './no.sh'"),
        (["--no-python", "plain.py"], "write ./plain.py"),
    ):
        with pytest.raises(ConfigError, match=hint):
            parse(words).require_possible(tmp_path, {})


def test_flags_after_the_script_are_noted_unless_the_script_defines_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    in_folder(monkeypatch, tmp_path, "parser.add_argument('--log_dir')")
    argv = ["-n", "2", "script.py", "--log-dir", "x", "--max_restarts=3", "--lr", "1", "--use-gpu"]
    (note,) = parse(argv).notes
    assert note.startswith("passed to the script: --max_restarts=3; flags of run must come before")


def test_the_script_is_found_after_flags_without_values():
    order = parse(["--run-path", "--num-workers", "2", "x.py", "--run-path"])
    assert (order.program, order.args, order.flags.num_workers) == ("x.py", ("--run-path",), 2)


# ------------------------------------------------------------------ worker counts as in torchrun

CPUS, GPUS = {"CPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("line", "nodes", "workers", "each", "per_worker"),
    [
        ("--nproc-per-node 2", [CPUS], 2, 2, {"CPU": 1}),
        ("--nproc-per-node 8", [CPUS], 8, 8, {"CPU": 0.5}),
        ("--nproc-per-node 8 --cpus-per-worker 1", [CPUS], 8, 8, {"CPU": 1}),
        ("--nproc-per-node cpu", [CPUS, GPUS], 8, 8, {"CPU": 1}),
        ("--nproc-per-node auto", [CPUS], 4, 4, {"CPU": 1}),
        ("--nproc-per-node auto", [CPUS, GPUS], 4, 4, {"CPU": 1, "GPU": 1}),
        ("--nproc-per-node gpu --nnodes 2", [GPUS, GPUS, CPUS], 8, 4, {"CPU": 1, "GPU": 1}),
        ("--nproc-per-node 4 --nnodes 2", [GPUS, GPUS], 8, 4, {"CPU": 1, "GPU": 1}),
        ("--nproc-per-node 5", [GPUS], 5, 5, {"CPU": 1}),
        ("--nproc-per-node 2 --nnodes 1:4", [CPUS] * 3, 6, 2, {"CPU": 1}),
        ("--nproc-per-node 2 --nnodes 2:4", [CPUS], 4, 2, {"CPU": 1}),
        ("--nnodes 2", [CPUS, CPUS], 2, 1, {"CPU": 1}),
    ],
)
def test_workers_are_counted_by_node_as_torchrun_does(line, nodes, workers, each, per_worker):
    flags = parse([*line.split(), "t.py"]).flags
    layout = layout_for(flags, nodes)
    assert (layout.least, layout.each, layout.per_worker) == (workers, each, per_worker)
    assert len(layout.bundles) == workers // each
    assert layout.bundles[0]["CPU"] == each * per_worker["CPU"]
    short = len(nodes) < workers // each or "--cpus-per-worker 1" in line
    assert bool(missing_capacity(layout, nodes)) == short


def test_missing_gpus_are_reported():
    with pytest.raises(PreflightError, match="--nproc-per-node gpu: no GPU found"):
        layout_for(parse(["--nproc-per-node", "gpu", "t.py"]).flags, [CPUS])


# ------------------------------------------------------------------ the script's own variables

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


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
def test_the_scripts_variables_are_kept_and_those_of_another_group_removed(local: bool, kind: str):
    group = three_on_two_nodes()
    base = base_environment({**OWN, **OTHERS}, {}, local)
    assert base == OWN
    env = rank_variables(RunFlags(env=kind), group, group.workers[2], base, "")
    assert {name: env[name] for name in OWN} == OWN
    assert not {name for name, value in OTHERS.items() if env.get(name) == value}
    assert not_passed_on({**OWN, **OTHERS, "CUDA_VISIBLE_DEVICES": "0"}, group.workers) == sorted(
        [*OTHERS, "CUDA_VISIBLE_DEVICES"]
    )


def test_flags_set_the_same_variables_as_torchrun():
    line = "--nproc-per-node 2 --role me --rdzv-id job --virtual-local-rank t.py"
    group = three_on_two_nodes()
    env = rank_variables(parse(line.split()).flags, group, group.workers[2], {}, "")
    expected = {"ROLE_NAME": "me", "TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0"}
    assert {name: env[name] for name in expected} == expected
    assert env["CUDA_VISIBLE_DEVICES"] == "10"  # its own of 2 and 10
    assert fill("${local_rank} {rank}", placeholder_values(group, group.workers[2])) == "1 2"


def test_help_is_fast_and_a_missing_script_is_named(tmp_path: Path):
    answer = run_cli("run", "--help", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (0, [])
    assert answer.cpu_s < 1
    assert "--num-workers 8 --use-gpu train.py" in answer.out
    (tmp_path / "train.py").touch()
    answer = run_cli("run", "--num-workers", "2", "trian.py", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (2, [])
    assert "'train.py'" in answer.err


# ------------------------------------------------------------------ ranks, environment, flags


def three_on_two_nodes() -> RankedGroup:
    """Two workers on the driver's node and one on another; given in a different order."""
    seats = [
        Placement(0, "b", "10.0.0.9", "w9", ["0"]),
        Placement(1, "a", "10.0.0.10", "w10", ["10"]),
        Placement(2, "a", "10.0.0.10", "w10", ["2"]),
    ]
    return RankedGroup(assign_ranks(seats), "10.0.0.9", 23456, "0123456789abcdef", attempt=1)


def test_ranks_are_ordered_by_node_then_gpu():
    workers = three_on_two_nodes().workers
    assert [w.seat.number for w in workers] == [0, 2, 1]
    assert [(w.rank, w.local_rank, w.node_rank) for w in workers] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 1),
    ]
    assert [w.gpus for w in workers] == [["0"], ["2", "10"], ["2", "10"]]
    assert [w.rank for w in assign_ranks([w.seat for w in workers], first_node="a")] == [0, 1, 2]
    assert assign_ranks([w.seat for w in workers], first_node="a")[0].seat.number == 2


def test_ranks_on_one_node_rendezvous_over_loopback():
    workers = three_on_two_nodes().workers
    assert rendezvous_address(workers) == "10.0.0.9"
    assert rendezvous_address(workers[1:]) == "127.0.0.1"


def test_a_rank_gets_torchruns_environment_variables():
    group = three_on_two_nodes()
    env = rank_variables(
        RunFlags(num_workers=3, max_restarts=2), group, group.workers[2], {}, "e.json"
    )
    assert env == {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "2",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "23456",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_RUN_ID": "0123456789abcdef",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "e.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "2,10",
    }


@pytest.mark.parametrize(
    ("flags", "base", "rank", "threads"),
    [
        (RunFlags(), {"OMP_NUM_THREADS": "7"}, 1, "7"),
        (RunFlags(cpus_per_worker=4), {}, 1, "4"),
        (RunFlags(cpus_per_worker=0.5), {}, 1, "1"),
        (RunFlags(), {}, 0, None),  # alone on its node
    ],
)
def test_omp_num_threads_is_the_users_or_torchruns(flags, base, rank, threads):
    group = three_on_two_nodes()
    env = rank_variables(flags, group, group.workers[rank], base, "")
    assert env.get("OMP_NUM_THREADS") == threads


def test_unrequested_gpus_are_hidden():
    (worker,) = assign_ranks([Placement(0, "a", "10.0.0.1", "h", node_has_gpus=True)])
    env = rank_variables(RunFlags(), RankedGroup([worker], "127.0.0.1", 1, "0" * 8), worker, {}, "")
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_rank_gets_slurms_environment_variables():
    group = three_on_two_nodes()
    env = rank_variables(RunFlags(env="slurm"), group, group.workers[2], {}, "")
    expected = {
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "3",
        "SLURM_NPROCS": "3",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "10.0.0.9,10.0.0.10",
        "SLURM_NODELIST": "10.0.0.9,10.0.0.10",
        "SLURM_TASKS_PER_NODE": "1,2",
        "SLURM_GTIDS": "1,2",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
        "SLURMD_NODENAME": "10.0.0.10",
        "MASTER_ADDR": "10.0.0.9",
        "WORLD_SIZE": "3",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert env["SLURM_JOB_ID"].isdigit()
    assert not {name for name in env if name in ("RANK", "LOCAL_RANK") or "ELASTIC" in name}


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
    there = partial(code_shipping.path_in_copy, here=Path("/here"), there="/copy")
    expected = {
        "PATH": "/node",
        "NCCL_DEBUG": "WARN",
        "WANDB_API_KEY": "k",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": "/copy/src:lib:/site",
    }
    assert base_environment(driver, node, False, moved=there) == expected
    exported = base_environment(driver, node, False, ["NCCL_DEBUG", "VIRTUAL_ENV"], there)
    assert exported == expected | {"NCCL_DEBUG": "INFO", "VIRTUAL_ENV": "/v"}


def test_on_the_local_machine_the_shell_environment_is_used_with_rays_network_variables():
    driver = {"PATH": "/driver", "NCCL_DEBUG": "INFO", "RAY_ADDRESS": "x", "RANK": "5"}
    node = {"PATH": "/node", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "eth1", "CONDA": "/c"}
    assert base_environment(driver, node, local=True) == {
        "PATH": "/driver",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth1",
    }


def test_an_exported_variable_that_is_not_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    in_folder(monkeypatch, tmp_path, "")
    with pytest.raises(ConfigError, match="--export = 'NO_SUCH'"):
        run_script(RunOptions(RunFlags(num_workers=1, export="PATH, NO_SUCH"), "script.py"))


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("add_argument('--local_rank')", "--local_rank=0"),
        ("add_argument('--local-rank')", "--local-rank=0"),
        ("add_argument('--local-rank', '--local_rank')", "--local_rank=0"),
        ("", "--local_rank=0"),
    ],
)
def test_the_local_rank_flag_is_spelled_as_the_script_expects(
    text: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    in_folder(monkeypatch, tmp_path, text)
    order = RunOptions(RunFlags(legacy_local_rank=True), "script.py")
    group = three_on_two_nodes()
    assert order.command("python", placeholder_values(group, group.workers[1])) == [
        *("python", "-u", "script.py", flag)
    ]


def test_placeholders_are_filled_in_and_other_braces_are_unchanged():
    group = three_on_two_nodes()
    order = RunOptions(
        RunFlags(legacy_local_rank=True),
        "old.py",
        ("--r={rank}/{world_size}", "{init_method}", "{'lr': 1}", "{ranks}", "{{rank}}"),
    )
    command = order.command("python", placeholder_values(group, group.workers[1]))
    assert command[:4] == ["python", "-u", "old.py", "--local_rank=0"]
    assert command[4:] == ["--r=1/3", "tcp://10.0.0.9:23456", "{'lr': 1}", "{ranks}", "{1}"]
    order = RunOptions(
        RunFlags(no_python=True), "./go.sh", ("{node_rank}", "{master_addr}:{master_port}")
    )
    assert order.command("python", placeholder_values(group, group.workers[1])) == [
        *("./go.sh", "1", "10.0.0.9:23456")
    ]


def test_dry_run_prints_each_command_ready_to_paste(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    text = preview(RunOptions(RunFlags(num_workers=2), "t.py", ("--r", "{rank}")), {"PATH": "/bin"})
    assert len(re.findall(r"^WORLD_SIZE=2 \\$", text, re.MULTILINE)) == 2
    assert f"{sys.executable} -u t.py --r 1" in text
    assert "PATH=" not in text


# ------------------------------------------------------------------ capacity


def test_workers_are_counted_by_gpus_or_nodes_or_must_be_given():
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}]
    layout = layout_for(RunFlags(use_gpu=True), nodes)
    assert (layout.least, layout.per_worker) == (6, {"CPU": 1.0, "GPU": 1.0})
    layout = layout_for(RunFlags(use_gpu=True, per="node"), nodes)
    assert (layout.least, layout.per_worker) == (2, {"CPU": 4.0, "GPU": 2.0})
    layout = layout_for(RunFlags(per="node"), nodes)
    assert (layout.least, layout.per_worker) == (3, {"CPU": 2.0})
    with pytest.raises(ConfigError, match="how many"):
        layout_for(RunFlags(), nodes)
    with pytest.raises(PreflightError, match="no GPU"):
        layout_for(RunFlags(use_gpu=True), nodes[2:])


def test_missing_resources_are_reported_with_have_and_want():
    flags = RunFlags(num_workers=3, cpus_per_worker=2)
    layout = layout_for(flags, [])
    assert missing_capacity(layout, [{"CPU": 4.0}]) == "CPU: want 6 (3 x 2), have 4"
    assert "want 3, have 2" in missing_capacity(layout, [{"CPU": 3.0}, {"CPU": 3.0}])
    assert missing_capacity(layout, [{"CPU": 4.0}, {"CPU": 3.0}]) == ""
    many = layout_for(RunFlags(nproc_per_node="5000"), [{"CPU": 2.0}])  # no share is 0
    assert many.per_worker == {"CPU": LEAST_OF_RESOURCE}
    flags = RunFlags(num_workers=2, per="node", cpus_per_worker=1)
    assert "want 2, have 1" in missing_capacity(layout_for(flags, []), [{"CPU": 4.0}])


@pytest.mark.parametrize(
    ("flags", "have", "text"),
    [
        (
            {"num_workers": 1, "use_gpu": True},
            {"CPU": 4.0},
            "1 worker does .* Remove --use-gpu",
        ),
        ({"num_workers": 2, "use_gpu": True}, {"CPU": 4.0, "GPU": 1.0}, "2 workers do not .*fewer"),
        ({"nnodes": "3", "nproc_per_node": "2"}, {"CPU": 4.0}, "Lower --nnodes or"),
    ],
)
def test_a_run_that_does_not_fit_gets_working_advice(
    flags: dict[str, Any], have: dict[str, float], text: str
):
    layout = layout_for(RunFlags(**flags), [])
    error = capacity_error(layout, missing_capacity(layout, [have]), "this machine")
    assert re.search(text, str(error))


def test_more_workers_than_cpus_exit_with_status_3_at_once(tmp_path: Path):
    (tmp_path / "t.py").touch()
    answer = run_cli("run", "--num-workers", "999", "t.py", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (3, [])
    assert re.search(r"999 workers .*CPU: want 999 .*have \d+", answer.err)
    assert len(answer.err.splitlines()) == 1


class FakeRay(types.ModuleType):
    """Records the arguments and the environment it is started with."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.reported: dict[str, Any] = {}
        self.during: dict[str, str] = {}

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.reported, self.during = options, dict(os.environ)

    def nodes(self) -> list[Any]:
        return []

    def shutdown(self) -> None:
        self.reported["ended"] = True


def test_rays_settings_are_restored_after_the_run(monkeypatch: pytest.MonkeyPatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", *SETTINGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", fake := FakeRay())
    monkeypatch.delitem(sys.modules, "ray._raylet", raising=False)
    before = {**os.environ, "RAY_AUTH_MODE": "token"}  # Ray reads it once in a process
    with connected(RunFlags(num_workers=1), lambda text: None):
        assert fake.reported["num_cpus"] == 1
        assert fake.during["RAY_AUTH_MODE"] == "token"
        assert SETTINGS.items() <= fake.during.items()
    assert fake.reported["ended"]
    assert dict(os.environ) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["before Ray has taken SIGTERM", "after that"])
def test_a_signal_during_ray_startup_ends_the_run_as_soon_as_ray_can_be_stopped(
    number: int, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Slow(FakeRay):
        def init(self, **options: Any) -> None:
            super().init(**options)
            if when == "before Ray has taken SIGTERM":
                os.kill(os.getpid(), number)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ray's own"))

        def nodes(self) -> list[Any]:
            if when == "after that":
                os.kill(os.getpid(), number)
            return []

    in_folder(monkeypatch, tmp_path, "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", fake := Slow())
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt) as stop:
        run_script(RunOptions(RunFlags(num_workers=1), "script.py"))
    assert stop.value.args == (number,)
    assert fake.reported["ended"]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


# ------------------------------------------------------------------ code for other machines


def written(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_only_the_users_code_is_copied_from_a_folder(tmp_path: Path):
    left_out = [".git/x", "lib/__pycache__/n.pyc", "env/pyvenv.cfg", "runs/1/y.py"]
    here = written(tmp_path / "here", "train.py", "lib/net.py", "data.txt", *left_out)
    written(here, "lib/runs/z.py", "wandb/__init__.py")  # packages of these names
    (here / "results").mkdir()
    code_shipping.unpack_folder(code_shipping.pack_folder(here), there := tmp_path / "there")
    kept = {"train.py", "lib/net.py", "data.txt", "lib/runs/z.py", "wandb/__init__.py"}
    assert names_in(there) == kept
    assert (there / "results").is_dir()
    assert (
        code_shipping.difference(code_shipping.contents(here), code_shipping.contents(there)) == ""
    )


def test_any_file_that_differs_on_another_machine_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = ("train.py", "lib/net.py", "config.yaml", "ops.so")
    here, there = (written(tmp_path / name, *names) for name in ("here", "there"))

    def different() -> str:
        return code_shipping.difference(code_shipping.contents(here), code_shipping.contents(there))

    written(there, "checkpoint.pt")  # a script's own, on the machine of rank 0
    assert different() == ""
    for name in names:
        (there / name).write_text("other")
        assert different() == name
        written(there, name)
    written(here, "lib/new.py")
    assert different() == "lib/new.py"
    assert code_shipping.contents(tmp_path / "nowhere") is None
    private = here / "private"
    private.mkdir()
    (private / "theirs.py").write_text("x")
    allows = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != private and allows(path, mode))
    assert "private/theirs.py" not in (code_shipping.contents(here) or {})
    assert code_shipping.difference(code_shipping.contents(here), None) == "all"


def test_links_are_copied_as_their_targets(tmp_path: Path):
    here = written(tmp_path / "here", "lib/net.py")
    written(tmp_path, "shared/config.yaml", "dataset/1.png")
    (here / "config.yaml").symlink_to("../shared/config.yaml")
    (here / "data").symlink_to(tmp_path / "dataset")
    (here / "same").symlink_to(here / "lib")
    (here / "self").symlink_to(here)
    (here / "gone").symlink_to("/no/such/place")
    os.mkfifo(here / "pipe")
    archive = code_shipping.pack_folder(here)
    there = written(tmp_path / "there", "config.yaml")
    (there / "lib").symlink_to(tmp_path / "dataset")  # of an earlier copy
    for _ in range(2):
        code_shipping.unpack_folder(archive, there)
    assert {name for name in names_in(there) if not name.startswith("self/")} >= {"lib/net.py"}
    assert not (there / "config.yaml").is_symlink()
    assert (there / "config.yaml").read_text() == "shared/config.yaml"
    assert (there / "data").readlink() == tmp_path / "dataset"
    assert [str((there / name).readlink()) for name in ("same", "self")] == ["lib", "."]
    assert not (there / "lib").is_symlink()
    assert sorted(path.name for path in (tmp_path / "dataset").iterdir()) == ["1.png"]
    assert (there / "gone").is_symlink()
    assert not (there / "pipe").exists()
    assert (
        code_shipping.difference(code_shipping.contents(here), code_shipping.contents(there)) == ""
    )


def test_a_new_copy_does_not_change_files_that_are_open(tmp_path: Path):
    here = written(tmp_path / "here", "ops.so")
    code_shipping.unpack_folder(code_shipping.pack_folder(here), tmp_path / "there")
    with (tmp_path / "there/ops.so").open() as old:
        (here / "ops.so").write_text("new")
        code_shipping.unpack_folder(code_shipping.pack_folder(here), tmp_path / "there")
        assert old.read() == "ops.so"
    assert (tmp_path / "there/ops.so").read_text() == "new"


class OtherMachine:
    """Another machine: the responses of its agents."""

    def __init__(self, shared: bool = False, files: dict[str, str] | None = None) -> None:
        self.shared, self.files, self.asked = shared, files, []

    def __call__(self, workers: Sequence[Any], method: str, *args: Any) -> list[Any]:
        self.asked.append(method)
        if method == "exists":
            return [self.shared and Path(args[0]).exists() for _ in workers]
        return [self.files if method == "contents" else "/copy" for _ in workers]


def provided(elsewhere: OtherMachine, program: str = "script.py") -> dict[int, str]:
    others = three_on_two_nodes().workers[1:2]
    order = RunOptions(RunFlags(), program)
    return provide_folders(order, others, elsewhere, elsewhere.asked.append)


@pytest.fixture
def putting(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = types.ModuleType("ray")
    ray.put = lambda value: value
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_a_shared_folder_is_detected_by_a_marker_file(tmp_path: Path, monkeypatch):
    in_folder(monkeypatch, tmp_path, "")
    assert provided(seen := OtherMachine(shared=True)) == {}
    assert seen.asked == ["exists"]
    assert names_in(tmp_path) == {"script.py"}


def test_a_marker_left_by_a_killed_run_is_removed_and_never_copied(tmp_path, monkeypatch):
    in_folder(monkeypatch, tmp_path, "")
    old, new = (tmp_path / f"{code_shipping.MARK}{name}" for name in ("old", "new"))
    for mark in (old, new):
        mark.touch()
    os.utime(old, (0, 0))
    assert code_shipping.contents(tmp_path) is not None
    assert set(code_shipping.contents(tmp_path)) == {"script.py"}
    provided(OtherMachine(shared=True))
    assert (old.exists(), new.exists()) == (False, True)


def test_the_reason_for_copying_a_folder_is_reported(tmp_path: Path, monkeypatch, putting: None):
    in_folder(monkeypatch, tmp_path, "")
    same = code_shipping.contents(tmp_path)
    assert provided(OtherMachine(files=same)) == {}
    for files, why in ((None, "it is not there"), ({"script.py": "x"}, "its script.py is another")):
        assert provided(other := OtherMachine(files=files)) == {1: "/copy"}
        assert why in other.asked[-1]


def test_a_script_outside_the_copied_folder_is_refused(tmp_path: Path, monkeypatch, putting: None):
    (tmp_path / "jobs").mkdir()
    in_folder(monkeypatch, tmp_path / "jobs", "")
    script = str(written(tmp_path, "train.py") / "train.py")
    for name in ("../train.py", script):
        with pytest.raises(PreflightError, match=rf"{script} is not on w10 .*10\.0\.0\.10"):
            provided(OtherMachine(), name)
        assert provided(OtherMachine(shared=True), name) == {}
    assert code_shipping.path_in_copy(script, tmp_path, "/copy") == "/copy/train.py"
    assert code_shipping.path_in_copy(script, tmp_path / "jobs", "/copy") == script


def test_a_folder_that_is_too_large_is_refused_and_its_largest_entry_is_named(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(code_shipping, "MOST_BYTES", 1000)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/w.bin").write_bytes(bytes(2000))
    with pytest.raises(PreflightError, match="weights"):
        code_shipping.pack_folder(tmp_path)


# ------------------------------------------------------------------ failures


def reported(output: Output, rank: int, text: str, at: float) -> None:
    output.take(rank, "stderr", f"{text}\n".encode(), at)


def same_clock(ranks: Sequence[int]) -> dict[int, float]:
    return {}


TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: rank {}"


def test_the_rank_that_raised_first_is_named_even_if_its_process_ends_last():
    workers = three_on_two_nodes().workers
    output = Output(lambda rank, stream: False, None)
    reported(output, 2, "before\n" + TRACEBACK.format(2), at=10.0)
    reported(output, 0, TRACEBACK.format(0), at=10.1)
    ends = {0: RankExit(1, 10.2), 2: RankExit(1, 10.6), 1: RankExit(-15, 11.0, asked="SIGTERM")}
    assert first_failure(ends, output, same_clock) == 2
    text = failure_report(2, ends, workers, output)
    assert text.splitlines()[0] == "rank 2 failed first, on w10 (10.0.0.10): exit status 1"
    assert "ValueError: rank 2" in text
    assert "before" not in text
    assert "ValueError: rank 0" not in text
    assert text.splitlines()[-1] == (
        "the others: rank 0 exit status 1; rank 1 killed by SIGTERM (we sent SIGTERM)"
    )


def test_clock_offsets_are_applied_when_ordering_failures():
    """Rank 1's clock is 100 s ahead; rank 0 was asked to end, so its exit is no evidence."""
    output = Output(lambda rank, stream: False, None)
    ends = {0: RankExit(-15, 1.0, asked="SIGTERM"), 1: RankExit(3, 109.5), 2: RankExit(4, 10.0)}
    assert first_failure(ends, output, lambda ranks: {1: 100.0, 2: 0.0}) == 1
    assert first_failure(ends, output, lambda ranks: {1: 99.0, 2: 0.0}) == 2
    assert first_failure(ends, output, lambda ranks: {1: 99.0}) == 1  # it is unknown for rank 2


def test_only_the_stream_with_the_traceback_is_shown():
    output = Output(lambda rank, stream: False, None)
    reported(output, 0, TRACEBACK.format(0), at=1.0)
    output.take(0, "stdout", b"said before, come later\n", 0.9)
    assert failure_report(
        0, {0: RankExit(1, 2.0)}, three_on_two_nodes().workers, output
    ).splitlines()[1:] == [f"  {line}" for line in TRACEBACK.format(0).splitlines()]


def test_a_lost_node_is_the_cause_of_its_peers_errors():
    output = Output(lambda rank, stream: False, None)
    ends = {
        0: RankExit(1, 10.0),
        1: RankExit(None, 15.0, lost="the node died"),
        2: RankExit(0, 9.0),
    }
    assert first_failure(ends, output, same_clock) == 1
    assert ends[1].exit_status == 7
    assert "lost: the node died" in failure_report(1, ends, three_on_two_nodes().workers, output)


def test_no_rank_failed_if_all_succeeded_or_were_signaled_by_us():
    output = Output(lambda rank, stream: False, None)
    assert (
        first_failure(
            {0: RankExit(0, 1.0), 1: RankExit(-2, 1.0, asked="SIGINT")}, output, same_clock
        )
        is None
    )


def test_exit_statuses_follow_the_shell_convention():
    assert [RankExit(status, 0).exit_status for status in (3, -9, -11)] == [3, 137, 139]
    assert RankExit(-9, 0).said == "killed by SIGKILL"


def test_the_error_file_of_record_is_shown_instead_of_the_last_lines():
    output = Output(lambda rank, stream: False, None)
    reported(output, 0, "a line", at=1.0)
    error = {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback\n  deep\n"}}
    text = failure_report(0, {0: RankExit(1, 1.0, error)}, three_on_two_nodes().workers, output)
    assert text.splitlines()[1:] == ["  Traceback", "    deep"]


def test_ranks_are_listed_as_ranges():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"


def test_output_is_prefixed_on_the_console_and_written_to_files(tmp_path: Path, capfd):
    flags = RunFlags(show="0")
    with Output(lambda rank, stream: flags.shown(rank, rank, stream), tmp_path) as output:
        output.take(0, "stdout", b"out\n", 1.0)
        output.take(1, "stderr", b"err\n", 1.0)
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("[rank 0] out\n", "")
    assert (tmp_path / "0/stdout.log").read_text() == "out\n"
    assert (tmp_path / "1/stderr.log").read_text() == "err\n"


SLOW_CONSOLE = """
import os, sys
from raytrain_ddp.launcher.output import Output
with Output(lambda rank, stream: True, None, hurried=lambda: os.path.exists("hurry")) as output:
    for n in range(20_000):
        output.take(0, "stdout", b"%d\\n" % n, 0.0)
    print("behind" if output.behind else "", file=sys.stderr, flush=True)
"""


def test_a_slow_console_blocks_no_rank_and_gets_all_lines(tmp_path: Path):
    with console_of(SLOW_CONSOLE, tmp_path) as process:
        assert process.stderr.readline() == "behind\n"  # and has not read a line yet
        assert (
            process.stdout.read().split()
            == " ".join(f"[rank 0] {n}" for n in range(20_000)).split()
        )
        assert process.wait(20) == 0


def test_a_stopped_process_does_not_wait_for_a_blocked_console(tmp_path: Path):
    with console_of(SLOW_CONSOLE, tmp_path) as process:
        assert process.stderr.readline() == "behind\n"
        (tmp_path / "hurry").touch()
        assert process.wait(20) == 0


def test_the_log_folder_is_created_in_the_given_folder(tmp_path: Path):
    made = launching._log_folder(RunFlags(log_dir=str(tmp_path), rdzv_id="../../x"), "12345678")
    assert made.parent == tmp_path


def test_a_closed_console_is_reported(tmp_path: Path):
    with console_of(SLOW_CONSOLE.replace("20_000", "10**9"), tmp_path) as process:
        process.stdout.readline()
        process.stdout.close()
        assert "BrokenPipeError" in process.stderr.read()


def test_a_console_closed_while_lines_are_pending_is_reported(tmp_path: Path):
    more = """    while output.behind:
        time.sleep(0.01)
    output.take(0, "stdout", b"more", 0.0)
"""
    with console_of(f"import time\n{SLOW_CONSOLE}{more}", tmp_path) as process:
        assert process.stderr.readline() == "behind\n"
        process.stdout.close()
        assert "BrokenPipeError" in process.stderr.read()


def console_of(script: str, folder: Path) -> Any:
    """A process whose console is a pipe that the test reads when it wants to."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


# ------------------------------------------------------------------ the guard


def wait_until(holds: Callable[[], bool], within_s: float = 20.0) -> float:
    """Waits until the condition holds; returns the seconds it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s
        time.sleep(0.02)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# A process that ignores SIGTERM and has children of its own: one in its group, one a daemon.
STUBBORN = """
import os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
pids = [os.getpid(), subprocess.Popen(sleep).pid]
pids.append(subprocess.Popen(sleep, start_new_session=True).pid)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""


class Guarded:
    """A command under a guard in the background, as the agent runs it."""

    def __init__(self, folder: Path, *command: str) -> None:
        reported, tells = os.pipe()
        own = str(folder / "own")
        guard = [sys.executable, "-I", "-S", str(GUARD), str(tells), "-1", own]
        starter = subprocess.Popen([*guard, *command], stdin=subprocess.PIPE, pass_fds=[tells])
        os.close(tells)
        assert starter.wait(10) == 0
        assert starter.stdin is not None
        self.pipe, self._reports = starter.stdin, os.fdopen(reported)

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.pipe.closed:
            self.pipe.close()
        self._reports.close()

    def report(self) -> dict[str, float]:
        return json.loads(self._reports.readline())

    def say(self, word: str) -> None:
        self.pipe.write(f"{word}\n".encode())
        self.pipe.flush()


def pids_in(file: Path) -> list[int]:
    """The PIDs that a STUBBORN script has recorded, as soon as they exist."""
    wait_until(file.exists)
    return [int(pid) for pid in file.read_text().split()]


@pytest.mark.parametrize("end", ["its owner goes", "kill"])
def test_the_guard_leaves_no_processes(end: str, tmp_path: Path):
    stubborn = [sys.executable, "-c", STUBBORN, str(tmp_path / "pids")]
    with Guarded(tmp_path, *stubborn) as guarded:
        pids = pids_in(tmp_path / "pids")
        started = guarded.report()
        assert started["pid"] == pids[0]
        if end == "kill":
            guarded.say("kill")
        else:
            guarded.pipe.close()
        assert guarded.report()["status"] == -9
        wait_until(lambda: not any(map(alive, [*pids, int(started["guard"])])))
        assert not (tmp_path / "own").exists()


def test_a_signal_goes_to_the_script_and_its_children_and_leftovers_end_with_it(tmp_path: Path):
    """Only the script ignores SIGTERM; SIGUSR1 ends it; its daemon is left over."""
    with Guarded(tmp_path, sys.executable, "-c", STUBBORN, str(tmp_path / "pids")) as guarded:
        script, child, daemon = pids_in(tmp_path / "pids")
        guarded.say(str(int(signal.SIGTERM)))
        wait_until(lambda: not alive(child))
        assert alive(script)
        assert alive(daemon)
        guarded.say(str(int(signal.SIGUSR1)))
        guarded.report()
        ended = guarded.report()
        assert (ended["status"], ended["asked"]) == (-signal.SIGUSR1, signal.SIGUSR1)
        wait_until(lambda: not alive(daemon))


def test_a_script_ends_with_its_guard(tmp_path: Path):
    with Guarded(tmp_path, sys.executable, "-c", STUBBORN, str(tmp_path / "pids")) as guarded:
        script, child, daemon = pids_in(tmp_path / "pids")
        os.kill(int(guarded.report()["guard"]), signal.SIGKILL)
        wait_until(lambda: not alive(script))
        for pid in (child, daemon):
            os.kill(pid, signal.SIGKILL)


def test_a_missing_program_exits_with_status_127(tmp_path: Path, capfd):
    with Guarded(tmp_path, "/no/such/program") as guarded:
        guarded.report()
        assert guarded.report()["status"] == 127
        assert "/no/such/program" in capfd.readouterr().err


# ------------------------------------------------------------------ the agent


@pytest.fixture
def agent() -> Iterator[Agent]:
    each = Agent(GUARD.read_text())
    yield each
    each.signal("kill")
    each.clean()


def started(agent: Agent, script: str, folder: Path, *args: str, feeds: bool = False) -> None:
    command = [sys.executable, "-c", script, *args]
    agent.start(command, dict(os.environ), str(folder), slurm=False, feeds=feeds)


def taken(agent: Agent, until: str, most: int = 500) -> list[dict[str, Any]]:
    """All messages up to the first one of this kind."""
    news: list[dict[str, Any]] = []
    deadline = time.monotonic() + 30
    while not any(until in each for each in news):
        assert time.monotonic() < deadline, news
        news += agent.take(1.0, most)
    return news


def test_all_lines_of_a_script_arrive_even_long_after_its_end(agent: Agent, tmp_path: Path):
    started(agent, "for n in range(30_000): print(n)\nraise SystemExit(3)", tmp_path)
    time.sleep(1)  # a console that accepts no output
    news = taken(agent, "closed")
    said = b"".join(each["data"] for each in news if "data" in each)
    assert said.decode() == "".join(f"{n}\n" for n in range(30_000))
    assert "closed" in news[-1]
    assert [each["status"] for each in news if "status" in each] == [3]


def test_a_status_waits_neither_for_the_console_nor_for_leftover_processes(
    agent: Agent, tmp_path: Path
):
    leaves = (
        "import os, subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    )
    ready = "import signal, time; signal.signal(15, signal.SIG_IGN); print(); time.sleep(600)"
    script = f"{leaves}\nfor n in range(4_000): print(n)\nos._exit(3)"
    began = time.monotonic()
    started(agent, script, tmp_path, ready)
    (reported,) = taken(agent, "status", most=0)
    ended_at = time.monotonic()
    assert (reported["status"], reported["asked"]) == (3, 0)
    assert began < reported["at"] <= ended_at
    taken(agent, "closed")


def test_a_script_that_exited_by_itself_is_not_marked_as_signaled(agent: Agent, tmp_path: Path):
    started(agent, "import sys; sys.exit(4)", tmp_path)
    wait_until(lambda: bool(agent._urgent))
    agent.signal("15")
    reported = taken(agent, "status")
    assert [(each["status"], each["asked"]) for each in reported if "status" in each] == [(4, 0)]


def test_a_signal_right_after_the_start_is_not_lost(tmp_path: Path):
    for _ in range(5):
        agent = Agent(GUARD.read_text())
        started(agent, "import time; time.sleep(600)", tmp_path)
        agent.signal("15")
        reported = taken(agent, "closed")[0]
        assert (reported["status"], reported["asked"]) == (-15, 15)
        agent.clean()


def test_a_killed_guard_ends_its_script_and_is_reported(agent: Agent, tmp_path: Path):
    started(agent, "import os, time; print(os.getppid(), flush=True); time.sleep(600)", tmp_path)
    os.kill(int(taken(agent, "data")[0]["data"]), signal.SIGKILL)
    news = taken(agent, "closed")
    assert [each["status"] for each in news if "status" in each] == [-9], news


def test_an_agent_killed_before_it_starts_a_script_leaves_no_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """For example, while the code is being copied to other machines."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = Agent(GUARD.read_text())
    assert list(tmp_path.iterdir()) == []
    started(before, "import time; time.sleep(600)", tmp_path)
    wait_until(lambda: bool(list(tmp_path.glob("raytrain-run-*"))))
    assert before._guard is not None
    assert before._guard.stdin is not None
    before._guard.stdin.close()  # as when its process is killed with -9
    wait_until(lambda: not list(tmp_path.iterdir()))


# ------------------------------------------------------------------ the group


class FunctionRay(types.ModuleType):
    """A Ray whose references are functions."""

    class RayError(Exception):
        pass

    class RayActorError(RayError):
        pass

    class GetTimeoutError(RayError):
        pass

    class RayTaskError(RayError):
        def __init__(self, cause: Exception) -> None:
            super().__init__("a traceback of many lines")
            self.cause = cause

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = FunctionRay

    def wait(self, asked: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return asked, []

    def get(self, asked: Callable[[], Any], timeout: float) -> Any:
        return asked()


def test_an_error_on_a_machine_is_one_line_with_its_name(monkeypatch: pytest.MonkeyPatch):
    def full() -> None:
        raise FunctionRay.RayTaskError(OSError(28, "No space left on device", "/tmp/x"))

    monkeypatch.setitem(sys.modules, "ray", FunctionRay())
    assert worker_group._wait_for_answers([lambda: 3], lambda: None) == [3]
    with pytest.raises(PreflightError) as reported:
        worker_group._wait_for_answers(
            [lambda: 3, full], lambda: None, ["w1 (10.0.0.1)", "w2 (10.0.0.2)"]
        )
    assert str(reported.value) == "w2 (10.0.0.2): [Errno 28] No space left on device: '/tmp/x'"


def test_machine_clocks_are_compared_with_the_drivers_clock(monkeypatch: pytest.MonkeyPatch):
    class Clock:
        def __init__(self, ahead_s: float | None) -> None:
            self.clock, self.ahead_s = self, ahead_s

        def remote(self) -> Callable[[], float]:
            return self.tell

        def tell(self) -> float:
            if self.ahead_s is None:
                raise FunctionRay.GetTimeoutError
            return time.monotonic() + self.ahead_s

    monkeypatch.setitem(sys.modules, "ray", FunctionRay())
    group = WorkerGroup.__new__(WorkerGroup)
    group.workers = three_on_two_nodes().workers
    group._agents = [Clock(100.0), Clock(-5.0), Clock(-5.0)]  # by seat
    ahead = group.clocks([0, 1, 2])
    assert ahead == pytest.approx({0: 100.0, 1: -5.0, 2: -5.0}, abs=0.1)
    assert group.clocks([1, 2]) == {}  # one machine: nothing to compare
    group._agents[0] = Clock(None)
    assert group.clocks([0, 1]) == pytest.approx({1: -5.0}, abs=0.1)


# ------------------------------------------------------------------ on a Ray of two nodes


@dataclass(frozen=True)
class TwoNodes:
    """Two CPUs here, and another node with one; `own` is the folder of their temporary files."""

    address: str
    own: Path


@pytest.fixture(scope="module")
def ray_of_two_nodes(unchanged_process: None) -> Iterator[TwoNodes]:
    """Shared by the tests of this file."""
    own = Path(tempfile.mkdtemp(prefix="test-run-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        given = {"RAY_AUTH_MODE": "token", "TMPDIR": str(own), "RAY_TMPDIR": "/tmp"}
        for name, value in {**SETTINGS, **given, "NCCL_OF_THE_NODE": "1"}.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1)
        patch.delenv("NCCL_OF_THE_NODE")  # `ray start` had it, and the driver's shell has not
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield TwoNodes(str(cluster.address), own)
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(own)


on_ray = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def in_folder(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    monkeypatch.chdir(folder)
    for name in [n for n in os.environ if n.startswith(("TORCHELASTIC", "OMP_"))]:
        monkeypatch.delenv(name)
    (folder / "script.py").write_text(script)


DUMP = """
import json, os, signal, sys
env = dict(os.environ)
env["SIGINT"] = str(signal.getsignal(signal.SIGINT))
env["MASK"] = str(signal.pthread_sigmask(signal.SIG_BLOCK, []))
env["CWD"], env["ARGV"] = os.getcwd(), " ".join(sys.argv)
env["MAIN"] = __name__
with open(sys.argv[1] + "-" + (env.get("RANK") or env["SLURM_PROCID"]), "w") as file:
    json.dump(env, file)
"""


HARDER = ("Ctrl-C twice", "kill -9")


class TestOnRay:
    pytestmark = on_ray

    @pytest.mark.slow
    def test_a_script_has_the_same_environment_as_under_torchrun(
        self, ray_of_two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        in_folder(monkeypatch, tmp_path, DUMP)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command = [*torchrun, "--max-restarts", "3", "script.py", "theirs", "--rank"]
        subprocess.run(command, check=True, capture_output=True)
        order = RunOptions(RunFlags(num_workers=2, max_restarts=3), "script.py", ("ours", "--rank"))
        assert run_script(order) == 0
        for rank in range(2):
            old = json.loads((tmp_path / f"theirs-{rank}").read_text())
            new = json.loads((tmp_path / f"ours-{rank}").read_text())
            assert new["TORCHELASTIC_USE_AGENT_STORE"] == "False"
            assert Path(new["TORCHELASTIC_ERROR_FILE"]).name == "error.json"
            # the rendezvous address, the store's host, this run's id
            differ = "MASTER_.*|TORCHELASTIC_(RUN_ID|USE_AGENT_STORE|ERROR_FILE)|ARGV"
            # set for Ray by this file; and by readline, in C, where Python does not see it
            unseen = "RAY_.*|COLUMNS|LINES|NCCL_OF_THE_NODE"
            old, new = (
                {
                    name: "differs" if re.fullmatch(differ, name) else value
                    for name, value in env.items()
                    if not re.fullmatch(unseen, name)
                }
                for env in (old, new)
            )
            assert old == new

    @pytest.mark.slow
    def test_three_workers_on_two_nodes_with_the_variables_of_slurm(
        self, ray_of_two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
    ):
        script = f"{DUMP}\nprint(os.popen('scontrol show hostnames | wc -l').read())"
        in_folder(monkeypatch, tmp_path, script)
        monkeypatch.setenv("TEST_TRAVELS", "far")
        flags = RunFlags(num_workers=3, env="slurm", log_dir="logs", ship="always")
        assert run_script(RunOptions(flags, "script.py", ("env", "{rank}", "{node_rank}"))) == 0
        out, err = capfd.readouterr()
        copied = re.search(r"run: .* works in a copy of .*: (.*)", err)
        assert copied is not None
        folders = [tmp_path, tmp_path, Path(copied[1])]
        files = [folder / f"env-{rank}" for rank, folder in enumerate(folders)]
        envs = [json.loads(file.read_text()) for file in files]
        assert [env["CWD"] for env in envs] == [str(folder) for folder in folders]
        shutil.rmtree(copied[1])
        assert [env["SLURM_LOCALID"] for env in envs] == ["0", "1", "0"]
        assert [env["SLURM_NODEID"] for env in envs] == ["0", "0", "1"]
        assert [env["ARGV"] for env in envs] == [
            f"script.py env {n}" for n in ("0 0", "1 0", "2 1")
        ]
        assert {env["TEST_TRAVELS"] for env in envs} == {"far"}
        assert {env["NCCL_OF_THE_NODE"] for env in envs} == {"1"}
        assert not {name for name in envs[2] if name.startswith("RAY_")}
        assert {line.partition("]")[0] for line in out.splitlines()} == {
            f"[rank {rank}" for rank in range(3)
        }
        (logs,) = (tmp_path / "logs").iterdir()
        texts = [(logs / f"attempt_0/{rank}/stdout.log").read_text() for rank in range(3)]
        assert [text.strip() for text in texts] == ["2"] * 3
        assert re.search(r"ranks 0-1 on .*, rank 2 on ", err)

    def test_a_node_without_this_package_can_read_the_agent(self, tmp_path: Path):
        from ray import cloudpickle

        read = """
import sys
sys.modules["raytrain_ddp"] = None
from ray import cloudpickle
agent = cloudpickle.loads(open(sys.argv[1], "rb").read())("")
folder = agent.unpack(open(sys.argv[2], "rb").read(), "copy")
print(agent.contents(folder), agent.contents("/no/such/folder"))
print(agent.free_port([]) > 0, agent.take(0))
agent.clean()
"""
        with by_value(*OF_AGENT):
            (tmp_path / "agent").write_bytes(cloudpickle.dumps(Agent))
        (tmp_path / "empty").mkdir()
        (tmp_path / "archive").write_bytes(code_shipping.pack_folder(tmp_path / "empty"))
        command = [sys.executable, "-c", read, tmp_path / "agent", tmp_path / "archive"]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.stdout == "{} None\nTrue []\n", done.stderr

    @pytest.mark.slow
    def test_scripts_that_spawn_processes_get_one_process_per_node(
        self, ray_of_two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        in_folder(monkeypatch, tmp_path, DUMP)
        assert (
            run_script(RunOptions(RunFlags(per="node"), "script.py", ("env", "{init_method}"))) == 0
        )
        envs = [json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(2)]
        for rank, env in enumerate(envs):
            names = ("WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            assert [env[name] for name in names] == ["2", str(rank), "0", "1"]
            assert env["ARGV"].endswith(f" tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}")
            assert "OMP_NUM_THREADS" not in env

    def test_the_first_failure_is_shown_and_all_ranks_are_restarted(
        self, ray_of_two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
    ):
        """Rank 1 fails twice, the second time by a kill; the others would wait forever."""
        script = """
import glob, os, signal, sys, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("attempt", attempt, "port", os.environ["MASTER_PORT"], flush=True)
open(f"printed-{attempt}-{rank}", "w").close()
while len(glob.glob(f"printed-{attempt}-*")) < 3:
    time.sleep(0.05)
if rank == "1" and attempt == "0":
    raise ValueError("no such thing")
if rank == "1" and attempt == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if attempt == sys.argv[1] else 600)
"""
        in_folder(monkeypatch, tmp_path, script)
        flags = RunFlags(num_workers=3, max_restarts=2, grace_s=20)
        assert run_script(RunOptions(flags, "script.py", ("2",))) == 0
        out, err = capfd.readouterr()
        assert sorted(line.partition(" port")[0] for line in out.splitlines()) == sorted(
            f"[rank {rank}] attempt {attempt}" for rank in range(3) for attempt in range(3)
        )
        first = re.search(r"rank 1 failed first, on .*: exit status 1\n(?:  .*\n)+", err)
        assert first is not None
        assert first[0].splitlines()[-1] == "  ValueError: no such thing"
        assert "the others: ranks 0, 2 killed by SIGTERM (we sent SIGTERM)" in err
        assert "works in a copy" not in err  # the other node has the same code
        assert "rank 1 failed first" in err.partition("restart 1 of 2")[2]
        assert "killed by SIGKILL" in err

    @pytest.mark.slow
    def test_the_exit_status_is_that_of_the_last_attempt(
        self, ray_of_two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        in_folder(monkeypatch, tmp_path, "import os; os.kill(os.getpid(), 9)")
        assert run_script(RunOptions(RunFlags(num_workers=1, max_restarts=1), "script.py")) == 137

    @pytest.mark.slow
    def test_a_lost_ray_worker_is_a_failure(
        self, ray_of_two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
    ):
        """Rank 0's actor is killed: its script ends with it, and all ranks are placed again."""
        script = """
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open(os.environ["RANK"], "w").write(str(os.getpid()))
    time.sleep(600)
"""
        import ray

        groups: list[WorkerGroup] = []

        def group(*args: Any) -> WorkerGroup:
            groups.append(WorkerGroup(*args))
            return groups[-1]

        def kill() -> None:
            wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"), within_s=60)
            ray.kill(groups[0].agent(0))

        monkeypatch.setattr(launching, "WorkerGroup", group)
        (killer := threading.Thread(target=kill)).start()
        in_folder(monkeypatch, tmp_path, script)
        flags = RunFlags(num_workers=2, max_restarts=1)
        assert run_script(RunOptions(flags, "script.py")) == 0
        killer.join()
        assert re.search("rank 0 failed first, on .*: lost: ", capfd.readouterr().err)
        assert not any(alive(int((tmp_path / rank).read_text())) for rank in "01")
        assert len(groups) == 2

    @pytest.mark.slow
    def test_too_many_workers_are_refused_with_have_and_want(
        self, ray_of_two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        in_folder(monkeypatch, tmp_path, "")
        with pytest.raises(PreflightError, match=r"CPU: want 9 \(9 x 1\), have 3"):
            run_script(RunOptions(RunFlags(num_workers=9, wait_s=0), "script.py"))
        flags = RunFlags(num_workers=3, per="node", cpus_per_worker=1, wait_s=0)
        with pytest.raises(PreflightError, match=r"want 3, have 2"):
            run_script(RunOptions(flags, "script.py"))

    @pytest.mark.parametrize(
        "how", ["Ctrl-C", *(pytest.param(h, marks=pytest.mark.slow) for h in HARDER)]
    )
    def test_no_process_is_left_when_the_driver_is_stopped_or_killed(
        self, how: str, ray_of_two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        in_folder(monkeypatch, tmp_path, f"import sys; sys.argv[1] += '.x'\n{STUBBORN}")
        command = [sys.executable, "-m", "raytrain_ddp.run", "--address", ray_of_two_nodes.address]
        grace_s = "600" if how == "Ctrl-C twice" else "1"
        command += ["--num-workers", "2", "--grace-s", grace_s, "script.py", "pids-{rank}"]
        with Path("said").open("w") as said:
            driver = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        files = [tmp_path / f"pids-{rank}.x" for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files), within_s=60)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert len(pids) == 6
        os.killpg(driver.pid, signal.SIGKILL if how == "kill -9" else signal.SIGINT)
        if how == "Ctrl-C twice":
            time.sleep(0.3)  # otherwise, the kernel may merge the two
            os.killpg(driver.pid, signal.SIGINT)
        took_s = wait_until(lambda: not any(map(alive, pids)))
        print(f"{how}: nothing left after {took_s:.2f} s")
        status = driver.wait(30)
        wait_until(lambda: not list(ray_of_two_nodes.own.glob("raytrain-run-*")))
        assert status == (-9 if how == "kill -9" else 130), Path("said").read_text()


HEAD = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
head = cluster.head_node.all_processes["gcs_server"][0].process.pid
print(cluster.address, head, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_fault_06_a_script_run_ends_when_the_clusters_head_is_lost(tmp_path: Path):
    (tmp_path / "script.py").write_text(STUBBORN)
    environment = {**os.environ, **SETTINGS, "RAY_AUTH_MODE": "token"}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as cluster:
        try:
            address, head = cluster.stdout.readline().split()
            command = [sys.executable, "-m", "raytrain_ddp.run", "--address", address]
            command += ["--num-workers", "2", "script.py", "pids-{rank}"]
            with (tmp_path / "said").open("w") as said:
                driver = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said)
            files = [tmp_path / f"pids-{rank}" for rank in range(2)]
            wait_until(lambda: all(file.exists() for file in files), within_s=60)
            os.kill(int(head), signal.SIGKILL)
            status = driver.wait(55)
            lines = (tmp_path / "said").read_text()
            assert status == 7, lines
            assert "the head of the Ray cluster has not answered" in lines.splitlines()[-1]
            assert "Traceback" not in lines
            pids = [int(pid) for file in files for pid in file.read_text().split()]
            wait_until(lambda: not any(map(alive, pids)))
        finally:
            cluster.stdin.close()
