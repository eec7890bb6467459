#!/usr/bin/env bash
# run_tests.sh PYTHON ARGUMENTS...: pytest with these arguments, in two parts. First the tests that may run beside others,
# file by file on WORKERS processes; then those that need the machine alone (tests/conftest.py), one after the other.
#
# The exit status is that of the first part that failed. A part without tests fails only where neither has any.
set -uo pipefail

python=$1
shift
NO_TESTS=5

"$python" -m pytest --part beside -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
beside=$?
case $beside in
0 | 1 | "$NO_TESTS") ;;
*) exit "$beside" ;; # interrupted, or arguments that pytest does not take
esac
"$python" -m pytest --part alone "$@"
alone=$?
if ((alone == NO_TESTS)) || ((beside == 1)); then exit "$beside"; fi
exit "$alone"
