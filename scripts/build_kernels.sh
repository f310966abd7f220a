#!/usr/bin/env bash
# Builds kernels/cpu into src/twinjet/kernels/libtwinjet_cpu.so, if a source is newer than it.
# Without a compiler or on another processor it says so and leaves none: the reference ops run instead.
# Usage: build_kernels.sh [--sanitize]   (AddressSanitizer and UBSan, into build/kernels-sanitized/)
set -euo pipefail
cd "$(dirname "$0")/.."

out=src/twinjet/kernels/libtwinjet_cpu.so
objects=build/kernels
flags=(-O3 -g1)
link=()
if [ "${1:-}" = --sanitize ]; then
    out=build/kernels-sanitized/libtwinjet_cpu.so
    objects=build/kernels-sanitized
    flags=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
    link=(-fsanitize=address,undefined)
fi

compiler="${CXX:-g++}"
if ! command -v "$compiler" >/dev/null; then
    echo "kernels: no C++ compiler ($compiler); the server will run on the reference ops, which are much slower" >&2
    exit 0
fi
if [ "$(uname -m)" != x86_64 ] || [ "$(uname -s)" != Linux ]; then
    echo "kernels: none for $(uname -s) on $(uname -m) yet; the server will run on the reference ops" >&2
    exit 0
fi

include="$(.venv/bin/python -c 'import jax.ffi; print(jax.ffi.include_dir())')"
flags+=(-std=c++17 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-unused-parameter
    -isystem "$include" -Ikernels/cpu)
mkdir -p "$objects" "$(dirname "$out")"

running=()
built=()
for source in kernels/cpu/*.cc; do
    object="$objects/$(basename "$source" .cc).o"
    built+=("$object")
    stale="$(find kernels/cpu scripts/build_kernels.sh \( -name '*.h' -o -name build_kernels.sh -o -path "$source" \) \
        -newer "$object" -print -quit 2>/dev/null || echo missing)"
    [ -e "$object" ] && [ -z "$stale" ] && continue
    isa=(-mavx2 -mfma -mf16c)
    [ "$(basename "$source")" = support.cc ] && isa=()
    "$compiler" "${flags[@]}" "${isa[@]}" -c "$source" -o "$object" &
    running+=($!)
done
for pid in "${running[@]}"; do
    wait "$pid" || { echo "kernels: the compiler failed; see above" >&2; exit 1; }
done
if [ ${#running[@]} -gt 0 ] || [ ! -e "$out" ]; then
    # A running server keeps the old file.
    "$compiler" -shared "${link[@]}" "${built[@]}" -o "$out.new" -lpthread
    mv "$out.new" "$out"
    echo "kernels: built $out"
fi
