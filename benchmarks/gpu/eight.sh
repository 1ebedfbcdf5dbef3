#!/bin/sh
# The paper's shape on eight GPUs of one host: Qwen2.5-VL-32B with random weights, TP_train 8, TP_rollout 4 (two replicas).
#   sh benchmarks/gpu/eight.sh BUNDLE OUT [--device cpu] [PART...]
# BUNDLE as in run.sh. Parts, in this order: facts data publish overlap serial tp8 (rollout at TP 8). All of them need some 25
# minutes; where a command may run for ten, give the parts of one call each, within the same machine:
#   facts data publish | overlap | serial | tp8
# What lies in $ROLLPLEX_WORK is used again, with the same OUT nothing is overwritten but the parts that run. $ROLLPLEX_LIMIT_S
# bounds one call (default 570 s). --device cpu tries every part with eight gloo ranks of each role and a tiny model (minutes).
set -eu
[ $# -ge 2 ] || { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
bundle=$1 out=$2 device=cuda
shift 2
[ "${1:-}" = --device ] && { device=$2; shift 2; }
parts=${*:-facts data publish overlap serial tp8}
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/benchmarks/gpu/environment.sh"
ROLLPLEX_LIMIT_S=${ROLLPLEX_LIMIT_S:-570}
. "$root/benchmarks/gpu/parts.sh"
cd "$root"

if [ "$device" = cpu ]; then
    shape=tiny8 prompt=160 groups=2
    # 24 processes on a few cores take minutes to start, and in turn.
    job="--samples 2 --response-tokens 6 --max-response-tokens 12 --timeout 1500 --set mesh.collective_timeout_s=600"
    wanted publish && part publish 300 "$python" benchmarks/publish/publish.py --hidden 2048 --pairs 8:4 --repeats 1 --out "$out/publish.json"
else
    shape=32b prompt=8192 groups=${ROLLPLEX_GROUPS:-16}
    job="--samples 8 --response-tokens 700 --max-response-tokens 2048 --timeout 420 --host-gib ${ROLLPLEX_HOST_GIB:-500}"
    job="$job --hbm-gib ${ROLLPLEX_HBM_GIB:-80} --set mesh.collective_timeout_s=400"
    if wanted facts && [ "${ROLLPLEX_GROW_GIB:-440}" -gt 0 ]; then
        "$python" benchmarks/gpu/grow_memory.py "${ROLLPLEX_GROW_GIB:-440}" >"$out/memory.txt" 2>&1 &
        grower=$!
    fi
    wanted facts && part facts 40 sh -c 'nvidia-smi topo -m; nvidia-smi --query-gpu=index,name,memory.total --format=csv; env | grep -E "^(NCCL|TORCH|NVSHMEM|CUDA)"; df -h /tmp /dev/shm; '"$python"' benchmarks/gpu/check.py'
fi
job="$job ${ROLLPLEX_EXTRA:-}"
job="--shape $shape --prompt-tokens $prompt --groups $groups --iterations 2 --kl-coef 0.04 --gpus 8 --train-tp 8 --rollout-tp 4 $job"
wanted data && part data 420 "$python" -m rollplex.bench --out "$work" --shape $shape --prompt-tokens $prompt --groups $groups --seed 0 --device $device
if [ "$device" = cuda ]; then
    wanted publish && part publish 120 "$python" benchmarks/publish/publish.py --device cuda --shape 32b --pairs 8:4 8:8 --repeats 5 --out "$out/publish.json"
fi
if [ -n "${grower:-}" ]; then
    wait "$grower" || true
    cat "$out/memory.txt"
fi
LINES_KEPT=90
wanted overlap && bench overlap 540 $job --arms overlap
wanted serial && bench serial 540 $job --arms serial
wanted tp8 && bench tp8 540 $job --arms overlap:8x8
exit 0
