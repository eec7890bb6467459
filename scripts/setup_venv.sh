#!/usr/bin/env bash
# Make the environment of this checkout: .venv, in two layers.
#
#   shared   ${XDG_CACHE_HOME:-~/.cache}/pla_sglang/venv-<python>-<hash>: every dependency, several GB. One for all
#            checkouts with the same pins, requirements and interpreter; made once.
#   own      .venv in the checkout: its own interpreter link and an editable install of this project. A .pth file brings
#            in the shared layer. An editable install in the shared layer would point every checkout at the last one.
#
# Running it again does nothing when nothing has changed. Stamp files are written last, so a broken run is redone.
#
#   PYTHON=...        the interpreter to use (3.11 or 3.12)
#   --prune           remove shared layers that this checkout does not use
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/pla_sglang
VENV=$ROOT/.venv
NEEDED_GB=12 # 9.5 GB installed, the rest is pip's scratch space

# An environment of the caller must not leak into ours.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER

say() { echo "setup: $*" >&2; }
die() {
    say "$*"
    exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

choose_python() {
    local candidate version found="" candidates=(python3 python3.12 python3.11)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        version=$(version_of "$candidate") || continue
        case $version in
        3.11.* | 3.12.*)
            echo "$candidate"
            return
            ;;
        esac
        found+=" $candidate is $version;"
    done
    die "Python 3.11 or 3.12 is needed.${found:- No Python was found;} tried: ${candidates[*]}." \
        "Set PYTHON=/path/to/python3.11 if you have one elsewhere."
}

make_venv() { # interpreter, folder: a venv with pip in it
    # Debian keeps ensurepip in python3-venv. A pip of the host does as well.
    "$1" -m venv --without-pip "$2" || die "cannot make a virtual environment. On Debian: apt install python3-venv"
    "$2/bin/python" -m ensurepip >/dev/null 2>&1 ||
        "$1" -m pip --python "$2/bin/python" install --quiet pip ||
        die "found neither ensurepip nor pip. On Debian: apt install python3-venv python3-pip"
}

check_space() {
    local free_gb
    free_gb=$(($(df -Pk "$CACHE" | awk 'NR == 2 {print $4}') / 1048576))
    ((free_gb >= NEEDED_GB)) || die "$CACHE has $free_gb GB free, the environment needs $NEEDED_GB GB." \
        "Set XDG_CACHE_HOME to a larger disk, or remove unused environments with: make clean-cache"
}

show_progress() { # pip's log on standard input: one line for each package fetched, and the step that takes longest
    local line count=0 total
    total=$(grep -c == "$ROOT/constraints.txt")
    while read -r line; do
        case $line in
        *.metadata*) ;;
        Downloading* | "Using cached"*) say "[$((++count))/about $total] $line" ;;
        "Installing collected packages"*) say "unpacking $total packages (the longest step, no output)" ;;
        esac
    done
}

make_shared() { # interpreter, folder
    local python=$1 shared=$2 started=$SECONDS
    if [[ -e $shared/.complete ]] && "$shared/bin/python" -c "" 2>/dev/null; then
        return
    fi
    check_space
    say "first time with these dependencies: installing them into $shared (several GB, some minutes)"
    rm -rf "$shared"
    make_venv "$python" "$shared"
    "$shared/bin/python" "$ROOT/scripts/requirements.py" >"$shared/requirements.txt"
    # pip first, and alone: the rest should already be installed by the pinned one.
    "$shared/bin/python" -m pip install --quiet --constraint "$ROOT/constraints.txt" --upgrade pip setuptools wheel
    "$shared/bin/python" -m pip install --progress-bar off --constraint "$ROOT/constraints.txt" \
        --requirement "$shared/requirements.txt" | show_progress
    touch "$shared/.complete"
    say "installed in $((SECONDS - started)) s, $(du -sh "$shared" | cut -f1) on disk"
}

own_state() { # shared folder: what .venv was made for
    echo "$1 $ROOT $(cat "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT"/scripts/{setup_venv.sh,link_scripts.py} | cksum)"
}

make_own() { # shared folder
    local shared=$1 site log
    if [[ -e $VENV && ! -e $VENV/.pla_own ]]; then
        die "$VENV exists and was not made by this script. Move it away first."
    fi
    say "linking this checkout to it (.venv)"
    rm -rf "$VENV"
    mkdir "$VENV" && touch "$VENV/.pla_own"
    "$shared/bin/python" -m venv --without-pip "$VENV"
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # addsitedir, unlike a bare path, also reads the .pth files of the shared layer.
    printf 'import site; site.addsitedir(%s)\n' \
        "$("$shared/bin/python" -c 'import sysconfig; print(repr(sysconfig.get_path("purelib")))')" >"$site/pla_shared.pth"
    log=$("$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable "$ROOT" 2>&1) || die "$log"
    # A stale copy of the metadata in the checkout would shadow the installed one in processes started there.
    rm -rf "$ROOT/pla_sglang.egg-info"
    "$VENV/bin/python" "$ROOT/scripts/link_scripts.py" "$shared/bin" "$VENV/bin"
    own_state "$shared" >"$VENV/.complete"
}

prune() { # folder to keep
    local folder
    for folder in "$CACHE"/venv-*/; do
        [[ -d $folder && ${folder%/} != "$1" ]] || continue
        say "removing ${folder%/}"
        rm -rf "${folder%/}"
    done
}

main() {
    local python shared
    python=$(choose_python)
    shared=$CACHE/venv-$("$python" "$ROOT/scripts/requirements.py" --key)
    mkdir -p "$CACHE"
    if [[ ${1:-} == --prune ]]; then
        prune "$shared"
        return
    fi
    # One set-up at a time, over all checkouts. The lock goes when the process ends.
    if command -v flock >/dev/null; then
        exec 9>"$CACHE/lock"
        flock --nonblock 9 || { say "another set-up is running, waiting for it" && flock 9; }
    fi
    make_shared "$python" "$shared"
    if [[ $(cat "$VENV/.complete" 2>/dev/null) != "$(own_state "$shared")" ]]; then
        make_own "$shared"
        say "ready: $VENV"
    fi
}

main "$@"
