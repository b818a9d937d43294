#!/bin/sh
# Make .venv with everything Isthmus needs. Run by `make setup`; safe to run again.
#   TORCH=torch==2.13.0   the torch requirement; set TORCH= to keep a build that is installed already
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
TORCH=${TORCH-torch==2.13.0}
PYTHON=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }

# System packages: installed when we may, named when we may not.
need_package() { # command package
    command -v "$1" >/dev/null 2>&1 && return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing $2 ..."
        [ -n "${APT_UPDATED:-}" ] || apt-get -qq update
        APT_UPDATED=1
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$2" >/dev/null && return 0
    fi
    say "note: '$1' is missing; tests that need it are skipped. To install it: sudo apt-get install -y $2"
}

need_package "$PYTHON" python3
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "error: $("$PYTHON" --version 2>&1) is too old; Isthmus needs 3.11 or newer (set PYTHON=...)"
    exit 1
fi
if [ ! -x "$VENV/bin/python" ]; then
    if ! "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            apt-get -qq update
            DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3-venv >/dev/null
        else
            say "error: python3-venv is missing. To install it: sudo apt-get install -y python3-venv"
            exit 1
        fi
    fi
    "$PYTHON" -m venv "$VENV"
fi
need_package ip iproute2
[ -n "$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null)" ] || need_package initdb postgresql

PIP="$VENV/bin/python -m pip --disable-pip-version-check install --quiet"
[ -z "$TORCH" ] || $PIP "$TORCH"
$PIP --constraint constraints.txt --editable '.[server,postgres,agent,train,dev]'
touch "$VENV/ready"
