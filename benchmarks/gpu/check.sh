#!/usr/bin/env bash
# On a machine with one GPU, in the repository's root: what slipstream does there, in under 8 minutes. Results as JSON
# under $OUT (default: gpu_out). Each part has its own limit, and one that fails ends no other. PARTS="env demo ..."
# chooses. GPU_CHECK_TINY=1: the same on a CPU, with tiny shapes. GPU_CHECK_PYTHON, _SITE, _WORK, _SECONDS, _INSTALLED:
# interpreter, folder for the wheels, work folder, limit of all, and not to install the wheels.
set -uo pipefail
root=$PWD
export OUT=${OUT:-$root/gpu_out} GPU_CHECK_TINY=${GPU_CHECK_TINY:-}
export GPU_CHECK_WORK=${GPU_CHECK_WORK:-/tmp/gpu_check}
python=${GPU_CHECK_PYTHON:-python3} site=${GPU_CHECK_SITE:-/tmp/site} work=$GPU_CHECK_WORK
total=${GPU_CHECK_SECONDS:-470}
[ -f benchmarks/gpu/check.sh ] || { echo "run it in the repository's root" >&2; exit 2; }
rm -rf "$work/runs"
mkdir -p "$OUT" "$work"
log=$OUT/log.txt
: >"$log"

if [ -z "${GPU_CHECK_INSTALLED:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" \
        .whl/*.whl >>"$log" 2>&1 || { tail -5 "$log"; exit 1; }
fi
# slipstream's packages are the folders of the checkout; its version is read from metadata, which a checkout lacks.
links=$work/links
mkdir -p "$links/slipstream" "$links/slipstream-0.1.0.dist-info"
for package in learner rollout_servers buffer rewards env configs tools models sandbox; do
    ln -sfn "$root/$package" "$links/slipstream/$package"
done
printf 'Metadata-Version: 2.1\nName: slipstream\nVersion: 0.1.0\n' >"$links/slipstream-0.1.0.dist-info/METADATA"
export PYTHONPATH=$links:$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false NCCL_SOCKET_IFNAME=lo
# Caches grow by a token at a time: without this, freed blocks of all sizes would stay reserved, in two processes.
export PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
check() { "$python" -m benchmarks.gpu "$@"; }
export -f check
export python

part() { # name, seconds, command...
    local name=$1 limit=$2 began=$SECONDS left=$((total - SECONDS)) code
    shift 2
    case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
    [ "$left" -lt "$limit" ] && limit=$left
    [ "$limit" -lt 8 ] && { echo "== $name: skipped, no time left" | tee -a "$log"; return; }
    echo "== $name (at most $limit s)" | tee -a "$log"
    timeout --kill-after=15 "$limit" bash -c "$*" >"$work/$name.log" 2>&1
    code=$?
    cat "$work/$name.log" >>"$log"
    tail -n 14 "$work/$name.log" | cut -c1-180
    echo "== $name: rc $code, $((SECONDS - began)) s" | tee -a "$log"
}

up() { # name, overrides of slipstream up...
    local name=$1
    shift
    "$python" -m slipstream.tools.cli up "$root/configs/demo.yaml" --plain --fresh run.name="$name" run.dir="$work/runs" \
        rollout.engine.name=hf "$@"
}
export -f up
export work root

if [ -n "$GPU_CHECK_TINY" ]; then
    tokens=(64 128 256 512)
    pipeline="learner.steps=4 learner.groups_per_step=4 rollout.sampling.max_tokens=16 rollout.engine.max_model_len=64"
    pipeline+=" rollout.engine.max_sequences=32 rollout.groups_in_flight=8 learner.token_budget=512 model.dtype=float32"
    scale=4 workers=2
else
    tokens=(2048 8192 16384 65536)
    pipeline="learner.steps=16 learner.groups_per_step=16 rollout.sampling.max_tokens=128"
    pipeline+=" rollout.engine.max_model_len=256 rollout.engine.max_sequences=256 rollout.groups_in_flight=32"
    pipeline+=" learner.token_budget=8192 model.dtype=bfloat16 learner.activation_checkpointing=selective"
    scale=1 workers=4
fi

part env $((40 * scale)) check env
part demo $((75 * scale)) up demo learner.steps=40
[ -d "$work/runs/demo" ] && check summary demo  # also of a run that was cut off
pipeline+=" model.build=null model.path=$work/model rollout.engine.kv_cache_bytes=null weights.publish_every_steps=1"
pipeline+=" eval.every_steps=1000 eval.tasks=0 learner.checkpoint.every_steps=1000"
pipeline+=" learner.optimizer.lr=1e-6 learner.optimizer.warmup_steps=0"
part pipeline $((130 * scale)) "check model && up pipeline weights.transport=ipc $pipeline"
[ -d "$work/runs/pipeline" ] && check summary pipeline
# Shape, activation checkpointing, rank of adapters, lengths by their value.
part learner_small $((55 * scale)) check steps Qwen3-0.6B selective 0 ${tokens[2]} ${tokens[3]} ${tokens[1]} ${tokens[0]}
part learner_large $((50 * scale)) check steps Qwen3-1.7B selective 0 ${tokens[1]} ${tokens[2]} ${tokens[0]}
part pipeline_shm $((70 * scale)) "up pipeline_shm weights.transport=shm $pipeline learner.steps=8"
[ -d "$work/runs/pipeline_shm" ] && check summary pipeline_shm && check updates
part head $((30 * scale)) check head
part attention $((35 * scale)) check attention
part learner_lora $((65 * scale)) check steps Qwen3-4B full 16 ${tokens[2]} ${tokens[1]} ${tokens[0]} ${tokens[3]}
part parity $((40 * scale)) check parity
part lengths $((60 * scale)) check lengths
part learner_long $((45 * scale)) check steps Qwen3-1.7B full 0 ${tokens[3]}
# The engine's tests find the GPU by themselves.
[ -n "$GPU_CHECK_TINY" ] ||
    part memory 40 "$python -m pytest -q -p no:cacheprovider -m gpu tests/models/test_device_memory.py"
part tests $((60 * scale)) "$python -m pytest -q -p no:cacheprovider -n $workers --dist loadfile \
    tests/rollout_servers/engines/test_hf.py tests/contract/test_engine.py -k hf"
check report
ls -la "$OUT"
