#!/bin/sh
# Sets up a virtual environment with moto's server, which has S3's protocol and many requirements:
#
#   sh tests/learner/setup_moto.sh FOLDER
#   FOLDER/bin/python -m moto.server -p PORT
#
# A second call with the same folder installs nothing. PYTHON names the interpreter (3.11 or later).
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
venv=$1
recipe=$(cksum < "$0")
stamp=$venv/.moto
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
# Of the extra `server`, which is for all services, take what S3 needs.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'moto[s3]==5.2.5' flask flask-cors
"$venv/bin/python" -c 'import moto.server'
echo "$recipe" > "$stamp"
