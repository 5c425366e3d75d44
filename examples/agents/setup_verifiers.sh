#!/bin/sh
# Sets up a virtual environment with verifiers, whose requirements exclude those of this project:
#
#   sh examples/agents/setup_verifiers.sh FOLDER
#
# A second call with the same folder installs nothing. PYTHON names the interpreter (3.11 to 3.13).
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
venv=$1
recipe=$(cksum < "$0")
stamp=$venv/.verifiers
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
# The last release with both of its APIs: load_environment, and the tasksets of verifiers.v1.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check verifiers==0.3.1
echo "$recipe" > "$stamp"
