#!/bin/sh
# Make the files of others that the console and its tests contain, from their packages; run again, it changes no byte.
# Only maintainers need it, with npm. Each package is pinned by version and by the SHA-512 that the registry publishes.
set -eu
cd "$(dirname "$0")/.."
BUNDLE=src/isthmus/control/rest/console/bundle/vendor
TESTS=tests/console/vendor
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

unpack() { # name version integrity
    (cd "$WORK" && npm pack --silent "$1@$2" >/dev/null)
    found="sha512-$(openssl dgst -sha512 -binary "$WORK/$1-$2.tgz" | openssl base64 -A)"
    [ "$found" = "$3" ] || { echo "error: $1 $2 is $found, expected $3" >&2; exit 1; }
    mkdir "$WORK/$1"
    tar xzf "$WORK/$1-$2.tgz" -C "$WORK/$1" --strip-components=1
}

# A file without its source map, which the bundle does not hold; imports by name become imports of the file beside it.
copy() { # from to
    sed -e '/^\/\/# sourceMappingURL=/d' -e 's#from *"preact"#from"./preact.js"#g' "$1" >"$2"
}

unpack preact 11.2.0 'sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg=='
unpack htm 3.1.1 'sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ=='
unpack uplot 1.6.32 'sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=='
unpack axe-core 4.14.1 'sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=='

mkdir -p "$BUNDLE" "$TESTS"
copy "$WORK/preact/dist/preact.mjs" "$BUNDLE/preact.js"
copy "$WORK/preact/hooks/dist/hooks.mjs" "$BUNDLE/hooks.js"
copy "$WORK/htm/dist/htm.module.js" "$BUNDLE/htm.js"
copy "$WORK/uplot/dist/uPlot.iife.min.js" "$BUNDLE/uplot.js"
copy "$WORK/uplot/dist/uPlot.min.css" "$BUNDLE/uplot.css"
for name in preact htm uplot; do cp "$WORK/$name/LICENSE" "$BUNDLE/LICENSE.$name"; done
copy "$WORK/axe-core/axe.min.js" "$TESTS/axe.min.js"
cp "$WORK/axe-core/LICENSE" "$TESTS/LICENSE.axe-core"
(cd "$BUNDLE" && sha256sum ./*) | sed 's#\./##'
