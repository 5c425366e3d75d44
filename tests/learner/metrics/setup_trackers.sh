#!/bin/sh
# Sets up a virtual environment with the packages of all trackers (0.9 GB) on top of the project's own:
#
#   sh tests/learner/metrics/setup_trackers.sh FOLDER
#
# A second call with the same folder installs nothing. PYTHON names the project's interpreter.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
venv=$1
recipe=$(cksum < "$0")
stamp=$venv/.trackers
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"$PYTHON" -m venv "$venv"
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# With the .pth files that are there, by which the project itself is found.
project=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$project')" > "$packages/project.pth"
# Some of them want older versions of what the project has; both are there, and the environment is for tests alone.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    swanlab==0.10.3 wandb==0.31.0 mlflow==3.17.2 tensorboardX==2.6.5 trackio==0.43.0 2>&1 | grep -v requires || true
"$venv/bin/python" -W ignore -c 'import swanlab, wandb, mlflow, tensorboardX, trackio'
echo "$recipe" > "$stamp"
