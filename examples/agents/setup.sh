#!/bin/sh
# A Python environment of its own for a harness: sh examples/agents/setup.sh smolagents | mini-swe-agent [FOLDER]
set -e
case "$1" in
smolagents) packages="smolagents[openai]==1.26.0" ;;
mini-swe-agent) packages="mini-swe-agent==2.4.6" ;;
*) echo "usage: setup.sh smolagents | mini-swe-agent [FOLDER]" >&2; exit 2 ;;
esac
folder=${2:-.agents/$1}
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check "$packages"
echo "$folder/bin/python"
