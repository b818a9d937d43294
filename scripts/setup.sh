#!/bin/sh
# Make .venv with everything Isthmus needs. Run by `make setup`; safe to run again.
#   TORCH=torch==2.13.0   the torch requirement; set TORCH= to keep a build that is installed already
#   TOOLS=                without the tools of the tests: enough to run isthmus, in half the time
# Prints one line per step. The output of the tools goes to a log, whose end is shown when a step fails.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
TORCH=${TORCH-torch==2.13.0}
TOOLS=${TOOLS-dev}
PYTHON=${PYTHON:-python3}
LOG=${LOG:-$VENV/setup.log}
LOG_LINES=30
STEP=0
STEPS=5

say() { printf '%s\n' "$*" >&2; }

# pip repeats for every package that it ignores a configured location; this explains no failure.
hide_ignored_locations() { grep -Ev "WARNING: (Location '.*' is ignored|.*(is not a trusted or secure host|and is being ignored))" || :; }

step() { # what
    STEP=$((STEP + 1))
    say "[$STEP/$STEPS] $*"
}

attempt() { # command with its arguments: quietly
    printf '$ %s\n' "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1
}

run() { # the same, and end with the log when it fails
    attempt "$@" && return 0
    status=$?
    say "error: step $STEP of $STEPS failed with status $status: $*"
    say "the last $LOG_LINES lines of $LOG:"
    hide_ignored_locations <"$LOG" | tail -n "$LOG_LINES" | sed 's/^/    /' >&2
    exit "$status"
}

apt() { # subcommand and its arguments
    env DEBIAN_FRONTEND=noninteractive apt-get -qq "$@"
}

may_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

# System packages: installed when we may, named when we may not.
need_package() { # command package
    command -v "$1" >/dev/null 2>&1 && return 0
    if may_install; then
        say "      installing $2"
        [ -n "${APT_UPDATED:-}" ] || attempt apt update || :
        APT_UPDATED=1
        attempt apt install -y --no-install-recommends "$2" && return 0
    fi
    say "      note: '$1' is missing; tests that need it are skipped. To install it: sudo apt-get install -y $2"
}

mkdir -p "$(dirname "$LOG")"
: >"$LOG"

step "system packages: Python${TOOLS:+, iproute2, PostgreSQL, runc, umoci, Slurm, Chromium, Prometheus}"
need_package "$PYTHON" python3
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "error: $("$PYTHON" --version 2>&1) is too old; Isthmus needs 3.11 or newer (set PYTHON=...)"
    exit 1
fi
if [ -n "$TOOLS" ]; then
    need_package ip iproute2
    need_package nft nftables
    need_package runc runc
    need_package umoci umoci
    need_package chromium chromium
    need_package chromedriver chromium-driver
    need_package promtool prometheus
    need_package prometheus-alertmanager prometheus-alertmanager
    [ -n "$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null)" ] || need_package initdb postgresql
    for program in slurmctld slurmd munged; do
        need_package "$program" "$([ "$program" = munged ] && echo munge || echo "$program")"
    done
    need_package squeue slurm-client
fi

step "virtual environment $VENV"
if [ ! -x "$VENV/bin/python" ]; then
    if ! "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        if may_install; then
            run apt update
            run apt install -y --no-install-recommends python3-venv
        else
            say "error: python3-venv is missing. To install it: sudo apt-get install -y python3-venv"
            exit 1
        fi
    fi
    run "$PYTHON" -m venv "$VENV"
fi

# Python compiles a module when it is first imported; most modules of torch and transformers never are.
pip_install() {
    run "$VENV/bin/python" -m pip --disable-pip-version-check install --progress-bar off --no-compile "$@"
}

if [ -n "$TORCH" ]; then
    step "$TORCH (the largest download)"
    pip_install "$TORCH"
else
    step "torch: the installed build stays"
fi

step "isthmus with all extras${TOOLS:+ and the tools of its tests}, at the versions of constraints.txt"
pip_install --constraint constraints.txt --editable ".[server,postgres,agent,wan,train${TOOLS:+,$TOOLS}]"

step "check of the installation"
run "$VENV/bin/isthmus" --version
touch "$VENV/runs"
[ -z "$TOOLS" ] || touch "$VENV/ready"
say "done: $VENV holds isthmus; 'make' lists what can be run"
