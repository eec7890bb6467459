#!/usr/bin/env bash
# Resolve the dependencies of pyproject.toml afresh for one version of SGLang, HOST or else that of pyproject.toml, and pin
# the result in constraints-HOST.txt. One file serves all Pythons: the set is resolved for the oldest, and checked to
# resolve for the others as well. Nothing is installed for good.
# PYTHON311, PYTHON312 and PYTHON313 name the interpreters where they are not on the path.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT

PYTHON311=${PYTHON311:-python3.11}
FURTHER=("${PYTHON312:-python3.12}" "${PYTHON313:-python3.13}")
WANTED=(${HOST:+--host "$HOST"})
HOST=$("$PYTHON311" "$ROOT/scripts/requirements.py" "${WANTED[@]}" | sed -n 's/^sglang==//p')
PINS=$ROOT/constraints-$HOST.txt

resolve() { # interpreter, report file, further pip arguments
    local python=$1 report=$2 venv
    shift 2
    venv=$(mktemp -d -p "$SCRATCH")
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" "$ROOT/scripts/requirements.py" --host "$HOST" >"$SCRATCH/requirements.txt"
    "$venv/bin/python" -m pip install --quiet --dry-run --ignore-installed \
        --report "$report" --requirement "$SCRATCH/requirements.txt" "$@"
}

echo "resolving for sglang $HOST and Python 3.11 (a minute or two)"
resolve "$PYTHON311" "$SCRATCH/report.json"
"$PYTHON311" - "$SCRATCH/report.json" "$HOST" >"$SCRATCH/constraints.txt" <<'PY'
import json
import sys

print(
    f"# Exact versions of the tested environment of sglang {sys.argv[2]}, Python 3.11 to 3.13, Linux x86-64."
    f" Made by: make constraints HOST={sys.argv[2]}"
)
found = [item["metadata"] for item in json.load(open(sys.argv[1], encoding="utf-8"))["install"]]
for name, version in sorted((item["name"].lower().replace("_", "-"), item["version"]) for item in found):
    print(f"{name}=={version}")
PY

for python in "${FURTHER[@]}"; do
    echo "checking the same set for $("$python" --version)"
    resolve "$python" "$SCRATCH/further.json" --constraint "$SCRATCH/constraints.txt"
done
mv "$SCRATCH/constraints.txt" "$PINS"
echo "wrote $PINS: $(grep -c == "$PINS") packages"
