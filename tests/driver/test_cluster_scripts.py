"""The files of clusters/, tested without a cluster; for Slurm, see test_slurm.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster_checks import check_kubernetes, check_ray_up, opening
from metadata_server import ACTION, aws_action, serve
from slurm import ROOT

yaml = pytest.importorskip("yaml")

CLUSTERS = ROOT / "clusters"
CLOUDS = ("aws", "gcp", "azure")


def text_of(name: str) -> str:
    return (CLUSTERS / name).read_text(encoding="utf-8")


# ------------------------------------------------------------------ ray up


def test_a_ray_up_file_fits_rays_schema_and_explains_its_use():
    for name in ("lan", *CLOUDS):
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


def program(folder: Path, name: str, body: str) -> None:
    """A command of that name, in sh."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def versions() -> list[dict[str, str]]:
    """The table of README.md."""
    head, _, *rows = re.findall(
        r"(?m)^\| (.*) \|$", text_of("README.md").partition("## Versions")[2]
    )
    return [dict(zip(head.split(" | "), row.split(" | "), strict=True)) for row in rows[:2]]


def test_all_versions_match_the_table():
    newest, oldest = versions()
    pins = " ".join(
        f"'{name}=={newest[key]}'"
        for name, key in (("torch", "torch"), ("torchvision", "torchvision"))
    )
    pins += f" 'ray[default,train]=={newest['Ray']}'"
    for cloud in CLOUDS:
        cluster = yaml.safe_load(text_of(f"{cloud}.yaml"))
        assert pins in cluster["setup_commands"][-2]
        (driver,) = cluster["worker_setup_commands"]
        assert f'{newest["lowest driver"]} "$D"' in driver
        assert f"torch {newest['torch']} needs {newest['lowest driver']} " in driver
    arguments = dict(re.findall(r"(?m)^ARG (\w+)=(.*)$", text_of("Dockerfile")))
    for key in ("torch", "torchvision", "Ray"):
        assert arguments[key.upper()] == newest[key]
        lowest = re.search(
            rf'"{key.lower()}(?:\[.*\])?>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()
        )
        assert lowest is not None
        assert f"{oldest[key]}.".startswith(f"{lowest[1]}."), key


def test_a_cloud_worker_is_drained_at_its_notice_but_never_a_head(tmp_path: Path):
    """Its line unchanged, in a shell that ends; only the metadata service is replaced."""
    cluster = yaml.safe_load(text_of("aws.yaml"))
    assert "raytrain_ddp.spot" not in json.dumps(cluster["head_start_ray_commands"])
    ours, notes = tmp_path / "bin", tmp_path / "notes"
    with serve() as cloud_says:
        run = f'exec {sys.executable} "$@" --metadata {cloud_says.url} --every-s 0.1'
        program(ours, "python", run)
        program(ours, "ray", f'echo "$1 $RAY_ADDRESS $NCCL_SOCKET_IFNAME" >> {notes}')
        program(ours, "ip", 'echo "$4 via 10.0.0.1 dev ens5 src 10.0.0.7 uid 1000 \\\\    cache"')
        port = cloud_says.url.rpartition(":")[2]  # an address that no other test uses
        home = {"HOME": str(tmp_path), "PATH": f"{ours}:/usr/bin:/bin", "RAY_HEAD_IP": f"h{port}"}
        home["PYTHONPATH"] = str(ROOT)
        command = f"({cluster['worker_start_ray_commands'][-1]})"
        subprocess.run(["bash", "-c", command], env=home, check=True, timeout=30)
        deadline = time.monotonic() + 30
        while not cloud_says.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        assert notes.read_text() == "start  ens5\n"
        cloud_says.texts[ACTION] = aws_action(in_s=3600)
        while "drain-node" not in notes.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert notes.read_text() == f"start  ens5\ndrain-node h{port}:6379 ens5\n"


# ------------------------------------------------------------------ Kubernetes


def test_kubernetes_objects_have_only_fields_known_to_kuberay():
    job, cluster = check_kubernetes(text_of("kuberay.yaml"))
    assert (job["kind"], cluster["kind"]) == ("RayJob", "RayCluster")
    assert cluster["spec"]["enableInTreeAutoscaling"]
    limits = [
        group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for spec in (job["spec"]["rayClusterSpec"], cluster["spec"])
        for group in spec["workerGroupSpecs"]
    ]
    assert all("nvidia.com/gpu" in limit for limit in limits)
