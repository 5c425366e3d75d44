"""The reward `reward_model`: a sequence classification model, served by vLLM or by a process of this host."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from slipstream.configs.runtime.errors import ConfigError
from slipstream.configs.runtime.logging import get_log
from slipstream.rewards.base import Episode, RewardUnavailable, Score, text_of
from slipstream.rewards.endpoint import Endpoint

log = get_log("rewards.reward_model")

_RESTART_S: Final = 1.0
_PROGRAM: Final = "slipstream.rewards.model_server"


@dataclass(kw_only=True, config=ConfigDict(extra="forbid"))
class RewardModel:
    """The logit of a label for the dialogue; a prompt that is text and the answer are scored as one text.

    Raises: ConfigError. When called: RewardUnavailable.
    """

    path: Path | None = None
    """Folder of a model that transformers loads in one process for all workers of a rollout server."""
    url: str | None = None
    """Instead: address of a server with vLLM's endpoint `/classify` (`vllm serve MODEL --runner pooling`)."""
    model: str = ""
    """Name of the model at `url`."""
    label: int = Field(default=0, ge=0)
    """Index of the logit."""
    activation: bool = False
    """Score the sigmoid of a model with one label, or the softmax over several."""
    device: str = "auto"
    """Device of the model in `path`: `cpu`, `cuda:1`; `auto`: the first GPU, if any."""
    dtype: str = "auto"
    """Precision of the model in `path`."""
    batch: int = Field(default=32, ge=1)
    """Most dialogues of one forward pass of the model in `path`."""
    max_tokens: int = Field(default=4096, ge=1)
    """Longest dialogue for the model in `path`; longer ones lose their beginning."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time of one try; there are four."""
    concurrency: int = Field(default=64, ge=1)
    """Requests at a time, of each worker."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.url is None):
            raise ConfigError("reward_model needs either path, the folder of a model, or url, the address of a server")
        self._process: ModelProcess | None = None
        url = self.url
        if self.path is not None:
            url = self._local_url(self.path.expanduser())
        assert url is not None
        self.endpoint = Endpoint(url, timeout_s=self.timeout_s, retries=3, concurrency=self.concurrency)
        self.worst_case_s = self.endpoint.worst_case_s

    async def __call__(self, episode: Episode) -> Score:
        """The part `weights` holds the first 24 bits of the weights' fingerprint, of a model in `path`."""
        body: dict[str, Any] = {"model": self.model, "use_activation": self.activation}
        if isinstance(episode.prompt, str):
            body["input"] = episode.prompt + episode.answer
        else:
            # The images are not here, and a template for texts would print lists of parts as they are.
            body["messages"] = [{**message, "content": text_of(message.get("content"))} for message in episode.messages]
        reply = await self.endpoint.post("/classify", body)
        try:
            value = float(reply["data"][0]["probs"][self.label])
            weights = {"weights": float(int(reply["fingerprint"][:6], 16))} if "fingerprint" in reply else {}
        except (KeyError, IndexError, TypeError, ValueError):
            raise RewardUnavailable(
                f"{self.endpoint.url}: {str(reply)[:200]} has no logit of label {self.label}"
            ) from None
        return Score(value, weights)

    def close(self) -> None:
        """Ends the process that this object has started."""
        if self._process is not None:
            self._process.close()

    def _local_url(self, path: Path) -> str:
        """The address of the model's process, which is started unless this process or its parent has done so."""
        if not (path / "config.json").is_file():
            raise ConfigError(f"reward_model: path={path} holds no config.json: name a Hugging Face model folder")
        options: dict[str, Any] = {"path": str(path), "device": self.device, "dtype": self.dtype}
        options |= {"batch": self.batch, "max_tokens": self.max_tokens}
        digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]
        variable = f"SLIPSTREAM_REWARD_MODEL_{digest}"  # workers inherit it
        if variable not in os.environ:
            self._process = ModelProcess(options, variable)
        return os.environ[variable]


class ModelProcess:
    """A process that serves a model at a loopback address, and is started again when it ends."""

    def __init__(self, options: dict[str, Any], variable: str) -> None:
        """Waits until the model is loaded; the environment variable then holds the address.

        Raises: ConfigError if the model can't be loaded.
        """
        self._options, self._variable = options, variable
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._process = self._start()
        fingerprint = self._loaded()
        if fingerprint is None:
            self._end()
            self._listener.close()
            raise ConfigError(f"reward_model: the model in {options['path']} can't be loaded; its error is in the log")
        log.info("reward model loaded", path=options["path"], fingerprint=fingerprint, process=self._process.pid)
        os.environ[variable] = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._restart, name="reward model", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the process."""
        self._closing.set()
        os.environ.pop(self._variable, None)
        self._process.kill()
        self._thread.join()
        self._end()
        self._listener.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        arguments = [str(self._listener.fileno()), str(os.getpid()), json.dumps(self._options)]
        # Requests wait in the listening socket while the model is loaded.
        return subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, *arguments], stdout=subprocess.PIPE, pass_fds=(self._listener.fileno(),)
        )

    def _loaded(self) -> str | None:
        """The fingerprint once the model is loaded; None when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return str(json.loads(line)["fingerprint"]) if line else None

    def _restart(self) -> None:
        while True:
            self._process.wait()
            if self._closing.wait(_RESTART_S):
                return
            log.warning("reward model ended, starts again", exit_code=self._process.returncode)
            self._end()
            self._process = self._start()
            if self._closing.is_set():
                self._process.kill()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
