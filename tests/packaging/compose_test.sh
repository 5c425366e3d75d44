#!/usr/bin/env bash
# Builds the images and runs docker-compose.yml as its user would: to a few steps, with a killed process, Ctrl-C, a second
# `up` that ends the run, its results read out, and a third one that has nothing to do.
#
#   bash tests/packaging/compose_test.sh FOLDER
#
# A Docker engine that answers is used as it is. Without one, as root and with dockerd and debootstrap (Debian: docker.io,
# debootstrap), one is started with its data in FOLDER, which needs 10 GB. It needs no image registry: stand-ins are
# Debian 12 with its Python 3.11 for python:3.11-slim, and its Redis 7.0 for redis:7.4. It leaves packet filter and routing
# as they are, and builds on the host's network. Wheels in a folder PIP_FIND_LINKS are offered to the build over loopback.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd)
temporary=$(mktemp -d)
deadline_s=900

stop() {
    [ ! -e "$temporary/started" ] || docker compose down --volumes --timeout 5 >/dev/null 2>&1 || true
    for pid in "$temporary"/*.pid; do
        [ ! -e "$pid" ] || { kill "$(cat "$pid")" && tail --pid="$(cat "$pid")" -f /dev/null; } 2>/dev/null || true
    done
    rm -rf "$temporary"
}
trap stop EXIT
fail() { echo "compose-test: $*" >&2; exit 1; }
step() { echo "compose-test: $*"; }

# Waits until a command succeeds: wait_for WHAT COMMAND …
wait_for() {
    local what=$1 until=$((SECONDS + deadline_s))
    shift
    until "$@"; do
        [ $SECONDS -lt $until ] || fail "no $what within $deadline_s s"
        sleep 0.3
    done
}

start_engine() {
    [ "$(id -u)" = 0 ] && command -v dockerd >/dev/null && command -v debootstrap >/dev/null ||
        fail "no Docker engine answers; start one, or as root install docker.io and debootstrap"
    export DOCKER_HOST=unix://$temporary/docker.sock
    dockerd --data-root "$folder/docker" --exec-root "$temporary/exec" -H "$DOCKER_HOST" -p "$temporary/docker.pid" \
        --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false >"$folder/dockerd.log" 2>&1 &
    deadline_s=60 wait_for "Docker engine ($folder/dockerd.log)" eval 'docker info >/dev/null 2>&1'
    docker image inspect redis:7.4 >/dev/null 2>&1 || make_stand_ins
}

make_stand_ins() {
    step "base images from Debian"
    debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,python3-dev,ca-certificates bookworm \
        "$temporary/debian" >"$folder/debootstrap.log"
    rm -f "$temporary"/debian/usr/lib/python3.*/EXTERNALLY-MANAGED
    ln -s python3 "$temporary/debian/usr/bin/python"
    # A proxy of the host may sign with a certificate of its own.
    cp /etc/ssl/certs/ca-certificates.crt "$temporary/debian/etc/ssl/certs/"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$temporary/debian/etc/pip.conf"
    tar -C "$temporary/debian" -c . | docker import - python:3.11-slim >/dev/null
    rm -rf "$temporary/debian"
    # As the official image, it accepts other containers.
    /usr/bin/env DOCKER_BUILDKIT=1 docker compose -f - build redis <<'YAML'
services:
  redis:
    image: redis:7.4
    build:
      network: host
      dockerfile_inline: |
        FROM python:3.11-slim
        RUN apt-get update && apt-get install -y --no-install-recommends redis-server && install -d -o redis /data
        USER redis
        WORKDIR /data
        ENTRYPOINT ["sh", "-c", "exec \"$$@\" --protected-mode no", "--"]
YAML
}

# The run's records of steps.
steps() { docker compose exec -T buffer cat /runs/demo/metrics.jsonl 2>/dev/null | grep -c '"kind": "step"' || true; }
has_steps() { [ "$(steps)" -ge "$1" ]; }
is_healthy() { [ "$(docker inspect -f '{{.State.Health.Status}}' "$(docker compose ps -aq "$1")")" = healthy ]; }
was_restarted() { [ "$(docker inspect -f '{{.RestartCount}}' "$(docker compose ps -aq "$1")")" -ge 1 ]; }
exit_code() { docker inspect -f '{{.State.Status}} {{.State.ExitCode}}' "$(docker compose ps -aq "$1")"; }
require_exit() { [ "$(exit_code "$1")" = "exited $2" ] || fail "$1: $(exit_code "$1"), not 'exited $2'"; }

. .ci/compose-plugin || fail "no docker compose plugin"
export COMPOSE_PROJECT_NAME=slipstream-test SLIPSTREAM_CONFIG=configs/few_steps.yaml
docker info >/dev/null 2>&1 || start_engine

if [ -d "${PIP_FIND_LINKS:-}" ]; then
    # On the port of the last time: with another one, Docker would not find its cached layers.
    python3 -u -m http.server --bind 127.0.0.1 --directory "$PIP_FIND_LINKS" "$(cat "$folder/port" 2>/dev/null || echo 0)" \
        >"$temporary/http" 2>/dev/null &
    echo $! >"$temporary/http.pid"
    deadline_s=60 wait_for "server of wheels" grep -qs 'port [0-9]' "$temporary/http"
    sed -n 's/.* port \([0-9]*\) .*/\1/p' "$temporary/http" >"$folder/port"
    PIP_FIND_LINKS=http://127.0.0.1:$(cat "$folder/port")/
    export PIP_FIND_LINKS
fi

# A configuration of one's own, without a build.
cat >"$temporary/few_steps.yaml" <<'YAML'
extends: demo.yaml
learner: {steps: 60, checkpoint: {every_steps: 5}}
eval: {tasks: 64}
YAML
cat >"$temporary/override.yml" <<YAML
x-process: &process
  volumes: ["$temporary/few_steps.yaml:/srv/slipstream/configs/few_steps.yaml:ro"]
  build: {network: host}
services: {buffer: *process, rollout: *process, learner: *process}
YAML
chmod 755 "$temporary"
export COMPOSE_FILE=docker-compose.yml:$temporary/override.yml
touch "$temporary/started"

step "images"
docker compose build --quiet
docker compose down --volumes >/dev/null 2>&1

step "up"
docker compose up >"$folder/up-1.log" 2>&1 &
up=$!
wait_for "first step ($folder/up-1.log)" has_steps 1
docker compose exec -T rollout sh -c 'kill -9 $(cat /proc/1/task/1/children)'
wait_for "restart of the killed rollout server" was_restarted rollout
wait_for "healthy buffer" is_healthy buffer
wait_for "healthy rollout server" is_healthy rollout
[ "$(docker compose exec -T learner id -u)" != 0 ] || fail "the learner runs as root"
before=$(steps)
step "killed and restarted a rollout server by step $before of 60; Ctrl-C"
kill -INT $up
wait $up || true
require_exit buffer 0
require_exit rollout 0
require_exit redis 0
[ "$before" -ge 60 ] || require_exit learner 143

step "up again, with two rollout servers"
timeout $deadline_s docker compose up --scale rollout=2 >"$folder/up-2.log" 2>&1 || fail "see $folder/up-2.log"
for service in buffer learner; do require_exit $service 0; done
[ -z "$(docker compose ps -q --status running buffer rollout learner)" ] || fail "a process still runs"

step "results"
docker compose cp learner:/runs/demo "$temporary/demo" >/dev/null 2>&1
python3 - "$temporary/demo" <<'PYTHON'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
summary = json.loads((run / "summary.json").read_text())
assert summary["steps"] == 60, summary
assert summary["eval_coverage"] == 1.0, summary
assert (run / "model" / "model.safetensors").stat().st_size
print({key: summary[key] for key in ("steps", "policy_version", "reward_first", "reward_last", "groups")})
PYTHON
docker compose run --rm --no-deps --entrypoint slipstream learner ledger verify /runs/demo

step "up once more: the run is finished"
timeout 120 docker compose up >"$folder/up-3.log" 2>&1 || fail "see $folder/up-3.log"
for service in buffer rollout learner; do
    for id in $(docker compose ps -aq $service); do
        [ "$(docker inspect -f '{{.State.ExitCode}}' "$id")" = 0 ] || fail "$service did not end with 0"
    done
done
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep slipstream
step "passed in $SECONDS s"
