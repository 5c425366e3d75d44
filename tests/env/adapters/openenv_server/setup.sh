#!/bin/sh
# Sets up a virtual environment with OpenEnv's real server, whose requirements exclude those of vLLM:
#
#   sh tests/env/adapters/openenv_server/setup.sh FOLDER
#   FOLDER/bin/python tests/env/adapters/openenv_server/server.py PORT SESSIONS
#
# A second call with the same folder installs nothing. PYTHON names the interpreter (3.11 or later).
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
venv=$1
recipe=$(cksum < "$0")
stamp=$venv/.openenv
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Of what it requires, take what the server imports: without its web pages and its command line, 473 MB become 155.
pip 'fastapi>=0.104' 'fastmcp>=3' 'uvicorn[standard]>=0.24' 'websockets>=15' requests
pip --no-deps openenv-core==0.3.0

"$venv/bin/python" -W ignore -c 'import openenv.core.env_server.http_server'
echo "$recipe" > "$stamp"
