#!/bin/sh
# What one GPU is needed for, in one go; results lie in OUT as they come, status.txt says how parts ended.
#   sh benchmarks/gpu/one.sh BUNDLE OUT [--device cpu] [PART...]
# BUNDLE as in run.sh. Parts, in this order: facts model speed 3b 3b-passes short short-passes tests (all of them by default), and on
# demand 7b 7b-passes. model: the model's tests; tests: those of trainer, residency and sharing. `-passes`: the same job with two
# groups in a pass (ADR 20), short: four; `short`: prompts of 1k, responses of 512 tokens. $ROLLPLEX_LIMIT_S bounds the whole
# (default 1600 s; longer than a node's commands may last: go.sh), $ROLLPLEX_HOST_GIB (85; 7b: 110) what slabs may take of the host.
# --device cpu tries every part with a tiny model.
set -eu
[ $# -ge 2 ] || { sed -n '2,9s/^# //p' "$0" >&2; exit 2; }
bundle=$1 out=$2 device=cuda
shift 2
[ "${1:-}" = --device ] && { device=$2; shift 2; }
parts=${*:-facts model speed 3b 3b-passes short short-passes tests}
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/benchmarks/gpu/environment.sh"
ROLLPLEX_LIMIT_S=${ROLLPLEX_LIMIT_S:-1600}
. "$root/benchmarks/gpu/parts.sh"
cd "$root"
speed="$python benchmarks/kernels/model_speed.py --model Qwen2.5-VL-3B"
# serial as overlap shares its GPU, so that both are measured on one mesh.
arms=overlap,serial host=${ROLLPLEX_HOST_GIB:-85} two="--micro-batch-samples 16" four="--micro-batch-samples 32"
if [ "$device" = cpu ]; then
    job="--shape tiny --prompt-tokens 160 --groups 4 --samples 2 --response-tokens 6 --max-response-tokens 12 --iterations 2"
    three=$job short=$job seven=$job two="--micro-batch-samples 4" four="--micro-batch-samples 8"
    speed="$speed --layers 1 --samples 2 --response-tokens 16 --max-response-tokens 32 --repeats 1" prompts=256
    facts="$python benchmarks/gpu/check.py --device cpu" marked="not gpu"
else
    arms=overlap@mps-priority,serial@mps-priority
    three="--shape 3b --prompt-tokens 4096 --groups 16 --iterations 4 --host-gib $host --timeout 200"
    short="--shape 3b --prompt-tokens 1024 --response-tokens 512 --groups 16 --iterations 3 --host-gib $host --timeout 200"
    seven="--shape 7b --prompt-tokens 4096 --groups 16 --iterations 3 --host-gib ${ROLLPLEX_HOST_GIB:-110} --timeout 300"
    prompts="1024 4096"
    facts="nvidia-smi" marked=gpu
fi
LINES_KEPT=12
wanted facts && part facts 60 sh -c "$facts"
tests="$python -m pytest -rA -p no:cacheprovider"
wanted model && part model 180 $tests -m "$marked" tests/unit/model
for tokens in $prompts; do
    wanted speed && part "speed-$tokens" 90 $speed --prompt-tokens "$tokens" --groups-per-pass 1 2 4 --out "$out/speed-$tokens.json"
done
LINES_KEPT=90
wanted 3b && bench 3b 400 $three --kl-coef 0.04 --arms "$arms"
wanted 3b-passes && bench 3b-passes 300 $three --kl-coef 0.04 --arms "$arms" $two
wanted short && bench short 240 $short --kl-coef 0.04 --arms "$arms"
wanted short-passes && bench short-passes 240 $short --kl-coef 0.04 --arms "$arms" $four
wanted tests && part tests 300 $tests -m "$marked" tests/gpu/test_gpu_trainer.py tests/gpu/test_gpu_residency.py tests/gpu/test_gpu_sharing.py
wanted 7b && bench 7b 420 $seven --kl-coef 0.04 --arms "$arms"
wanted 7b-passes && bench 7b-passes 420 $seven --kl-coef 0.04 --arms "$arms" $two
exit 0
