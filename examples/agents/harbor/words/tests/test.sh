#!/bin/sh
printf 'Banana\napple\nfig\npear\n' > /tmp/expected
if cmp -s /tmp/expected /app/words.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
