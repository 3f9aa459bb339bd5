"""The files of clusters/, and those filled in for a run by ``--emit``; for Slurm, see
test_slurm.py."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_checks import check_kubernetes, check_ray_up, check_sbatch, check_shell, opening
from processes import ROOT, run_cli

from raytrain_ddp.config.sections import DataConfig, ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.cluster_files import Kind, Machines, emit, machines
from raytrain_ddp.fit import parse_fit

yaml = pytest.importorskip("yaml")

GPUS = ("--scaling.use-gpu", "True", "--scaling.num-workers")


def emitted(kind: Kind, *words: str) -> tuple[str, list[str]]:
    """Text and notes."""
    args = parse_fit(words)
    return emit(args.config, kind, args.recipe)


def test_the_printed_command_has_the_same_config():
    for words in (
        "",
        "imagenet-resnet50 --name None --data.source s3://b/x --seed 1",
        "digits --epochs 3 --optim.lr 1e-5 --optim.no-nesterov --eval.every-epochs 0",
        "--task my.py:Task --task-options rows 5000 noise 0.5 --seed 9223372036854775807",
        "--data.classes=-a b --model.freeze=-x.* --data.mean 1e-5 0.5 0.25 --name=-dash",
    ):
        args = parse_fit(shlex.split(words))
        text, _ = emit(args.config, "command", args.recipe)
        assert parse_fit(shlex.split(text)[3:]).config == args.config


def test_the_nodes_have_room_for_all_workers():
    photos = DataConfig(source="photos")
    for scaling, most, want in (
        (ScalingConfig(8, True, 6), 4, Machines(2, 24, 4, 4 * 7 + 4)),
        (ScalingConfig(8, True, 6), 1, Machines(8, 6, 1, 11)),
        (ScalingConfig("1:6", True), 4, Machines(2, 24, 3, 25)),
        (ScalingConfig(5, False, 2), 4, Machines(2, 6, 0, 25)),
        (ScalingConfig(8, True, gpus_per_worker=0.5), 4, Machines(1, 32, 4, 60)),
        (ScalingConfig(3, True, placement="SPREAD"), 4, Machines(3, 8, 1, 11)),
    ):
        config = TrainConfig(batch_size=64, micro_batch=8, scaling=scaling, data=photos)
        assert machines(config, most) == want
        assert want.nodes * want.cpus >= scaling.worker_range()[1] * scaling.cpus_without_gpu


def test_a_slurm_job_has_the_nodes_gpus_and_memory_of_the_config(tmp_path: Path):
    text, notes = emitted("slurm", "imagenet-resnet50", *GPUS, "8", "--storage", str(tmp_path))
    directives = check_sbatch(text)
    wanted = {"job-name": "imagenet-resnet50", "nodes": "2", "gpus-per-node": "4"}
    wanted |= {"cpus-per-task": "32", "mem": "32G"}
    assert {name: directives[name] for name in wanted} == wanted
    assert notes == []


def test_a_ray_job_has_pods_for_all_workers():
    words = ("--name", "My_Run.2", *GPUS, "2:8", "--storage", "s3://mine/runs")
    text, _ = emitted("kuberay", "imagenet-resnet50", *words)
    (job,) = check_kubernetes(text)
    assert (job["kind"], job["metadata"]["name"]) == ("RayJob", "my-run-2")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 1, 2)
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["memory"]) == ("4", "32Gi")
    asked = parse_fit(["imagenet-resnet50", *words]).config
    run = parse_fit(shlex.split(job["spec"]["entrypoint"])[3:]).config
    assert run == replace(asked, scaling=replace(asked.scaling, wait_s=600))
    assert "BUCKET" not in text
    assert opening(text)["watch"] == "kubectl logs -f job/my-run-2"


def test_the_command_prints_only_the_file_without_torch_or_ray(tmp_path: Path):
    for kind in ("slurm", "kuberay", "command"):
        answer = run_cli("fit", "digits", "--emit", kind, cwd=tmp_path)
        assert (answer.status, answer.heavy, [*tmp_path.iterdir()]) == (0, [], [])
        notes = answer.err.splitlines()
        assert all(note.startswith("note: ") for note in notes)
        assert any("num_workers = auto" in note for note in notes) == (kind != "command")
        if kind == "kuberay":
            assert list(yaml.safe_load_all(answer.out))


HOSTILE = [
    *("a'b", 'a"b', "a\\b", "$(touch pwned)", "`touch pwned`", "a # b", "a: b", "{a: b}", "a;b"),
    *("*a", "- a", "--a", "\u00e9\u4e16", "\\g<0>", "BUCKET", "EOF", "'\\''", "'; touch pwned; '"),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_every_emitted_file_preserves_hostile_texts_exactly(text: str):
    photos = TrainConfig(data=DataConfig(source="photos"), scaling=ScalingConfig(2, False))
    data = DataConfig(source=text, eval_source=text, classes=(text, "b"), image_column=text)
    config = replace(photos, storage=f"/x/{text}", task=text, data=data)
    line, _ = emit(config, "command")
    assert line.count("\n") == 1
    assert parse_fit(shlex.split(line)[3:]).config == config
    for kind in ("slurm", "kuberay"):
        file, plain = emit(config, kind)[0], emit(photos, kind)[0]  # type: ignore[arg-type]
        if kind == "slurm":
            check_shell(file)
            assert file.count("\n") == plain.count("\n")
            (run,) = (each for each in file.splitlines() if each.startswith("run=("))
            script = ["bash", "-c", f"{run}; printf '%s\\0' \"${{run[@]}}\""]
            words = subprocess.run(script, capture_output=True, check=True).stdout.decode()
            got = parse_fit(words.split("\0")[3:-1]).config
        else:
            loaded, usual = yaml.safe_load(file), yaml.safe_load(plain)
            command = loaded["spec"].pop("entrypoint")
            assert usual["spec"].pop("entrypoint")
            got = parse_fit(shlex.split(command)[3:]).config
            assert loaded == usual
        assert (got.data, got.task, got.storage) == (data, text, config.storage)


def text_of(name: str) -> str:
    return (ROOT / "clusters" / name).read_text(encoding="utf-8")


def test_fault_46_a_ray_up_file_requires_a_token_and_fits_rays_schema():
    for name in ("lan", "aws", "gcp", "azure"):
        cluster = check_ray_up(text_of(f"{name}.yaml"))
        assert cluster["cluster_name"] == "raytrain"
        assert list(opening(text_of(f"{name}.yaml"))) == ["bring up", "train", "take down"]
    with pytest.raises(Exception, match="idle_timeout_minuets"):  # a misspelled field
        check_ray_up(text_of("aws.yaml").replace("idle_timeout_minutes", "idle_timeout_minuets"))


def test_aws_machines_allow_no_inbound_access_and_only_one_bucket():
    text = text_of("aws.yaml")
    cluster = yaml.safe_load(text)
    for kind, config in cluster["available_node_types"].items():
        node = config["node_config"]
        assert node["MetadataOptions"]["HttpTokens"] == "required"
        assert node["SecurityGroupIds"], "else Ray's own group, open to all"
        assert node["IamInstanceProfile"] == {"Name": f"raytrain-{kind}"}, "else Ray's, for all S3"
        assert node["ImageId"].startswith("ami-")
    assert re.findall(r"--cidr (\S+)", text) == ["203.0.113.0/24"]
    s3, ec2 = (json.loads(f"[{found}]") for found in re.findall(r"(?m)^#   \w+='(\{.*\})'$", text))
    assert s3[0]["Resource"] == ["arn:aws:s3:::BUCKET", "arn:aws:s3:::BUCKET/*"]
    assert all(action.startswith("s3:") and "*" not in action for action in s3[0]["Action"])
    ends = [each for each in ec2 if each["Action"] == "ec2:TerminateInstances"]
    assert "ray-cluster-name" in json.dumps(ends[0]["Condition"])


def test_kubernetes_objects_have_only_fields_known_to_kuberay():
    job, cluster = check_kubernetes(text_of("kuberay.yaml"))
    assert (job["kind"], cluster["kind"]) == ("RayJob", "RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"]
    for spec in (job["spec"]["rayClusterSpec"], cluster["spec"]):
        for group in spec["workerGroupSpecs"]:
            (container,) = group["template"]["spec"]["containers"]
            assert "nvidia.com/gpu" in container["resources"]["limits"]
    with pytest.raises(AssertionError, match="prestop"):  # a misspelled field
        check_kubernetes(text_of("kuberay.yaml").replace("preStop:", "prestop:"))
