#!/bin/sh
# Sets up a virtual environment with TRL, for `make bench-demo`; a second call with the same folder installs nothing.
#
#   sh benchmarks/setup_trl.sh FOLDER
#
# PYTHON names the interpreter. torch and transformers have the versions of constraints.txt.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
recipe=$(cat "$0" "$here/../constraints.txt" | cksum)
stamp=$venv/.trl
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$here/../constraints.txt" torch trl==1.16.0
echo "$recipe" > "$stamp"
