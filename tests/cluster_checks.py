"""Checks of cluster files that need no cluster, for the files in clusters/ and those of --emit."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.fit import parse_fit
from raytrain_ddp.tools import spot

jsonschema, yaml = pytest.importorskip("jsonschema"), pytest.importorskip("yaml")

GOLDEN = Path(__file__).parent / "golden"
# The fields of Kubernetes' pods with their types, `!` where they are required: from the models of
# PyPI's kubernetes 37.0.2. And those of KubeRay 1.6's resources (ray.io/v1), from its reference,
# by hand: of those only what may be used here. The API server silently drops unknown fields.
SCHEMA: dict[str, dict[str, str]] = {
    kind: known
    for name in ("pod_template.json", "kuberay.json")
    for kind, known in json.loads((GOLDEN / name).read_text(encoding="utf-8")).items()
}
LISTS_OF_COMMANDS = (
    *("initialization_commands", "setup_commands", "head_setup_commands"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
)
HEAD = {  # how a head is given in each kind of cluster
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_DASHBOARD_ENABLE_PROFILING": "1",
}


def opening(text: str) -> dict[str, str]:
    """label -> command of the first lines of a file."""
    lines = re.findall(r"(?m)^#   (\S+(?: \S+)*) {3,}([^#\s].*)$", text)
    return {label: re.sub(r" {3,}\(.*\)$", "", command) for label, command in lines}


def check_shell(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n{script}"


def check_opening(text: str) -> None:
    """Three commands that a shell can parse; their `fit` command lines are accepted."""
    commands = opening(text)
    assert len(commands) == 3, commands
    for command in commands.values():
        check_shell(command)
    assert configs(text)


def configs(text: str) -> list[TrainConfig]:
    """The configs of the file's `fit` commands."""
    words = []
    for line in text.splitlines():
        before, call, rest = line.partition("python -m raytrain_ddp.fit")
        if not call or rest.startswith("`") or '"$@"' in rest or rest.endswith("..."):
            continue
        if "ray job submit" in before and "ray exec" in before:  # quoted once more
            rest = shlex.split(line[1:])[-1].partition("raytrain_ddp.fit")[2]
        words.append(shlex.split(rest.removesuffix(")")))
    return [parse_fit(each).config for each in words] or [TrainConfig()]


def check_ray_up(text: str) -> dict[str, Any]:
    """Ray's own schema, commands that a shell can parse, the token, and details found by
    experiment."""
    check_opening(text)
    cluster: dict[str, Any] = yaml.safe_load(text)
    ray = importlib.util.find_spec("ray")  # which is not imported for it
    assert ray is not None
    assert ray.origin is not None
    schema = Path(ray.origin).with_name("autoscaler") / "ray-schema.json"
    jsonschema.validate(cluster, json.loads(schema.read_text()))
    for name in LISTS_OF_COMMANDS:
        for command in cluster.get(name, []):
            check_shell(f"({command})")
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for start in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "export RAY_AUTH_MODE=token" in cluster[start][-1]
        assert "unset OMP_NUM_THREADS" in cluster[start][-1]
    head = cluster["head_start_ray_commands"][-1]
    assert all(f"{name}={value}" in head for name, value in HEAD.items())
    assert "chmod 600 ~/.ray/auth_token" in cluster["setup_commands"][0]
    assert "umask 077; ray get-auth-token --generate" in text
    assert "0.0.0.0" not in text
    assert cluster["cluster_name"].startswith("raytrain")
    if cluster["provider"]["type"] != "local":
        types = cluster["available_node_types"]
        assert cluster["head_node_type"] in types
        assert types["worker"]["min_workers"] == 0
        assert types["worker"]["max_workers"] == cluster["max_workers"]
        assert types["head"]["resources"] == {"CPU": 0}
    return cluster


def check_fields(value: Any, kind: str, where: str) -> None:
    """Each field is known and has its type, and no required field is missing."""
    if kind.startswith("List["):
        assert isinstance(value, list), where
        for number, each in enumerate(value):
            check_fields(each, kind[5:-1], f"{where}[{number}]")
    elif kind in SCHEMA:
        assert isinstance(value, dict), where
        kinds = {name.rstrip("!"): kind for name, kind in SCHEMA[kind].items()}
        assert {*value} <= {*kinds}, f"{where} has no {sorted({*value} - {*kinds})}"
        missing = [name for name in SCHEMA[kind] if name[-1] == "!" and name[:-1] not in value]
        assert not missing, f"{where} needs {missing}"
        for name, each in value.items():
            check_fields(each, kinds[name], f"{where}.{name}")
    elif kind == "Dict[str, str]":
        assert all(isinstance(each, str) for pair in value.items() for each in pair), where
    elif kind != "object":
        types = {"str": str, "int": int, "bool": bool}
        assert type(value) is types[kind], f"{where} is {value!r}: want {kind}"


def check_kubernetes(text: str) -> list[dict[str, Any]]:
    """Fields of Kubernetes and KubeRay; the token; shared memory; resources."""
    check_opening(text)
    resources = list(yaml.safe_load_all(text))
    for resource in resources:
        check_fields(resource, resource["kind"], resource["kind"])
        assert resource["apiVersion"] == "ray.io/v1"
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", resource["metadata"]["name"])
        spec = resource["spec"]
        if resource["kind"] == "RayJob":
            assert spec["shutdownAfterJobFinishes"]
            assert spec["ttlSecondsAfterFinished"] > 0
            spec = spec["rayClusterSpec"]
        check_cluster_spec(spec)
    return resources


def check_cluster_spec(spec: dict[str, Any]) -> None:
    assert spec["authOptions"]["mode"] == "token"
    head, groups = spec["headGroupSpec"], spec["workerGroupSpecs"]
    for group in groups:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    env = head["template"]["spec"]["containers"][0]["env"]
    assert {each["name"]: each["value"] for each in env} == HEAD
    for group in (head, *groups):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["memory"]
        gpus = [name for name in container["resources"]["limits"] if name == "nvidia.com/gpu"]
        assert [each["key"] for each in pod.get("tolerations", [])] == gpus
        if group is not head:  # a node that ends is drained, while Kubernetes waits for the pod
            hook = container["lifecycle"]["preStop"]["exec"]["command"]
            assert hook[:3] == ["python", "-m", "raytrain_ddp.tools.spot"]
            seconds = spot.parser().parse_args(hook[3:]).seconds
            assert 0 < seconds < pod["terminationGracePeriodSeconds"]
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert {*mounts} == {*volumes}
        assert mounts["shm"] == "/dev/shm"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def check_sbatch(text: str) -> dict[str, str]:
    """Directives come before the first command, and bash can parse the script; returns them."""
    check_opening(text)
    check_shell(text)
    assert text.startswith("#!/bin/bash\n")
    before = re.split(r"(?m)^[^#\n]", text)[0]
    reported = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)(?:=(\S+))?$", before))
    assert len(reported) == text.count("\n#SBATCH"), "the others are ignored"
    assert reported["signal"] == "B:USR1@120"
    assert "requeue" in reported
    assert reported["ntasks-per-node"] == "1"
    assert "export RAY_AUTH_MODE=token" in text
    assert "ray stop" not in text, "would end the Ray of other jobs on the node"
    assert all(f"{name}={value}" in text for name, value in HEAD.items())
    return reported
