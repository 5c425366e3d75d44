#!/bin/sh
LC_ALL=C sort -u -o /app/words.txt /app/words.txt
