"""The files of clusters/, tested without a cluster; for Slurm, see test_slurm.py."""

from __future__ import annotations

import json
import re

import pytest
from cluster_checks import check_kubernetes, check_ray_up, opening
from slurm import ROOT

yaml = pytest.importorskip("yaml")

CLUSTERS = ROOT / "clusters"
CLOUDS = ("aws", "gcp", "azure")


def text_of(name: str) -> str:
    return (CLUSTERS / name).read_text(encoding="utf-8")


def test_fault_46_a_ray_up_file_requires_a_token_and_fits_rays_schema():
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
