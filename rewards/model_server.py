"""A sequence classification model behind HTTP, `POST /classify`: `python -m slipstream.rewards.model_server`.

A process of its own, because rewards never import torch. The shapes of requests and replies are those of vLLM's
endpoint of the same name.
"""

import json
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import torch
import xxhash
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from slipstream.configs.runtime.errors import format_error
from slipstream.configs.runtime.processes import die_with

_PIECE_BYTES: Final = 1 << 24


class Text(NamedTuple):
    """A text, and whether the tokenizer adds its special tokens."""

    text: str
    special_tokens: bool


class Model:
    """Logits of texts, in batches of what waits.

    Attributes:
        fingerprint: of the weights' bytes, 16 hexadecimal digits.
    """

    def __init__(self, path: str, *, device: str, dtype: str, batch: int, max_tokens: int) -> None:
        """Loads the model; longer texts lose their beginning."""
        self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
        model.config.pad_token_id = self._tokenizer.pad_token_id  # without it transformers refuses batches
        self._model = model.to(self._device).eval()
        self._batch, self._max_tokens = batch, max_tokens
        self._waiting: SimpleQueue[tuple[Text, Future[list[float]]]] = SimpleQueue()
        self.fingerprint = _fingerprint(Path(path))

    def submit(self, request: dict[str, Any]) -> list[Future[list[float]]]:
        """Queues the texts of a request: `input`, or the conversation `messages`."""
        if "messages" in request:
            rendered = str(self._tokenizer.apply_chat_template(request["messages"], tokenize=False))
            texts = [Text(rendered, special_tokens=False)]  # the template has written them
        else:
            given = request["input"]
            texts = [Text(each, special_tokens=True) for each in ([given] if isinstance(given, str) else given)]
        futures = [Future[list[float]]() for _ in texts]
        for text, future in zip(texts, futures, strict=True):
            self._waiting.put((text, future))
        return futures

    def run(self) -> None:
        """Computes the logits of what is queued, for ever."""
        while True:
            waiting = [self._waiting.get()]
            while len(waiting) < self._batch:
                try:
                    waiting.append(self._waiting.get_nowait())
                except Empty:
                    break
            try:
                logits = self._logits([text for text, _ in waiting])
            except Exception as error:  # noqa: BLE001  (torch and transformers raise anything; each request has it)
                for _, future in waiting:
                    future.set_exception(error)
            else:
                for (_, future), values in zip(waiting, logits, strict=True):
                    future.set_result(values)

    @torch.inference_mode()
    def _logits(self, texts: list[Text]) -> list[list[float]]:
        sequences = [
            self._tokenizer(
                each.text, add_special_tokens=each.special_tokens, truncation=True, max_length=self._max_tokens
            ).input_ids
            for each in texts
        ]
        inputs = self._tokenizer.pad({"input_ids": sequences}, return_tensors="pt").to(self._device)
        logits = self._model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        values: list[list[float]] = logits.float().tolist()
        return values


def _fingerprint(folder: Path) -> str:
    state = xxhash.xxh3_64()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                state.update(piece)
    return state.hexdigest()


def _handler(model: Model, name: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            try:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                rows = [future.result() for future in model.submit(request)]
                activate = request.get("use_activation", True)
                data = [
                    {"index": index, "probs": _activated(row) if activate else row} for index, row in enumerate(rows)
                ]
                status, reply = 200, {"model": name, "fingerprint": model.fingerprint, "data": data}
            except Exception as error:  # noqa: BLE001  (templates of a tokenizer raise anything)
                status, reply = 400, {"error": format_error(error)}
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    return Handler


def _activated(logits: list[float]) -> list[float]:
    values = torch.tensor(logits)
    return list((torch.sigmoid(values) if len(logits) == 1 else torch.softmax(values, 0)).tolist())


def main() -> None:
    """Serves on the listening socket of the file number in the first argument; the second holds the options as JSON."""
    number, parent, options = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model = Model(**options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(model, options["path"]), bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=number)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(json.dumps({"fingerprint": model.fingerprint}) + "\n")
    sys.stdout.flush()
    model.run()


if __name__ == "__main__":
    main()
