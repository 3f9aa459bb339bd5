"""`run`'s command line: flags mean, and workers are counted, as by torchrun."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from old_launchers import EXAMPLES, MANNERS
from processes import run_cli
from thread_ray import ThreadRay

from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.launcher.capacity import layout_for
from raytrain_ddp.launcher.run_options import RunFlags, RunOptions
from raytrain_ddp.launcher.script_launch import run_script
from raytrain_ddp.launcher.torchrun_flags import parse, split


def test_arguments_after_the_script_are_passed_to_it():
    own = ["--num_workers=3", "--use-gpu", "--max-restarts", "2"]
    order = parse([*own, "train.py", "--num-workers", "7", "--", "-m"])
    assert order.flags == RunFlags(num_workers=3, use_gpu=True, max_restarts=2)
    assert (order.program, order.module) == ("train.py", False)
    assert order.args == ("--num-workers", "7", "--", "-m")
    order = parse(["-m", "--num-workers", "2", "package.train", "-m", "x"])
    values = dict.fromkeys(("rank", "local_rank"), "0")
    assert order.command("py", values) == ["py", "-u", "-m", "package.train", "-m", "x"]
    order = parse(["--run-path", "--num-workers", "2", "x.py", "--run-path"])
    assert (order.program, order.args, order.flags.num_workers) == ("x.py", ("--run-path",), 2)
    assert split(["--use-gpu", "--", "-odd.py", "--x"]) == ([("use-gpu", None)], ["-odd.py", "--x"])


TORCHRUNS = [
    "--nproc-per-node 4 train.py",
    "--nproc-per-node gpu --nnodes 1:4 --max-restarts=3 train.py -m x",
    "--standalone --nnodes=1 --nproc-per-node=2 train.py --lr 0.1",
    "-t 3 -r 0:1,1:2 --log-dir logs --nproc-per-node 2 train.py",
    "-r=1 --nproc-per-node 2 train.py",
    "-m --nproc-per-node 2 package.train --x -- y",
    "--no_python --run_path --nproc-per-node 2 /a/train.py",
    "--rdzv-backend c10d --rdzv-endpoint host:29400 --rdzv-id 7 --rdzv-conf a=1 train.py",
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
    assert order.program == theirs.training_script
    assert [*order.args] == [*theirs.training_script_args]
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


def test_torchruns_environment_variables_set_the_defaults():
    environ = {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "2", "PET_STANDALONE": "0", "PET_X": "1"}
    flags = parse(["--nnodes", "1", "t.py"], environ).flags
    assert (flags.nproc_per_node, flags.nnodes, flags.standalone) == ("3", "1", False)
    assert parse(["t.py"], {"PET_STANDALONE": "1", "PET_NPROC_PER_NODE": "1"}).flags.standalone
    with pytest.raises(ConfigError, match="PET_MAX_RESTARTS"):
        parse(["t.py"], {"PET_MAX_RESTARTS": "many"})


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--nproc-per-node", "4", "--num-workers", "4", "train.py"], "--num-workers"),
        (["--nproc-per-node", "some", "train.py"], "--nproc-per-node"),
        (["--nnodes", "3:2", "train.py"], "--nnodes"),
        (["--standalone", "--address", "auto", "train.py"], "--address"),
        (["--signals-to-handle", "SIGKILL", "train.py"], "--signals-to-handle"),
        (["--num-workers", "2", "--show", "some", "train.py"], "--show"),
        (["train\udcff.py"], "UTF-8"),
        (["--no-python", "-m", "train"], "--no-python"),
        (["--nnodes", "2", "--node-rank", "1", "t.py"], "--nnodes 2 t.py"),
    ],
)
def test_invalid_flags_are_refused_and_named(argv: list[str], named: str):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert named in str(caught.value)


def test_help_needs_neither_torch_nor_ray(tmp_path: Path):
    answer = run_cli("run", "--help", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (0, [])
    assert answer.cpu_s < 1
    assert "--num-workers 8 --use-gpu train.py" in answer.out


CPUS, GPUS = {"CPU": 4.0}, {"CPU": 8.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("line", "nodes", "workers", "each", "per_worker"),
    [
        ("--nproc-per-node 8", [CPUS], 8, 8, {"CPU": 0.5}),
        ("--nproc-per-node 8 --cpus-per-worker 1", [CPUS], 8, 8, {"CPU": 1}),
        ("--nproc-per-node cpu", [CPUS, GPUS], 8, 8, {"CPU": 1}),
        ("--nproc-per-node auto", [CPUS], 4, 4, {"CPU": 1}),
        ("--nproc-per-node auto", [CPUS, GPUS], 4, 4, {"CPU": 1, "GPU": 1}),
        ("--nproc-per-node gpu --nnodes 2", [GPUS, GPUS, CPUS], 8, 4, {"CPU": 1, "GPU": 1}),
        ("--nproc-per-node 5", [GPUS], 5, 5, {"CPU": 1}),
        ("--nproc-per-node 2 --nnodes 1:4", [CPUS] * 3, 6, 2, {"CPU": 1}),
        ("--nproc-per-node 2 --nnodes 2:4", [CPUS], 4, 2, {"CPU": 1}),
        ("--nnodes 2", [CPUS, CPUS], 2, 1, {"CPU": 1}),
    ],
)
def test_workers_are_counted_by_node_as_torchrun_does(line, nodes, workers, each, per_worker):
    flags = parse([*line.split(), "t.py"]).flags
    layout = layout_for(flags, nodes)
    assert (layout.count, layout.each, layout.per_worker) == (workers, each, per_worker)
    assert len(layout.bundles) == workers // each
    assert layout.bundles[0]["CPU"] == each * per_worker["CPU"]
    short = len(nodes) < workers // each or "--cpus-per-worker 1" in line
    assert bool(layout.lacks(nodes)) == short


def test_workers_are_counted_by_gpus_or_nodes_or_must_be_given():
    nodes = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}]
    for flags, count, each in (
        (RunFlags(use_gpu=True), 6, {"CPU": 1.0, "GPU": 1.0}),
        (RunFlags(gpus_per_worker=2), 3, {"CPU": 1.0, "GPU": 2.0}),
        (RunFlags(use_gpu=True, per="node"), 2, {"CPU": 4.0, "GPU": 2.0}),
        (RunFlags(per="node"), 3, {"CPU": 2.0}),
    ):
        layout = layout_for(flags, nodes)
        assert (layout.count, layout.per_worker) == (count, each)
    with pytest.raises(ConfigError, match="--num-workers"):
        layout_for(RunFlags(), nodes)
    for flags in (RunFlags(use_gpu=True), RunFlags(nproc_per_node="gpu")):
        with pytest.raises(PreflightError, match="GPU"):
            layout_for(flags, nodes[2:])


@pytest.mark.parametrize("when", ["before Ray has taken SIGTERM", "after that"])
def test_a_signal_during_ray_startup_ends_the_run_as_soon_as_ray_can_be_stopped(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Slow(ThreadRay):
        ended = False

        def is_initialized(self) -> bool:
            return False

        def init(self, **_: Any) -> None:
            if when == "before Ray has taken SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ray's own"))

        def nodes(self) -> list[Any]:
            if when == "after that":
                os.kill(os.getpid(), signal.SIGTERM)
            return []

        def shutdown(self) -> None:
            self.ended = True

    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (fake := Slow()).install(monkeypatch)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt) as stop:
        run_script(RunOptions(RunFlags(num_workers=1), "script.py"))
    assert stop.value.args == (signal.SIGTERM,)
    assert fake.ended
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_every_launcher_example_is_tested_and_in_the_readme():
    """They run in test_fit_on_ray.py and, with -m slow, in test_ray_faults.py."""
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {name.partition(":")[0] for name in MANNERS}
    readme = (EXAMPLES / "README.md").read_text()
    for key, manner in MANNERS.items():
        name = key.partition(":")[0]
        assert "raytrain_ddp" not in (EXAMPLES / name).read_text()
        command = f"python -m raytrain_ddp.run {manner.flags} {name} {manner.args}".replace(
            "{size}", "2"
        ).strip()
        assert command in " ".join(readme.replace("\\\n", " ").split()), command
