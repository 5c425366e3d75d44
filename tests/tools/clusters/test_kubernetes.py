"""The kustomize base that `slipstream k8s` writes."""

import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.configs.load import load_config
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from tests.tools.conftest import CommandLine
from tests.tools.run_command import DEMO

Object = dict[str, Any]
PASSWORD = "open-sesame"
CASES = {
    "cpu": ["--nodes=2"],
    "gpus": ["--nodes=3", "--gpus-per-node=8", "--cpus-per-node=98", "learner.parallel.dp_shard=16"],
    "two ranks": ["--nodes=1", "--gpus-per-node=4", "rollout.engine.options={tensor_parallel_size: 2}"],
    "own Redis": ["--nodes=2", "redis.url=rediss://redis.internal:6379/0"],
    "autoscaled": ["--nodes=2", "--most-servers=5", "--namespace=rl", "--storage=2Ti", "--storage-class=nfs"],
    "ports": ["--nodes=2", "run.port_base=21000"],
}


class Written:
    """The files of a base.

    Attributes:
        printed: the steps.
    """

    def __init__(self, folder: Path, printed: str) -> None:
        self.folder, self.printed = folder, printed
        self.kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        files = [folder / name for name in self.kustomization["resources"]]
        assert {file.name for file in files} | {"kustomization.yaml", "config.yaml"} == {
            file.name for file in folder.iterdir()
        }
        self.objects: list[Object] = [one for file in files for one in yaml.safe_load_all(file.read_text())]

    def get(self, kind: str, name: str) -> Object:
        (found,) = [one for one in self.objects if (one["kind"], one["metadata"]["name"]) == (kind, f"demo-{name}")]
        return found

    def names(self, kind: str) -> set[str]:
        return {one["metadata"]["name"] for one in self.objects if one["kind"] == kind}

    @property
    def pods(self) -> Iterator[tuple[Object, Object]]:
        """Each workload with its pod's template."""
        for one in self.objects:
            if "template" in one.get("spec", {}):
                yield one, one["spec"]["template"]


Write = Callable[..., Written]


@pytest.fixture
def write(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv(REDIS_PASSWORD_VARIABLE, PASSWORD)

    def written(*arguments: str) -> Written:
        code = cli("k8s", DEMO, "--image=registry.example/slipstream:1", f"--out={tmp_path / 'base'}", *arguments)
        assert code == 0, cli.err
        return Written(tmp_path / "base", cli.out)

    return written


@pytest.fixture(params=CASES, ids=list(CASES))
def base(request: pytest.FixtureRequest, write: Write) -> Written:
    return write(*CASES[request.param])


# --- of every base ----------------------------------------------------------------------------------------------------


def test_all_that_is_named_exists(base: Written) -> None:
    secrets = set(re.findall(r"create secret generic (\S+)", base.printed))
    configuration = {entry["name"] for entry in base.kustomization["configMapGenerator"]}
    for one, pod in base.pods:
        spec = pod["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        volumes |= {claim["metadata"]["name"]: {} for claim in one["spec"].get("volumeClaimTemplates", ())}
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == volumes.keys()
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name") in {None, *configuration}
            assert volume.get("secret", {}).get("secretName") in {None, *secrets}
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim in {None, *base.names("PersistentVolumeClaim")}
        for container in spec["containers"]:
            for variable in container["env"]:
                assert variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name") in {None, *secrets}
        for service in (one["spec"].get("serviceName"), spec.get("subdomain")):
            assert service in {None, *base.names("Service")}


def test_selectors_and_ports_match_pods(base: Written) -> None:
    pods = [pod for _, pod in base.pods]

    def selected(labels: dict[str, str]) -> Object:
        (found,) = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
        return found

    policed = []
    for one, pod in base.pods:
        if one["kind"] != "Job":  # the Job's controller makes its own
            assert selected(one["spec"]["selector"]["matchLabels"]) is pod
    for one in base.objects:
        if one["kind"] == "Service":
            containers = selected(one["spec"]["selector"])["spec"]["containers"]
            listening = {port["containerPort"] for container in containers for port in container["ports"]}
            assert {port["port"] for port in one["spec"]["ports"]} == listening
            names = [port["name"] for port in one["spec"]["ports"]]
            assert len(set(names)) == len(names)
            assert all(re.fullmatch(r"[a-z]([-a-z]{0,13}[a-z])?", name) for name in names)
        if one["kind"] == "NetworkPolicy":
            policed.append(selected(one["spec"]["podSelector"]["matchLabels"]))
            for rule in one["spec"]["ingress"]:
                for peer in rule["from"]:
                    assert "namespaceSelector" in peer or selected(peer["podSelector"]["matchLabels"])
    assert len(policed) == len(pods)


def test_pods_are_restricted(base: Written) -> None:
    for _, pod in base.pods:
        spec, context = pod["spec"], pod["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] == context["fsGroup"] == 1000
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"]
        for container in spec["containers"]:
            limits = container["securityContext"]
            assert limits == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_configuration_is_what_the_pods_need(base: Written) -> None:
    config = load_config(base.folder / "config.yaml")
    assert config.buffer.bind.startswith("tcp://0.0.0.0:")
    assert config.buffer.endpoint == f"tcp://demo-buffer:{config.buffer.bind.rpartition(':')[2]}"
    assert (config.weights.bind, config.weights.host) == ("0.0.0.0", "demo-learner-0.demo-learner")
    assert str(config.run.dir) == "/runs"
    assert config.security.keys is not None
    for _, pod in base.pods:
        for container in pod["spec"]["containers"]:
            assert container["image"] == "registry.example/slipstream:1"
            assert "/etc/slipstream/config.yaml" in container["command"]


def test_no_secret_is_written(base: Written) -> None:
    for file in base.folder.iterdir():
        assert PASSWORD not in file.read_text()
        assert not stat.S_ISLNK(file.lstat().st_mode)
    assert PASSWORD not in base.printed
    holders = {
        one["metadata"]["name"]
        for one, pod in base.pods
        for container in pod["spec"]["containers"]
        if any(variable["name"] == REDIS_PASSWORD_VARIABLE for variable in container["env"])
    }
    assert holders <= {"demo-redis", "demo-buffer", "demo-learner"}
    assert "demo-rollout" not in holders


# --- of some ----------------------------------------------------------------------------------------------------------


def container(workload: Object) -> Object:
    found: Object = workload["spec"]["template"]["spec"]["containers"][0]
    return found


def test_one_rank_is_a_plain_learner(write: Write) -> None:
    base = write(*CASES["cpu"])
    job = base.get("Job", "learner")
    assert container(job)["command"] == ["learner", "/etc/slipstream/config.yaml"]
    assert "limits" not in container(job)["resources"]
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2]
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == load_config(DEMO).learner.wait_deadline_s
    assert {"name": "memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert not base.names("ScaledObject")


def test_ranks_of_several_nodes(write: Write) -> None:
    base = write(*CASES["gpus"])
    job = base.get("Job", "learner")
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    command = container(job)["command"]
    assert command[0] == "torchrun"
    assert {
        "--nnodes=2", "--nproc-per-node=8", "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--master-addr=demo-learner-0.demo-learner", "--master-port=29500",
    } <= set(command)  # fmt: skip
    assert container(job)["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container(job)["resources"]["requests"]["cpu"] == "96"
    rollout = base.get("Deployment", "rollout")
    assert rollout["spec"]["replicas"] == 8
    assert container(rollout)["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert rollout["spec"]["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "tolerations" not in base.get("Deployment", "buffer")["spec"]["template"]["spec"]


def test_engines_of_several_gpus(write: Write) -> None:
    base = write(*CASES["two ranks"])
    assert container(base.get("Deployment", "rollout"))["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert "--nnodes=1" in container(base.get("Job", "learner"))["command"]


def test_redis_has_a_volume_and_a_password(write: Write) -> None:
    base = write(*CASES["cpu"])
    redis = base.get("StatefulSet", "redis")
    assert container(redis)["command"][-2:] == ["slipstream.tools.clusters.redis_server", "/etc/slipstream/config.yaml"]
    assert load_config(base.folder / "config.yaml").redis.url == "redis://demo-redis:6399/0"
    assert {"name": "data", "mountPath": "/runs/demo/redis", "subPath": "redis"} in container(redis)["volumeMounts"]
    (claim,) = redis["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    (password,) = [one for one in container(redis)["env"] if one["name"] == REDIS_PASSWORD_VARIABLE]
    assert "optional" not in password["valueFrom"]["secretKeyRef"]
    for probe in ("startupProbe", "livenessProbe"):
        compile(container(redis)[probe]["exec"]["command"][-1], probe, "exec")
    (rule,) = base.get("NetworkPolicy", "redis")["spec"]["ingress"]
    assert len(rule["from"]) == 2
    assert rule["ports"] == [{"protocol": "TCP", "port": 6399}]


def test_own_redis_takes_the_place_of_the_pod(write: Write) -> None:
    base = write(*CASES["own Redis"])
    assert not base.names("StatefulSet")
    assert load_config(base.folder / "config.yaml").redis.url == "rediss://redis.internal:6379/0"


def test_keda_scales_rollout_servers(write: Write) -> None:
    base = write(*CASES["autoscaled"])
    spec = base.get("ScaledObject", "rollout")["spec"]
    (trigger,) = spec["triggers"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 5)
    assert (trigger["type"], trigger["metricType"]) == ("metrics-api", "AverageValue")
    assert trigger["metadata"] == {
        "url": "http://demo-buffer.rl:9400", "valueLocation": "servers_wanted", "targetValue": "1",
    }  # fmt: skip
    assert "replicas" not in base.get("Deployment", "rollout")["spec"]
    _, metrics = base.get("Deployment", "buffer")["spec"]["template"]["spec"]["containers"]
    assert metrics["ports"] == [{"name": "metrics", "containerPort": 9400}]
    assert base.kustomization["namespace"] == "rl"
    volume = base.get("PersistentVolumeClaim", "runs")["spec"]
    assert (volume["storageClassName"], volume["resources"]["requests"]["storage"]) == ("nfs", "2Ti")


def test_ports_of_the_configuration_are_kept(write: Write) -> None:
    base = write(*CASES["ports"])
    assert container(base.get("Deployment", "buffer"))["ports"] == [{"containerPort": 21001}]
    assert load_config(base.folder / "config.yaml").redis.url == "redis://demo-redis:21000/0"


def test_files_are_written_over(write: Write) -> None:
    write(*CASES["cpu"])
    assert write(*CASES["cpu"], "learner.steps=77").folder.joinpath("config.yaml").read_text().count("steps: 77\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run.name=Demo_1"], "run.name=Demo_1"),
        ([f"run.name={'a' * 41}"], "run.name"),
        (["model.build=null", "model.path=/models/mine"], "model.path=/models/mine"),
        (["redis.url=redis://127.0.0.1:6379/0"], "redis.url"),
        (["redis.url=unix:///run/redis.sock?db=0"], "redis.url"),
        (["weights.transport=shm"], "weights.transport"),
        (["buffer.bind=ipc:///tmp/b", "buffer.endpoint=ipc:///tmp/b"], "buffer.bind"),
        (["--most-servers=2", "--nodes=4"], "--most-servers=2"),
        (["--gpus-per-node=2", "learner.ranks=8"], "learner.ranks=8"),
        (["--storage=much"], "much"),
        (["--namespace=Prod"], "Prod"),
        (["--out=/proc/base"], "/proc/base"),
    ],
)
def test_what_can_not_work_is_refused(arguments: list[str], part: str, cli: CommandLine, tmp_path: Path) -> None:
    defaults = ["--image=i", f"--out={tmp_path / 'base'}", "--nodes=2"]
    assert cli("k8s", DEMO, *defaults, *arguments) == 2
    assert part in cli.err
    assert not list(tmp_path.iterdir())


def test_model_on_the_volume_is_allowed(write: Write) -> None:
    base = write("--nodes=2", "model.build=null", "model.path=/runs/models/mine")
    assert str(load_config(base.folder / "config.yaml").model.path) == "/runs/models/mine"
