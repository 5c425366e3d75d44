#!/bin/sh
# Each harness, in an environment of its own, learns the lookup task; from the checkout, in some minutes each:
#
#   sh examples/agents/check.sh [openai] [smolagents] [mini-swe-agent] [verifiers]
#
# The runs are runs/lookup_NAME; it fails unless 95% of the reward is earned on held-out tasks, failed ones as 0.
set -eu
examples=examples/agents
bin=${BIN:-.venv/bin}
paths=$examples${PYTHONPATH:+:$PYTHONPATH}
[ $# -gt 0 ] || set -- openai smolagents mini-swe-agent verifiers

"$bin/python" $examples/formats.py data/formats.jsonl
[ -e runs/formats/model ] || "$bin/slipstream" up $examples/formats.yaml --plain

from_outside() { # NAME SCRIPT: the harness ends with the run
    sh $examples/setup.sh "$1"
    "$bin/slipstream" up $examples/harness.yaml --plain --fresh "run.name=lookup_$1" &
    run=$!
    trap 'kill -INT $run' INT TERM
    ".agents/$1/bin/python" "$examples/$2" "runs/lookup_$1" 2> "runs/lookup_$1.log" || true
    wait $run
}

for name in "$@"; do
    case $name in
    openai) PYTHONPATH=$paths "$bin/slipstream" up $examples/lookup.yaml --plain --fresh "run.name=lookup_$name" ;;
    smolagents) from_outside "$name" smol.py ;;
    mini-swe-agent) from_outside "$name" mini.py ;;
    verifiers)
        sh $examples/setup.sh verifiers
        PYTHONPATH=$paths "$bin/slipstream" up $examples/lookup_verifiers.yaml --plain --fresh
        ;;
    *) echo "there is no harness $name" >&2 && exit 2 ;;
    esac
    "$bin/python" - "$name" <<'EOF'
import json, sys
with open(f"runs/lookup_{sys.argv[1]}/summary.json", encoding="utf-8") as file:
    summary = json.load(file)
score = summary["eval_lower_bound"]
print(f"{sys.argv[1]}: {summary['eval_score_first']:.3f} of the reward before, {score:.3f} after {summary['steps']} steps")
sys.exit(score < 0.95)
EOF
done
