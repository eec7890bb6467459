#!/usr/bin/env bash
# Resolve the dependencies of pyproject.toml afresh and pin the result in constraints.txt. One file serves both Pythons: the
# set is resolved for 3.11, the older one, and checked to resolve for 3.12 as well. Nothing is installed for good.
# PYTHON311 and PYTHON312 name the interpreters where they are not on the path.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT

PYTHON311=${PYTHON311:-python3.11}
PYTHON312=${PYTHON312:-python3.12}

resolve() { # interpreter, report file, further pip arguments
    local python=$1 report=$2 venv
    shift 2
    venv=$(mktemp -d -p "$SCRATCH")
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" "$ROOT/scripts/requirements.py" >"$SCRATCH/requirements.txt"
    "$venv/bin/python" -m pip install --quiet --dry-run --ignore-installed \
        --report "$report" --requirement "$SCRATCH/requirements.txt" "$@"
}

echo "resolving for Python 3.11 (a minute or two)"
resolve "$PYTHON311" "$SCRATCH/report.json"
"$PYTHON311" - "$SCRATCH/report.json" >"$SCRATCH/constraints.txt" <<'PY'
import json
import sys

print("# Exact versions of the tested environment, Python 3.11 and 3.12, Linux x86-64. Made by: make constraints")
found = [item["metadata"] for item in json.load(open(sys.argv[1], encoding="utf-8"))["install"]]
for name, version in sorted((item["name"].lower().replace("_", "-"), item["version"]) for item in found):
    print(f"{name}=={version}")
PY

echo "checking the same set for Python 3.12"
resolve "$PYTHON312" "$SCRATCH/report312.json" --constraint "$SCRATCH/constraints.txt"
mv "$SCRATCH/constraints.txt" "$ROOT/constraints.txt"
echo "wrote constraints.txt: $(grep -c == "$ROOT/constraints.txt") packages"
