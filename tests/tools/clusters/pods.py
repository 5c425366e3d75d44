"""Pods of a kustomize base as processes of this host: each in bubblewrap, with its pod's files and environment alone.

All share this network namespace: every Service's name is loopback there.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
OF_THE_POD = {"etc", "runs", "dev", "proc", "tmp"}
"""Folders of the root that are not this host's."""
OWNER = 65534
"""Of the Secrets' files: another user than that of the processes."""


class Pods:
    """The pods of a base.

    Attributes:
        folder: holds their volumes, by name.
        secrets: by name, the content by key.
    """

    def __init__(self, base: Path, folder: Path, secrets: dict[str, dict[str, str]]) -> None:
        files = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
        self._objects = [one for name in files for one in yaml.safe_load_all((base / name).read_text())]
        self._base, self.folder, self._secrets = base, folder, secrets
        services = [one["metadata"]["name"] for one in self._objects if one["kind"] == "Service"]
        learner = next(name for name in services if name.endswith("-learner"))
        names = " ".join(["localhost", os.uname().nodename, *services, f"{learner}-0.{learner}"])
        (folder / "hosts").write_text(f"127.0.0.1 {names}\n")

    def start(self, workload: str, container: int = 0) -> subprocess.Popen[bytes]:
        """Starts a container of a workload; its output goes to `<workload>-<container>.log` in the folder."""
        spec = self._template(workload)
        described = spec["containers"][container]
        inherited = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": programs, "HOME": "/tmp", **inherited}
        for variable in described["env"]:
            if (value := self._value(variable, workload)) is not None:
                environment[variable["name"]] = value
        command = [word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in described["command"]]
        with (self.folder / f"{workload}-{container}.log").open("ab") as log:
            return subprocess.Popen(
                ["bwrap", *self._mounts(spec, described), "--die-with-parent", "--", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def probe(self, workload: str, kind: str) -> bool:
        """True if the command of a probe succeeds."""
        container = self._template(workload)["containers"][0]
        values = {entry["name"]: self._value(entry, workload) or "" for entry in container["env"]}
        command = [sys.executable, *container[kind]["exec"]["command"][1:]]
        done = subprocess.run(command, env={**os.environ, **values}, capture_output=True, check=False)
        return done.returncode == 0

    def _template(self, workload: str) -> Object:
        """The specification of a workload's pods."""
        (found,) = [
            one["spec"]["template"]["spec"]
            for one in self._objects
            if one["metadata"]["name"] == workload and "template" in one.get("spec", {})
        ]
        template: Object = found
        return template

    def _value(self, variable: Object, pod: str) -> str | None:
        if "value" in variable:
            return str(variable["value"])
        source = variable["valueFrom"]
        if "fieldRef" in source:
            return f"{pod}-abcde"
        key = source["secretKeyRef"]
        return self._secrets[key["name"]].get(key["key"])

    def _mounts(self, spec: Object, container: Object) -> list[str]:
        options = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        for path in sorted(Path("/").iterdir()):
            if path.name in OF_THE_POD:
                continue
            if path.is_symlink():
                options += ["--symlink", str(path.readlink()), str(path)]
            else:
                options += ["--bind", str(path), str(path)]
        for path in sorted(Path("/etc").iterdir()):
            if path.exists() and path.name != "hosts":
                options += ["--ro-bind", str(path), str(path)]
        options += ["--ro-bind", str(self.folder / "hosts"), "/etc/hosts"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in sorted(container["volumeMounts"], key=lambda mount: len(mount["mountPath"])):
            source = self._source(volumes.get(mount["name"], {"name": mount["name"]}))
            options += ["--bind", str(source), mount["mountPath"]]
        return options

    def _source(self, volume: Object) -> Path:
        source = self.folder / str(volume["name"])
        if "configMap" in volume:
            return self._base  # with config.yaml
        if "secret" in volume:
            name = volume["secret"]["secretName"]
            source = self.folder / name
            source.mkdir(exist_ok=True)
            for key, text in self._secrets[name].items():
                (source / key).write_text(text)
                (source / key).chmod(volume["secret"]["defaultMode"])
                os.chown(source / key, OWNER, os.getgid())  # read by the group
        source.mkdir(exist_ok=True)
        return source
