#!/bin/sh
# Sets up a virtual environment in which SGLang's real server runs without a GPU: slowly, and for checks alone.
#
#   sh tests/rollout_servers/engines/sglang/cpu/setup_cpu.sh FOLDER
#   SGLANG_USE_CPU_ENGINE=1 FOLDER/bin/python -m sglang.launch_server --device cpu --attention-backend torch_native \
#       --skip-tokenizer-init --dtype float32 --model-path MODEL --host 127.0.0.1 --port PORT
#
# A second call with the same folder installs nothing. PYTHON names the interpreter (3.11 or later).
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
recipe=$(cat "$0" "$here"/stubs/*/__init__.py | cksum)
stamp=$venv/.sglang-cpu
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Of what SGLang requires, the CUDA kernels can't be installed everywhere: take what its server imports without them.
pip torch==2.13.0 transformers==5.19.0 triton \
    aiohttp compressed-tensors==0.18.0 dill distro einops fastapi gguf IPython jsonschema llguidance msgspec numpy \
    openai==2.8.0 orjson packaging partial_json_parser pillow 'prometheus-client>=0.20.0' psutil pybase64 pydantic \
    python-multipart 'pyzmq>=25.1.2' regex requests scipy sentencepiece setproctitle soundfile==0.13.1 tiktoken tqdm \
    'uvicorn>=0.51' uvloop watchfiles xxhash zstandard
pip --no-deps sglang==0.5.23 xgrammar==0.2.7 apache-tvm-ffi==0.1.11
cp -R "$here"/stubs/* "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -W ignore -c '
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.qwen3'
echo "$recipe" > "$stamp"
