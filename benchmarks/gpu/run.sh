#!/bin/sh
# rollplex bench on a GPU node without a network, from a source tree: nothing is installed.
#   sh benchmarks/gpu/run.sh BUNDLE [options of rollplex bench]
# BUNDLE is the folder with unpack.sh and part-* (and extra-*), packages that the node lacks; "-" where it lacks none. They are
# unpacked once, into $ROLLPLEX_SITE (default: a folder for temporary files). $PYTHON is the interpreter (default python3).
set -eu
[ $# -ge 1 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
bundle=$1
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/benchmarks/gpu/environment.sh"
"$python" "$root/benchmarks/gpu/check.py" "$@"
exec "$python" -m rollplex_client.cli bench "$@"
