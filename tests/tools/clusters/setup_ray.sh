#!/bin/sh
# Sets up a virtual environment with Ray, which sees the packages of slipstream's own environment too:
#
#   sh tests/tools/clusters/setup_ray.sh FOLDER PYTHON_OF_SLIPSTREAM
#
# A second call with the same folder installs nothing. PYTHON names the interpreter (3.11 or later).
set -eu

[ $# -eq 2 ] || { echo "usage: $0 FOLDER PYTHON_OF_SLIPSTREAM" >&2; exit 2; }
venv=$1
packages=$("$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
recipe="$(cksum < "$0") $packages"
stamp=$venv/.ray-check
[ "$(cat "$stamp" 2>/dev/null)" = "$recipe" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check ray==2.60.0
# As a folder of packages with its .pth files, in which an editable installation is.
echo "import site; site.addsitedir('$packages')" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/slipstream.pth"
"$venv/bin/python" -c 'import ray, slipstream.configs'
echo "$recipe" > "$stamp"
