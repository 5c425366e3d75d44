#!/bin/bash
# Half of the reward for each right line.
right=0
grep -qx 'north 321' "$DATA/totals.txt" && right=$((right + 1))
grep -qx 'south 11' "$DATA/totals.txt" && right=$((right + 1))
awk -v right=$right 'BEGIN { printf "{\"reward\": %.1f, \"lines\": %d}\n", right / 2, right }' > /logs/verifier/reward.json
