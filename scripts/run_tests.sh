#!/usr/bin/env bash
# run_tests.sh PYTHON ARGUMENTS...: pytest with these arguments, in two parts. First the tests that may run beside others,
# file by file on WORKERS processes; then those that need the machine alone (tests/conftest.py), one after the other.
# What fails in a part runs once more at its end (run_twice.sh).
#
# The exit status is that of the first part that failed twice. A part without tests fails only where neither has any.
set -uo pipefail

python=$1
shift
twice=$(dirname "${BASH_SOURCE[0]}")/run_twice.sh
FAILED=1 NO_TESTS=5

bash "$twice" "$python" --part beside -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
beside=$?
case $beside in
0 | "$FAILED" | "$NO_TESTS") ;;
*) exit "$beside" ;; # interrupted, or arguments that pytest does not take
esac
bash "$twice" "$python" --part alone "$@"
alone=$?
if ((alone == NO_TESTS)) || ((beside == FAILED)); then exit "$beside"; fi
exit "$alone"
