#!/bin/bash
for name in north south; do
    echo "$name $(awk -F, '{ sum += $2 } END { print sum }' $name.csv)"
done > totals.txt
