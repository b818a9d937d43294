#!/bin/sh
# Build a real Kubernetes API server for the tests, from Debian's source package. Run by `make kubernetes`.
# Needs Debian's golang-go, rsync, dpkg-dev, golang-github-modern-go-reflect2-dev and, to run it, etcd-server.
# The server stays in $VENV/kubernetes; about four minutes on two idle CPUs. Safe to run again.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
mkdir -p "$VENV/kubernetes"
HOME_FOLDER=$(cd "$VENV/kubernetes" && pwd)
SERVER=$HOME_FOLDER/kube-apiserver
LOG=$HOME_FOLDER/build.log
PACKAGES="golang-go rsync dpkg-dev golang-github-modern-go-reflect2-dev etcd-server"
REFLECT=/usr/share/gocode/src/github.com/modern-go/reflect2

say() { printf '%s\n' "$*" >&2; }

if [ -x "$SERVER" ]; then
    say "$SERVER is there: $("$SERVER" --version)"
    exit 0
fi

missing=
for program in go rsync dpkg-source etcd; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
[ -d "$REFLECT" ] || missing="$missing reflect2"
if [ -n "$missing" ]; then
    say "missing:$missing. To install them: sudo apt-get install -y --no-install-recommends $PACKAGES"
    exit 1
fi

BUILD=$(mktemp -d)
trap 'rm -rf "$BUILD"' EXIT INT TERM
run() { # command with its arguments: quietly, and end with the log when it fails
    "$@" >>"$LOG" 2>&1 && return 0
    say "error: $* failed; the end of $LOG:"
    tail -n 20 "$LOG" | sed 's/^/    /' >&2
    exit 1
}
: >"$LOG"

say "[1/3] the source package kubernetes"
# The machine's own package sources, asked for sources instead of packages.
mkdir -p "$BUILD/lists/partial" "$BUILD/parts"
cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | sed -n 's/^deb /deb-src /p' >"$BUILD/sources.list"
for file in /etc/apt/sources.list.d/*.sources; do
    if [ -e "$file" ]; then
        sed 's/^Types:.*/Types: deb-src/' "$file" >"$BUILD/parts/${file##*/}"
    fi
done
source_apt() {
    apt-get -qq -o Dir::Etc::SourceList="$BUILD/sources.list" -o Dir::Etc::SourceParts="$BUILD/parts" \
        -o Dir::State::Lists="$BUILD/lists" -o APT::Sandbox::User=root "$@"
}
cd "$BUILD"
run source_apt update
run source_apt source kubernetes

say "[2/3] the API server (minutes)"
cd "$BUILD"/kubernetes-*/
# The vendored reflect2 1.0.1 crashes under Go 1.18 and later; Debian's 1.0.2 takes its place.
rm -rf vendor/github.com/modern-go/reflect2
cp -rL "$REFLECT" vendor/github.com/modern-go/reflect2
# It keeps its tests of other modules, and no file of their own.
find vendor/github.com/modern-go/reflect2 -name '*_test.go' -delete
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
run env HOME="$BUILD/home" GOCACHE="$BUILD/cache" GOPATH="$PWD/.go" GOFLAGS= CGO_ENABLED=0 nice make WHAT=cmd/kube-apiserver

say "[3/3] $SERVER"
cp _output/bin/kube-apiserver "$SERVER.part"
mv "$SERVER.part" "$SERVER"
say "done: $("$SERVER" --version)"
