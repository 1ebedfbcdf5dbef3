#!/bin/sh
# The paper's shape on GPUs of one host: Qwen2.5-VL-32B with random weights, TP_train 8, TP_rollout 4 (two replicas). Or, on four
# GPUs, half of its layers under TP_train 4 and TP_rollout 2: a GPU holds and computes as much of the language model.
#   sh benchmarks/gpu/paper.sh BUNDLE OUT [--gpus 8|4] [--device cpu] [PART...]
# BUNDLE as in run.sh. Parts, in this order: facts data publish schedules (serial and overlap, on one mesh) tp (rollout as wide as
# training), and on demand dp (mesh.data_parallel). All of them need some 20 minutes on eight GPUs; where a command may run for ten, give the parts of one call each,
# within the same machine:
#   facts data publish | schedules | tp
# What lies in $ROLLPLEX_WORK is used again, with the same OUT nothing is overwritten but the parts that run. $ROLLPLEX_LIMIT_S
# bounds one call (default 570 s). --device cpu tries every part with gloo ranks of each role and a tiny model (minutes).
set -eu
[ $# -ge 2 ] || { sed -n '2,11s/^# //p' "$0" >&2; exit 2; }
bundle=$1 out=$2 device=cuda gpus=8
shift 2
while :; do
    case ${1:-} in
    --gpus) gpus=$2 ;;
    --device) device=$2 ;;
    *) break ;;
    esac
    shift 2
done
parts=${*:-facts data publish schedules tp}
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/benchmarks/gpu/environment.sh"
ROLLPLEX_LIMIT_S=${ROLLPLEX_LIMIT_S:-570}
. "$root/benchmarks/gpu/parts.sh"
cd "$root"
half=$((gpus / 2))
pairs="$gpus:$half $gpus:$gpus"
case $gpus in
8) shape=32b host=500 grown=440 ;;
4) shape=32b-half host=300 grown=300 ;;
*) echo "--gpus: 8 or 4, not $gpus" >&2; exit 2 ;;
esac

if [ "$device" = cpu ]; then
    shape=tiny8 prompt=160 groups=2 policy=
    # 24 processes on a few cores take minutes to start, and in turn.
    job="--samples 2 --response-tokens 6 --max-response-tokens 12 --timeout 1500 --set mesh.collective_timeout_s=600"
    wanted publish && part publish 300 "$python" benchmarks/publish/publish.py --hidden 2048 --pairs $pairs --repeats 1 --out "$out/publish.json"
else
    prompt=8192 groups=${ROLLPLEX_GROUPS:-16} policy=@mps-priority
    job="--samples 8 --response-tokens 700 --max-response-tokens 2048 --timeout 420 --host-gib ${ROLLPLEX_HOST_GIB:-$host}"
    job="$job --hbm-gib ${ROLLPLEX_HBM_GIB:-80} --set mesh.collective_timeout_s=400"
    if wanted facts && [ "${ROLLPLEX_GROW_GIB:-$grown}" -gt 0 ]; then
        "$python" benchmarks/gpu/grow_memory.py "${ROLLPLEX_GROW_GIB:-$grown}" >"$out/memory.txt" 2>&1 &
        grower=$!
    fi
    wanted facts && part facts 40 sh -c 'nvidia-smi topo -m; nvidia-smi --query-gpu=index,name,memory.total --format=csv; env | grep -E "^(NCCL|TORCH|NVSHMEM|CUDA)"; df -h /tmp /dev/shm; '"$python"' benchmarks/gpu/check.py'
fi
job="$job ${ROLLPLEX_EXTRA:-}"
job="--shape $shape --prompt-tokens $prompt --groups $groups --iterations 2 --kl-coef 0.04 --gpus $gpus --train-tp $gpus --rollout-tp $half $job"
wanted data && part data 420 "$python" -m rollplex.bench --out "$work" --shape $shape --prompt-tokens $prompt --groups $groups --seed 0 --device $device
if [ "$device" = cuda ]; then
    wanted publish && part publish 120 "$python" benchmarks/publish/publish.py --device cuda --shape $shape --pairs $pairs --repeats 5 --out "$out/publish.json"
fi
if [ -n "${grower:-}" ]; then
    wait "$grower" || true
    cat "$out/memory.txt"
fi
LINES_KEPT=90
wanted schedules && bench schedules 570 $job --arms "serial$policy,overlap$policy"
wanted tp && bench tp 540 $job --arms "overlap$policy:${gpus}x$gpus"
wanted dp && bench dp 540 $job --arms "overlap$policy:${gpus}x${half}dp"
exit 0
