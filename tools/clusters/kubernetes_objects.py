"""The Kubernetes objects of a run, as a kustomize base."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final

from slipstream.buffer.store.server_checks import needed_bytes
from slipstream.configs import RunConfig
from slipstream.configs.load import dump_config
from slipstream.configs.runtime.errors import CERTAIN
from slipstream.configs.runtime.passwords import REDIS_PASSWORD_VARIABLE
from slipstream.configs.yaml_text import write_yaml
from slipstream.rollout_servers.cli import PROCESS_VARIABLE
from slipstream.tools.clusters.metrics_server import PORT as METRICS_PORT
from slipstream.tools.clusters.metrics_server import WANTED
from slipstream.tools.clusters.roles import HOST_BYTES, RENDEZVOUS_PORT, Role
from slipstream.tools.launch.placement import Role as RoleName

Object = dict[str, Any]

RUNS: Final = Path("/runs")
CONFIG: Final = "/etc/slipstream/config.yaml"
KEYS: Final = "/etc/slipstream-keys"
USER: Final = 1000
"""User and group of the processes: the images' user `slipstream`."""
ATTEMPTS: Final = 6
"""Failures of the learner, for each of its nodes, after which the Job fails."""
PING_S: Final = 10
REDIS_LEAST_BYTES: Final = 2 << 30
KEYS_OF_OTHERS: Final[Mapping[RoleName, tuple[RoleName, ...]]] = {
    "buffer": ("learner", "rollout"),
    "learner": ("buffer", "rollout"),
    "rollout": ("buffer", "learner"),
}
"""Public keys that a process needs, beside its own pair."""
PING: Final = (
    "import os, redis; redis.Redis(port={port}, socket_timeout={seconds}, "
    f'password=os.environ["{REDIS_PASSWORD_VARIABLE}"]).ping()'
)


@dataclass(frozen=True, kw_only=True)
class Base:
    """A kustomize base.

    Attributes:
        config: as the pods read it.
        image: with the packages of every process.
        namespace: of all objects; its Secrets are made there too.
        storage: size of the volume with the run's folder.
        storage_class: its class, with ReadWriteMany; None: the cluster's default.
        most_servers: rollout servers to which KEDA may scale; None: their number is fixed.
    """

    config: RunConfig
    roles: Mapping[RoleName, Role]
    image: str
    namespace: str
    storage: str
    storage_class: str | None = None
    most_servers: int | None = None

    @property
    def name(self) -> str:
        """Prefix of all names."""
        return self.config.run.name

    @property
    def files(self) -> dict[str, str]:
        """The content of each file, by its name."""
        configuration = {
            "name": f"{self.name}-config",
            "files": ["config.yaml"],
            # A Job's template can't be changed: with a hash in this name, nothing could be applied a second time.
            "options": {"disableNameSuffixHash": True, "labels": self._labels()},
        }
        objects = self.objects
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": self.namespace,
            "resources": [f"{name}.yaml" for name in objects],
            "configMapGenerator": [configuration],
        }
        texts = {f"{name}.yaml": "---\n".join(map(write_yaml, documents)) for name, documents in objects.items()}
        return {"kustomization.yaml": write_yaml(kustomization), "config.yaml": dump_config(self.config), **texts}

    @property
    def objects(self) -> dict[str, list[Object]]:
        """The objects by file, but for the ConfigMap."""
        objects = {
            "volume": [self._volume(f"{self.name}-runs", self.storage, "ReadWriteMany", self.storage_class)],
            "buffer": [self._service("buffer"), self._deployment("buffer", self._buffer_pod())],
            "rollout": [self._deployment("rollout", self._rollout_pod()), *self._scaling()],
            "learner": [self._service("learner"), self._job()],
            "network": self._policies(),
        }
        if "redis" in self.roles:
            objects["redis"] = [self._service("redis"), self._stateful_set()]
        return objects

    def steps(self, folder: Path) -> list[str]:
        """Shell commands that make the secrets, start the run, follow it, and end it."""
        kubectl, steps = f"kubectl -n {self.namespace}", ["slipstream keys new keys"]
        for role, others in KEYS_OF_OTHERS.items():
            files = [f"{role}.key_secret", *(f"{other}.key" for other in others)]
            given = " ".join(f"--from-file=keys/{file}" for file in files)
            steps.append(f"{kubectl} create secret generic {self.name}-keys-{role} {given}")
        variables = sorted({"HF_TOKEN", *(name for role in self.roles.values() for name in role.secrets)})
        variables.remove(REDIS_PASSWORD_VARIABLE)
        return [
            *steps,
            "(umask 077; openssl rand -hex 24 | tr -d '\\n' > redis-password)   # or your own Redis's",
            f"{kubectl} create secret generic {self.name}-secrets "
            f"--from-file={REDIS_PASSWORD_VARIABLE}=redis-password   # as well, if used: {', '.join(variables)}",
            f"kubectl apply -k {folder}",
            f"{kubectl} logs -f job/{self.name}-learner",
            f"{kubectl} delete job,deployment,statefulset -l app.kubernetes.io/instance={self.name}   # volumes stay",
        ]

    # --- pods ---------------------------------------------------------------------------------------------------------

    def _stateful_set(self) -> Object:
        role = self.roles["redis"]
        port = role.ports["redis.port"]
        ping = self._exec("python", "-c", PING.format(port=port, seconds=PING_S - 2))
        needed = needed_bytes(
            self.config.buffer,
            self.config.learner,
            self.config.rollout,
            groups_per_version=self.config.groups_per_version,
        )
        container = self._container(
            role,
            ["python", "-P", "-m", role.module, CONFIG],
            mounts=[{"name": "data", "mountPath": str(self.config.paths.redis), "subPath": "redis"}],
            requests={"memory": _gib(REDIS_LEAST_BYTES + needed)},
            # It loads its file before it answers.
            startupProbe={**ping, "periodSeconds": PING_S, "failureThreshold": 120},
            readinessProbe={"tcpSocket": {"port": port}},
            livenessProbe={**ping, "periodSeconds": 30, "failureThreshold": 10},
        )
        return {
            **self._head("apps/v1", "StatefulSet", "redis"),
            "spec": {
                "serviceName": f"{self.name}-redis",
                "replicas": 1,
                "selector": {"matchLabels": self._labels("redis")},
                "template": self._template(role, [container]),
                "volumeClaimTemplates": [self._volume("data", _gib(REDIS_LEAST_BYTES + 4 * needed), "ReadWriteOnce")],
            },
        }

    def _buffer_pod(self) -> Object:
        role = self.roles["buffer"]
        # Without a probe: a connection that ends before its handshake is logged as one with wrong keys.
        containers = [self._container(role, ["buffer", CONFIG])]
        if self.most_servers is not None:
            metrics = ["python", "-P", "-m", "slipstream.tools.clusters.metrics_server", CONFIG]
            port = {"name": "metrics", "containerPort": METRICS_PORT}
            containers.append({**self._process("metrics", metrics), "ports": [port]})
        return self._template(role, containers, claim=True)

    def _rollout_pod(self) -> Object:
        role = self.roles["rollout"]
        log = {"name": PROCESS_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        container = self._container(role, ["rollout", CONFIG], environment=[log])
        return self._template(role, [container], claim=True)

    def _job(self) -> Object:
        role = self.roles["learner"]
        container = self._container(role, [*self._learner(role), CONFIG], times=role.per_node)
        rules = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            # A mistake in the configuration, or a refusal, would come again.
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": "learner", "operator": "In", "values": [CERTAIN]},
            },
        ]
        return {
            **self._head("batch/v1", "Job", "learner"),
            "spec": {
                "completionMode": "Indexed",
                "completions": role.nodes,
                "parallelism": role.nodes,
                "backoffLimit": ATTEMPTS * role.nodes,
                "podFailurePolicy": {"rules": rules},
                # The next one finds the folder's lock and the host name free.
                "podReplacementPolicy": "Failed",
                "template": self._template(role, [container], claim=True, restartPolicy="Never"),
            },
        }

    def _learner(self, role: Role) -> list[str]:
        """The program of a node's ranks; the Job sets the index of the node."""
        if role.processes == 1:
            return ["learner"]
        return [
            "torchrun",
            f"--nnodes={role.nodes}",
            "--node-rank=$(JOB_COMPLETION_INDEX)",
            f"--nproc-per-node={role.per_node}",
            f"--master-addr={self.config.weights.host}",
            f"--master-port={RENDEZVOUS_PORT}",
            # A step and its checkpoint are to be complete.
            f"--shutdown-timeout={ceil(role.grace_s)}",
            *("-m", role.module),
        ]

    def _container(
        self,
        role: Role,
        arguments: Sequence[str],
        *,
        times: int = 1,
        environment: Sequence[Object] = (),
        mounts: Sequence[Object] = (),
        requests: Mapping[str, str] | None = None,
        **probes: Object,
    ) -> Object:
        """The container of `times` processes of a role."""
        has_model = role.name in ("learner", "rollout")
        variables = [{"name": name, "value": value} for name, value in role.environment.items()]
        if has_model:
            variables.append({"name": "HF_HOME", "value": f"{RUNS}/huggingface"})
        variables += [self._secret_variable(name) for name in (*role.secrets, *(["HF_TOKEN"] if has_model else []))]
        container = self._process(role.name, arguments, environment=[*variables, *environment], mounts=mounts)
        needed = {"cpu": str(times * role.cpus), **(requests or {})}
        if has_model:
            needed["memory"] = _gib(times * (role.least_memory_bytes or HOST_BYTES))
        container["resources"] = {"requests": needed}
        if role.gpus:
            container["resources"]["limits"] = {"nvidia.com/gpu": times * role.gpus}
        ports = [port for key, port in role.ports.items()]
        if ports:
            container["ports"] = [{"containerPort": port} for port in ports]
        if role.name != "redis":
            container["volumeMounts"].append({"name": "keys", "mountPath": KEYS, "readOnly": True})
        if has_model:
            container["volumeMounts"].append({"name": "memory", "mountPath": "/dev/shm"})
        return container | probes

    def _process(
        self, name: str, arguments: Sequence[str], *, environment: Sequence[Object] = (), mounts: Sequence[Object] = ()
    ) -> Object:
        runs = [] if name == "redis" else [{"name": "runs", "mountPath": str(RUNS)}]
        return {
            "name": name,
            "image": self.image,
            "command": list(arguments),
            "env": list(environment),
            "volumeMounts": [
                {"name": "config", "mountPath": str(Path(CONFIG).parent), "readOnly": True},
                *runs,
                *mounts,
            ],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }

    def _template(self, role: Role, containers: Sequence[Object], *, claim: bool = False, **spec: Any) -> Object:
        """A pod's template; `claim`: with the volume of the run's folder."""
        volumes: list[Object] = [{"name": "config", "configMap": {"name": f"{self.name}-config"}}]
        if claim:
            volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": f"{self.name}-runs"}})
            # By the group: a Secret's files belong to root.
            keys = {"secretName": f"{self.name}-keys-{role.name}", "defaultMode": 0o440}
            volumes.append({"name": "keys", "secret": keys})
        if role.name in ("learner", "rollout"):
            size = {} if role.shared_memory_bytes is None else {"sizeLimit": _gib(role.shared_memory_bytes)}
            volumes.append({"name": "memory", "emptyDir": {"medium": "Memory", **size}})
        if role.gpus:
            toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
            spec = {**spec, "tolerations": [toleration]}
        if role.name == "learner":
            spec = {**spec, "subdomain": f"{self.name}-learner"}
        return {
            "metadata": {"labels": self._labels(role.name)},
            "spec": {
                **spec,
                "terminationGracePeriodSeconds": ceil(role.grace_s),
                # Then a process of Kubernetes's own reaps the workers that killed processes leave behind.
                "shareProcessNamespace": True,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), USER),
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": list(containers),
                "volumes": volumes,
            },
        }

    # --- other objects ------------------------------------------------------------------------------------------------

    def _deployment(self, role: RoleName, pod: Object) -> Object:
        scaled = role == "rollout" and self.most_servers is not None
        return {
            **self._head("apps/v1", "Deployment", role),
            "spec": {
                # Where KEDA sets the number, applying the base again must not.
                **({} if scaled else {"replicas": self.roles[role].processes}),
                "selector": {"matchLabels": self._labels(role)},
                # GPUs, and the buffer's port, are free only once the old pod is gone.
                "strategy": {"type": "Recreate"},
                "template": pod,
            },
        }

    def _scaling(self) -> list[Object]:
        """KEDA's object: the wanted servers are the number of replicas at an average of 1 for each."""
        if self.most_servers is None:
            return []
        url = f"http://{self.name}-buffer.{self.namespace}:{METRICS_PORT}"  # KEDA is in another namespace
        pause = {"stabilizationWindowSeconds": 300}
        trigger = {
            "type": "metrics-api",
            "metricType": "AverageValue",
            "metadata": {"url": url, "valueLocation": WANTED, "targetValue": "1"},
        }
        return [
            {
                **self._head("keda.sh/v1alpha1", "ScaledObject", "rollout"),
                "spec": {
                    "scaleTargetRef": {"name": f"{self.name}-rollout"},
                    "pollingInterval": 30,
                    "minReplicaCount": 1,
                    "maxReplicaCount": self.most_servers,
                    "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": pause, "scaleDown": pause}}},
                    "triggers": [trigger],
                },
            }
        ]

    def _service(self, role: RoleName) -> Object:
        """A Service without an address of its own: names lead to the pods, before they are ready too."""
        ports = [{"name": _port_name(key), "port": port} for key, port in self.roles[role].ports.items()]
        if role == "buffer" and self.most_servers is not None:
            ports.append({"name": "metrics", "port": METRICS_PORT})
        return {
            **self._head("v1", "Service", role),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": self._labels(role),
                "ports": ports,
            },
        }

    def _policies(self) -> list[Object]:
        """The allowed connections between pods.

        Learner and rollout servers choose ports for gloo and NCCL themselves.
        """
        buffer = [{"from": self._pods("learner", "rollout"), "ports": self._ports("buffer")}]
        if self.most_servers is not None:
            ports = [{"protocol": "TCP", "port": METRICS_PORT}]
            buffer.append({"from": [{"namespaceSelector": {}}], "ports": ports})
        among = [{"from": self._pods("learner", "rollout")}]
        rules: dict[RoleName, list[Object]] = {"buffer": buffer, "rollout": among, "learner": among}
        if "redis" in self.roles:
            rules["redis"] = [{"from": self._pods("buffer", "learner"), "ports": self._ports("redis")}]
        return [
            {
                **self._head("networking.k8s.io/v1", "NetworkPolicy", role),
                "spec": {
                    "podSelector": {"matchLabels": self._labels(role)},
                    "policyTypes": ["Ingress"],
                    "ingress": ingress,
                },
            }
            for role, ingress in rules.items()
        ]

    # --- parts --------------------------------------------------------------------------------------------------------

    def _head(self, version: str, kind: str, role: RoleName) -> Object:
        metadata = {"name": f"{self.name}-{role}", "labels": self._labels(role)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata}

    def _labels(self, role: RoleName | None = None) -> dict[str, str]:
        labels = {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/instance": self.name}
        return labels if role is None else {**labels, "app.kubernetes.io/component": role}

    def _pods(self, *roles: RoleName) -> list[Object]:
        return [{"podSelector": {"matchLabels": self._labels(role)}} for role in roles]

    def _ports(self, role: RoleName) -> list[Object]:
        return [{"protocol": "TCP", "port": port} for port in self.roles[role].ports.values()]

    def _volume(self, name: str, size: str, access: str, storage_class: str | None = None) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "labels": self._labels()},
            "spec": {
                "accessModes": [access],
                **({} if storage_class is None else {"storageClassName": storage_class}),
                "resources": {"requests": {"storage": size}},
            },
        }

    def _secret_variable(self, name: str) -> Object:
        key = {"name": f"{self.name}-secrets", "key": name}
        # An own Redis may have no password; the others are for what the run may use.
        optional = name != REDIS_PASSWORD_VARIABLE or "redis" not in self.roles
        return {"name": name, "valueFrom": {"secretKeyRef": {**key, **({"optional": True} if optional else {})}}}

    def _exec(self, *arguments: str) -> Object:
        return {"exec": {"command": list(arguments)}, "timeoutSeconds": PING_S}


def _port_name(key: str) -> str:
    """A port's name, of at most 15 letters and -: `weights.control_port` is `control`."""
    return key.rpartition(".")[2].removesuffix("_port").lower().replace("_", "-")


def _gib(size_bytes: float) -> str:
    return f"{ceil(size_bytes / (1 << 30))}Gi"
