#!/bin/sh
# Everything that two GPUs of one host are needed for, in one go; results lie in OUT as they come, status.txt says how parts ended.
#   sh benchmarks/gpu/two.sh BUNDLE OUT [--device cpu] [PART...]
# BUNDLE as in run.sh. Parts, in this order: facts peer nccl exact publish 3b 3b-tp2 3b-dp 7b 7b-dp (all of them by default), and on demand
# 3b-passes (several groups a pass, ADR 20) and rollout (the rollout contract on vLLM at TP 2). $ROLLPLEX_LIMIT_S bounds the whole
# (default 540 s): what has no time left is skipped. $ROLLPLEX_EXTRA: further options of rollplex bench; $ROLLPLEX_GROW_GIB (150; 0: not): host memory that is touched
# beforehand, on machines whose memory grows as it is used; $ROLLPLEX_HOST_GIB (220): what slabs may take of it. --device cpu tries every part with gloo ranks and a tiny model.
set -eu
[ $# -ge 2 ] || { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
bundle=$1 out=$2 device=cuda
shift 2
[ "${1:-}" = --device ] && { device=$2; shift 2; }
parts=${*:-facts peer nccl exact publish 3b 3b-tp2 3b-dp 7b 7b-dp}
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/benchmarks/gpu/environment.sh"
. "$root/benchmarks/gpu/parts.sh"
cd "$root"
tests="$python -m pytest -s -p no:cacheprovider"

if [ "$device" = cpu ]; then
    job="--shape tiny --prompt-tokens 160 --groups 2 --samples 2 --response-tokens 6 --max-response-tokens 12 --iterations 2"
    job="$job --kl-coef 0.04 --gpus 2 --train-tp 2"
    wanted facts && part facts 60 "$python" benchmarks/gpu/check.py --device cpu
    wanted nccl && part nccl 120 $tests tests/unit/engine/test_engine_all_gather.py
    wanted exact && part exact 300 $tests tests/contract/trainer/test_trainer_ranks.py -k "updates_equal and float32"
    wanted publish && part publish 120 "$python" benchmarks/publish/publish.py --hidden 256 --pairs 2:1 2:2 --repeats 1 --out "$out/publish.json"
    wanted 3b && bench 3b 500 $job --arms overlap,serial,disaggregated
    wanted 3b-tp2 && bench 3b-tp2 500 $job --arms overlap:2x2,serial:2x2
    wanted 3b-dp && bench 3b-dp 500 $job --arms overlap:2x1dp,serial:2x1dp
    wanted 3b-passes && bench 3b-passes 500 $job --arms overlap,overlap:2x1dp --micro-batch-samples 4
    exit 0
fi

# The machine's memory may grow as it is used; done while parts run that need little of it.
if [ "${ROLLPLEX_GROW_GIB:-150}" -gt 0 ]; then
    "$python" benchmarks/gpu/grow_memory.py "${ROLLPLEX_GROW_GIB:-150}" >"$out/memory.txt" 2>&1 &
    grower=$!
fi
job="--prompt-tokens 4096 --kl-coef 0.04 --iterations 3 --gpus 2 --train-tp 2 --host-gib ${ROLLPLEX_HOST_GIB:-220} --timeout 200"
job="$job ${ROLLPLEX_EXTRA:-}"
# serial as overlap shares its GPUs, so that both are measured on one mesh.
arms=serial@mps-priority,overlap@mps-priority,disaggregated
LINES_KEPT=12
wanted facts && part facts 40 sh -c 'nvidia-smi topo -m; nvidia-smi --query-gpu=index,name,memory.total --format=csv; env | grep -E "^(NCCL|TORCH|NVSHMEM|CUDA)"; df -h /tmp /dev/shm; '"$python"' benchmarks/gpu/check.py'
wanted peer && part peer 60 $tests tests/gpu/test_gpu_two.py -k slab
wanted nccl && part nccl 100 env NCCL_DEBUG=WARN $tests tests/gpu/test_gpu_two.py -k meet
wanted exact && part exact 330 $tests tests/gpu/test_gpu_two.py -k updates
wanted publish && part publish 60 "$python" benchmarks/publish/publish.py --device cuda --shape 3b 7b --pairs 2:1 2:2 --repeats 5 --out "$out/publish.json"
[ -z "${grower:-}" ] || wait "$grower" || true
[ ! -e "$out/memory.txt" ] || cat "$out/memory.txt"
LINES_KEPT=90
wanted 3b && bench 3b 480 $job --shape 3b --groups 16 --arms "${ROLLPLEX_ARMS:-$arms}"
wanted 3b-tp2 && bench 3b-tp2 260 $job --shape 3b --groups 16 --arms serial@mps-priority:2x2,overlap@mps-priority:2x2
wanted 3b-dp && bench 3b-dp 260 $job --shape 3b --groups 16 --arms overlap@mps-priority:2x1dp,serial@mps-priority:2x1dp
wanted 3b-passes && bench 3b-passes 260 $job --shape 3b --groups 16 --arms overlap@mps-priority,overlap@mps-priority:2x1dp --micro-batch-samples 32
wanted 7b && bench 7b 560 $job --shape 7b --groups 16 --arms "${ROLLPLEX_ARMS:-$arms}"
wanted 7b-dp && bench 7b-dp 300 $job --shape 7b --groups 16 --arms overlap@mps-priority:2x1dp,serial@mps-priority:2x1dp
wanted rollout && part rollout 240 $tests tests/contract/rollout/test_rollout_contract.py -k vllm-cuda-tp2
exit 0
