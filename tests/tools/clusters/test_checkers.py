"""Files for clusters against the clusters' own tools, which have an environment of their own: `make k8s-check`."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.tools.keys import make_keys
from tests.tools.clusters.test_kubernetes import CASES
from tests.tools.clusters.test_sky import CASES as MACHINES
from tests.tools.conftest import CommandLine
from tests.tools.run_command import DEMO

BIN = os.environ.get("SLIPSTREAM_CLUSTERS_BIN")
VERSIONS = ("1.31", "1.34")
OWN_KINDS = ("ScaledObject",)
"""Kinds that Kubernetes has no schema of."""

pytestmark = pytest.mark.skipif(BIN is None, reason="make k8s-check runs it")


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(str(BIN)) / program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(cli: CommandLine, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The objects as kustomize gives them."""
    assert cli("k8s", DEMO, "--image=registry.example/slipstream:1", f"--out={folder}", *arguments) == 0, cli.err
    done = run("kubectl", "kustomize", folder)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def problems(objects: list[dict[str, Any]], file: Path, version: str) -> list[str]:
    """Objects that do not fit their schema, or have none."""
    file.write_text(yaml.safe_dump_all(objects))
    done = run("kubernetes-validate", "--strict", "-k", version, file)
    lines = (done.stdout + done.stderr).splitlines()
    assert len([line for line in lines if line.startswith(("INFO", "WARN", "ERROR"))]) >= len(objects)
    return [line for line in lines if not line.startswith("INFO")]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_objects_fit_their_schemas(case: str, version: str, cli: CommandLine, tmp_path: Path) -> None:
    objects = rendered(cli, tmp_path / "base", *CASES[case])
    (configuration,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert (configuration["metadata"]["name"], list(configuration["data"])) == ("demo-config", ["config.yaml"])
    known = [one for one in objects if one["kind"] not in OWN_KINDS]
    assert problems(known, tmp_path / "objects.yaml", version) == []


def test_behaviour_of_the_scaling_fits_that_of_an_autoscaler(cli: CommandLine, tmp_path: Path) -> None:
    objects = rendered(cli, tmp_path / "base", *CASES["autoscaled"])
    (scaled,) = [one for one in objects if one["kind"] == "ScaledObject"]
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    spec = scaled["spec"]
    assert spec.keys() == {
        "scaleTargetRef", "pollingInterval", "minReplicaCount", "maxReplicaCount", "advanced", "triggers"
    }  # fmt: skip
    assert all(isinstance(value, str) for trigger in spec["triggers"] for value in trigger["metadata"].values())
    autoscaler = {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]},
            "minReplicas": spec["minReplicaCount"], "maxReplicas": spec["maxReplicaCount"],
            **spec["advanced"]["horizontalPodAutoscalerConfig"],
        },
    }  # fmt: skip
    assert problems([autoscaler], tmp_path / "autoscaler.yaml", VERSIONS[0]) == []


def test_misspelt_key_is_found(cli: CommandLine, tmp_path: Path) -> None:
    objects = rendered(cli, tmp_path / "base", *CASES["cpu"])
    (job,) = [one for one in objects if one["kind"] == "Job"]
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    assert problems([job], tmp_path / "objects.yaml", VERSIONS[0])


TASKS = """
import sys, sky
for file in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(file)
    except ValueError as error:
        print("refused", error)
    else:
        (resources,) = task.resources
        print(task.name, resources.use_spot)
"""


@pytest.mark.timeout(900)
def test_tasks_are_read_by_skypilot(cli: CommandLine, tmp_path: Path) -> None:
    """All in one process: SkyPilot takes long to load."""
    files, expected = [], []
    for case, arguments in MACHINES.items():
        folder = tmp_path / case
        assert cli("sky", DEMO, "--image=registry.example/slipstream:1", f"--out={folder}", *arguments) == 0, cli.err
        make_keys(folder / "keys")
        files += [folder / "trainer.yaml", folder / "rollout.yaml"]
        expected += ["demo-trainer False", "demo-rollout True"]
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(files[-1].read_text().replace("use_spot", "use_spott"))
    done = run("python", "-c", TASKS, *files, misspelt)
    assert done.returncode == 0, done.stderr[-2000:]
    *read, refused = done.stdout.splitlines()[: len(expected) + 1]
    assert read == expected
    assert refused.startswith("refused")
