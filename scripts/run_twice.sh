#!/usr/bin/env bash
# run_twice.sh PYTHON ARGUMENTS...: pytest with these arguments. What fails runs once more at the end, by itself: a shared
# machine may stand still for a moment. Both runs are printed; the exit status is that of the last one.
set -uo pipefail

python=$1
shift
FAILED=1

"$python" -m pytest "$@"
status=$?
((status == FAILED)) || exit "$status"
echo "what failed runs once more, by itself"
exec "$python" -m pytest "$@" -n 0 --last-failed --last-failed-no-failures none
