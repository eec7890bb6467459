#!/usr/bin/env bash
# Make the environment of this checkout: .venv, in two layers.
#
#   setup_venv.sh [--host VERSION]    .venv with this version of SGLang. Without it: the one that was named last in this
#                                     checkout, else the one of pyproject.toml
#   setup_venv.sh --thin VERSION      .venv-VERSION beside .venv, for tests: SGLang VERSION and what it cannot share, in
#                                     front of everything else that .venv has. Nobody ships this mixture
#   setup_venv.sh --prune             remove shared layers that this checkout does not use
#
#   shared   ${XDG_CACHE_HOME:-~/.cache}/pla_sglang/venv-<python>-<hash>: every dependency, several GB. One for all
#            checkouts with the same pins, requirements and interpreter; made once.
#   own      .venv in the checkout: its own interpreter link and an editable install of this project. A .pth file brings
#            in the shared layer. An editable install in the shared layer would point every checkout at the last one.
#
# Running it again does nothing when nothing has changed. Stamp files are written last, so a broken run is redone.
#
# PYTHON is the interpreter to use (3.11 to 3.13).
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/pla_sglang
VENV=$ROOT/.venv
NEEDED_GB=15 # up to 12 GB installed, the rest is pip's scratch space
THIN_PACKAGES="sglang transformers tokenizers" # one version of SGLang does not run with another's transformers

# An environment of the caller must not leak into ours.
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER

say() { echo "setup: $*" >&2; }
die() {
    say "$*"
    exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

choose_python() {
    local candidate version found="" candidates=(python3 python3.13 python3.12 python3.11)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        version=$(version_of "$candidate") || continue
        case $version in
        3.11.* | 3.12.* | 3.13.*)
            echo "$candidate"
            return
            ;;
        esac
        found+=" $candidate is $version;"
    done
    die "Python 3.11, 3.12 or 3.13 is needed.${found:- No Python was found;} tried: ${candidates[*]}." \
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

show_progress() { # pins; pip's log on standard input: one line for each package fetched, and the step that takes longest
    local line count=0 total
    total=$(grep -c == "$1")
    while read -r line; do
        case $line in
        *.metadata*) ;;
        Downloading* | "Using cached"*) say "[$((++count))/about $total] $line" ;;
        "Installing collected packages"*) say "unpacking $total packages (the longest step, no output)" ;;
        esac
    done
}

pins_of() { # interpreter, version of SGLang or nothing: the file of its pins
    "$1" "$ROOT/scripts/requirements.py" ${2:+--host "$2"} --pins
}

key_of() { # interpreter, version of SGLang or nothing
    "$1" "$ROOT/scripts/requirements.py" ${2:+--host "$2"} --key
}

make_shared() { # interpreter, folder, version of SGLang or nothing
    local python=$1 shared=$2 host=$3 started=$SECONDS pins
    if [[ -e $shared/.complete ]] && "$shared/bin/python" -c "" 2>/dev/null; then
        return
    fi
    check_space
    say "first time with these dependencies: installing them into $shared (several GB, some minutes)"
    rm -rf "$shared"
    make_venv "$python" "$shared"
    pins=$(pins_of "$python" "$host")
    "$python" "$ROOT/scripts/requirements.py" ${host:+--host "$host"} >"$shared/requirements.txt"
    # pip first, and alone: the rest should already be installed by the pinned one.
    "$shared/bin/python" -m pip install --quiet --constraint "$pins" --upgrade pip setuptools wheel
    "$shared/bin/python" -m pip install --progress-bar off --constraint "$pins" \
        --requirement "$shared/requirements.txt" | show_progress "$pins"
    touch "$shared/.complete"
    say "installed in $((SECONDS - started)) s, $(du -sh "$shared" | cut -f1) on disk"
}

make_thin() { # interpreter, folder, version of SGLang
    local python=$1 thin=$2 started=$SECONDS pins package packages=()
    [[ ! -e $thin/.complete ]] || return 0
    rm -rf "$thin"
    pins=$(pins_of "$python" "$3")
    for package in $THIN_PACKAGES; do
        packages+=("$(grep "^$package==" "$pins")")
    done
    say "installing ${packages[*]} into $thin"
    "$python" -m pip install --quiet --no-deps --target "$thin" "${packages[@]}"
    touch "$thin/.complete"
    say "installed in $((SECONDS - started)) s, $(du -sh "$thin" | cut -f1) on disk"
}

own_state() { # layers: what an own environment was made for
    echo "$* $ROOT $(cat "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT"/scripts/{setup_venv.sh,link_scripts.py} | cksum)"
}

make_own() { # own folder, shared folder, further folder in front of it
    local VENV=$1 shared=$2 thin=${3:-} site log
    if [[ $(cat "$VENV/.complete" 2>/dev/null) == "$(own_state "${@:2}")" ]]; then
        return
    fi
    if [[ -e $VENV && ! -e $VENV/.pla_own ]]; then
        die "$VENV exists and was not made by this script. Move it away first."
    fi
    say "linking this checkout to it (${VENV##*/})"
    rm -rf "$VENV"
    mkdir "$VENV" && touch "$VENV/.pla_own"
    "$shared/bin/python" -m venv --without-pip "$VENV"
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # addsitedir, unlike a bare path, also reads the .pth files of the shared layer. A thin layer has none.
    {
        [[ -z $thin ]] || echo "$thin"
        printf 'import site; site.addsitedir(%s)\n' \
            "$("$shared/bin/python" -c 'import sysconfig; print(repr(sysconfig.get_path("purelib")))')"
    } >"$site/pla_shared.pth"
    log=$("$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable "$ROOT" 2>&1) || die "$log"
    # A stale copy of the metadata in the checkout would shadow the installed one in processes started there.
    rm -rf "$ROOT/pla_sglang.egg-info"
    "$VENV/bin/python" "$ROOT/scripts/link_scripts.py" "$shared/bin" "$VENV/bin"
    own_state "${@:2}" >"$VENV/.complete"
    say "ready: $VENV"
}

prune() { # folder to keep beside those that this checkout's environments name
    local folder
    for folder in "$CACHE"/{venv,thin}-*/; do
        [[ -d $folder && ${folder%/} != "$1" ]] || continue
        ! cat "$VENV"*/.complete 2>/dev/null | grep -qF -- "${folder%/} " || continue
        say "removing ${folder%/}"
        rm -rf "${folder%/}"
    done
}

main() {
    local python host shared thin action=${1:-}
    [[ $action =~ ^(|--host|--thin|--prune)$ ]] || die "unknown: $action"
    python=$(choose_python)
    host=$(cat "$VENV/.host" 2>/dev/null || true)
    [[ $action != --host ]] || host=${2:?a version of SGLang}
    shared=$CACHE/venv-$(key_of "$python" "$host")
    mkdir -p "$CACHE"
    if [[ $action == --prune ]]; then
        prune "$shared"
        return
    fi
    # One set-up at a time, over all checkouts. The lock goes when the process ends.
    if command -v flock >/dev/null; then
        exec 9>"$CACHE/lock"
        flock --nonblock 9 || { say "another set-up is running, waiting for it" && flock 9; }
    fi
    make_shared "$python" "$shared" "$host"
    if [[ $action == --thin ]]; then
        thin=$CACHE/thin-$(key_of "$python" "${2:?a version of SGLang}")
        [[ ${thin##*/thin-} != "${shared##*/venv-}" ]] || die ".venv has SGLang $2 already"
        make_thin "$shared/bin/python" "$thin" "$2"
        make_own "$VENV-$2" "$shared" "$thin"
    else
        make_own "$VENV" "$shared"
        [[ -z $host ]] || echo "$host" >"$VENV/.host" # until another is named, or "make clean"
    fi
}

main "$@"
