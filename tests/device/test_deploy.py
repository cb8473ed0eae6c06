"""The manifests of deploy/: every field is one that KubeRay has, and what they say fits together and fits raycp."""

import argparse
import copy
import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jobs.flags import add_config_flags, config_from_flags
from raycp.config import FitConfig
from raycp.training.device import resolve_device
from tests.device import kuberay

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy").rglob("*.yaml"))
DEVICE_PLUGINS = {"NPU": "huawei.com/Ascend910", "GPU": "nvidia.com/gpu"}


def load(path: Path) -> dict[str, Any]:
    (found,) = yaml.safe_load_all(path.read_text())
    assert isinstance(found, dict)
    return found


def check(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, kuberay.schema(manifest["kind"]))


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    return spec["rayClusterSpec"] if manifest["kind"] == "RayJob" else spec


def ray_resources(params: dict[str, str]) -> dict[str, float]:
    """What `ray start` gets: KubeRay passes each parameter as --name=value through a shell."""
    words = shlex.split(" ".join(f"--{name}={value}" for name, value in params.items()))
    flags = dict(word.removeprefix("--").split("=", 1) for word in words)
    found = {str(k): float(v) for k, v in json.loads(flags.get("resources", "{}")).items()}
    return found | ({"GPU": float(flags["num-gpus"])} if "num-gpus" in flags else {})


def test_there_is_a_cluster_and_a_job_for_each_kind_of_node() -> None:
    assert [str(p.relative_to(ROOT / "deploy")) for p in FILES] == [
        f"{kind}/{name}.yaml" for kind in ("gpu", "npu") for name in ("raycluster", "rayjob")
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_schema(path: Path) -> None:
    check(load(path))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("spec", "shutdownAfterJobFinished"), True),
        (("spec", "submissionMode"), "Job"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "replica"), 2),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "resource"), {}),
        (("apiVersion",), "ray.io/v1alpha1"),
    ],
    ids=str,
)
def test_a_wrong_field_is_seen(where: tuple[Any, ...], value: Any) -> None:
    manifest = copy.deepcopy(load(ROOT / "deploy" / "npu" / "rayjob.yaml"))
    place: Any = manifest
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_pods_fit_together(path: Path) -> None:
    cluster = cluster_of(load(path))
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        volumes = {v["name"] for v in pod["volumes"]}
        for container in pod["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} == volumes
            assert container["resources"]["requests"] == container["resources"]["limits"]
            mounts = {m["mountPath"] for m in container["volumeMounts"]}
            assert {"/shared", "/dev/shm"} <= mounts
            offered = ray_resources(group["rayStartParams"])
            for resource, plugin in DEVICE_PLUGINS.items():
                limit = container["resources"]["limits"].get(plugin)
                assert offered.get(resource, 0) == int(limit or 0)  # Ray counts what the pod was given


@pytest.mark.parametrize("kind", ["npu", "gpu"])
def test_the_job_asks_for_what_its_cluster_has(kind: str) -> None:
    manifest = load(ROOT / "deploy" / kind / "rayjob.yaml")
    python, script, *words = shlex.split(manifest["spec"]["entrypoint"])
    assert python == "python"
    assert (ROOT / "jobs" / Path(script).name).exists()
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--data", "--output-dir"):
        parser.add_argument(flag)
    add_config_flags(parser, FitConfig(workers=8))
    flags = parser.parse_args(words)
    config = config_from_flags(flags, FitConfig(workers=8))
    assert config.problems() == []
    (group,) = cluster_of(manifest)["workerGroupSpecs"]
    offered = ray_resources(group["rayStartParams"])
    spec = resolve_device(config.device, [("node", offered)])
    assert config.workers == group["replicas"] * offered[str(spec.ray_resource)]
    assert Path(flags.output_dir).is_relative_to("/shared")


@pytest.mark.parametrize("kind", ["npu", "gpu"])
def test_ray_is_the_version_that_the_suite_runs_on(kind: str) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in ("raycluster", "rayjob"):
        assert cluster_of(load(ROOT / "deploy" / kind / f"{name}.yaml"))["rayVersion"] == pins["ray"]
