#!/bin/sh
# Sets up a virtual environment with the oldest versions that pyproject.toml admits, for `make test-oldest`:
#
#   sh tests/packaging/setup_oldest.sh FOLDER
#
# A second call with the same folder installs nothing. PYTHON names the interpreter (3.11 or later).
set -eu

[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
venv=$1
project=$(cd "$(dirname "$0")/../../" && pwd)/pyproject.toml
recipe=$(cat "$0" "$project" | cksum)
stamp=$venv/.oldest
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"${PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/python" - "$project" > "$venv/requirements.txt" <<'PYTHON'
import re, sys, tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
tests = r"pytest|hypothesis|psutil|cryptography"  # of `dev`, what the chosen tests import
extras = project["optional-dependencies"]
for each in [*project["dependencies"], *extras["lora"], *(one for one in extras["dev"] if re.match(tests, one))]:
    print(each.partition(",")[0].replace(">=", "=="))
PYTHON
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$venv/requirements.txt"
"$venv/bin/python" -W ignore -c 'import torch, transformers'
echo "$recipe" > "$stamp"
