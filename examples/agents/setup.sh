#!/bin/sh
# Sets up a Python environment of its own for a harness, in .agents; a second call installs nothing:
#
#   sh examples/agents/setup.sh smolagents|mini-swe-agent|verifiers
#
# PYTHON names the interpreter.
set -eu

case ${1:-} in
smolagents) packages="smolagents[openai]==1.26.0" ;;
mini-swe-agent) packages="mini-swe-agent==2.4.6" ;;
# The last release with both of its APIs: load_environment, and the tasksets of verifiers.v1.
verifiers) packages="verifiers==0.3.1" ;;
*) echo "usage: $0 smolagents|mini-swe-agent|verifiers" >&2 && exit 2 ;;
esac
venv=.agents/$1
[ "$(cat "$venv/.installed" 2>/dev/null)" = "$packages" ] && exit 0

"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$packages"
echo "$packages" > "$venv/.installed"
