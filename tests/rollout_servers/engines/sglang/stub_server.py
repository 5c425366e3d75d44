"""SGLang's server without SGLang: `PYTHON stub_server.py -m sglang.launch_server --port PORT …`.

Streams never end by themselves; a request that is aborted while generation is paused never ends at all.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

PIECE = {"finish_reason": None, "output_token_logprobs": [[-0.5, 3, None]], "output_token_logprobs_length": 1}
END = {
    "finish_reason": {"type": "abort", "message": "Aborted"},
    "output_token_logprobs_length": 1,
    "weight_versions": [{"version": "0", "start": 0, "end": 1}],
}


class Stub(BaseHTTPRequestHandler):
    """What the engine asks of SGLang; of each answer it keeps the length of the prompt, and the adapter."""

    hangs = paused = False
    heard: ClassVar[list[str]] = []
    generated: ClassVar[list[tuple[int, str | None]]] = []
    aborted: ClassVar[dict[str, threading.Event]] = {}

    def do_GET(self) -> None:
        """`/v1/loads` at any time; `/server_info`, which tells what was posted too, unless its scheduler hangs."""
        if self.path == "/v1/loads":
            self.answer(200, {"loads": [{"token_usage": 0.25}, {"token_usage": 0.5}]})
            return
        if self.hangs:
            threading.Event().wait()
        longest = int(os.environ.get("STUB_LONGEST", "4096"))
        told = {"heard": self.heard, "generated": self.generated}
        self.answer(200, {"max_req_input_len": longest, "tp_size": 1, **told})

    def do_POST(self) -> None:
        """Streams, aborts, updates."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/generate":
            self.generated.append((len(body["input_ids"]), body.get("lora_path")))
            self.stream(self.aborted.setdefault(body["rid"], threading.Event()))
            return
        self.heard.append(self.path)
        Stub.hangs = self.path == "/hangs_from_now_on"
        if self.path == "/pause_generation":
            Stub.paused = True
        elif self.path == "/continue_generation":
            Stub.paused = False
        elif self.path == "/abort_request" and not self.paused and "rid" in body:
            self.aborted[body["rid"]].set()
        elif self.path == "/update_weights_from_disk":
            time.sleep(float(os.environ.get("STUB_UPDATE_S", "0")))
        elif self.path == os.environ.get("STUB_NEVER_ANSWERS"):
            threading.Event().wait()
        refused = os.environ.get("STUB_REFUSES") == self.path
        self.answer(400 if refused else 200, {"success": not refused, "message": "half of it is bad"})

    def stream(self, aborted: threading.Event) -> None:
        """One token, and the end once it is aborted."""
        self.send_response(200)
        self.end_headers()
        for meta in (PIECE, END):
            self.wfile.write(f"data: {json.dumps({'meta_info': meta})}\n\n".encode())
            self.wfile.flush()
            aborted.wait()
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, status: int, body: object) -> None:
        """Sends a whole answer."""
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Stays silent."""


def main() -> None:
    """Has SGLang installed, and serves."""
    if "-c" not in sys.argv:
        port = int(sys.argv[sys.argv.index("--port") + 1])
        ThreadingHTTPServer(("127.0.0.1", port), Stub).serve_forever()


if __name__ == "__main__":
    main()
