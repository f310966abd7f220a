#!/usr/bin/env bash
# Builds kernels/cpu into src/twinjet/kernels/libtwinjet_cpu.so, where a source is newer than its object.
# Without a compiler that can do it, or on another processor, it says so and leaves none: the reference ops run instead.
# Usage: build_kernels.sh [--strict] [--sanitize]
#   --strict    fail instead of leaving none
#   --sanitize  AddressSanitizer and UBSan, into build/kernels-sanitized/
set -euo pipefail
cd "$(dirname "$0")/.."

out=src/twinjet/kernels/libtwinjet_cpu.so
objects=build/kernels
flags=(-O3 -g1)
link=()
strict=
for argument in "$@"; do
    case "$argument" in
        --strict) strict=1 ;;
        --sanitize)
            out=build/kernels-sanitized/libtwinjet_cpu.so
            objects=build/kernels-sanitized
            # The checks that are left out double the compile; AddressSanitizer or the processor sees what they see.
            flags=(-O1 -g1 -fsanitize=address,undefined -fno-sanitize=null,object-size,alignment,vptr
                -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
            link=(-fsanitize=address,undefined)
            ;;
        *) echo "kernels: unknown argument $argument; known: --strict, --sanitize" >&2; exit 2 ;;
    esac
done

without() {
    echo "kernels: $1; the server will run on the reference ops, which are many times slower" >&2
    rm -f "$out"
    [ -z "$strict" ] || exit 1
    exit 0
}

compiler="${CXX:-g++}"
[ "$(uname -sm)" = "Linux x86_64" ] || without "there are none for $(uname -sm) yet"
if ! command -v "$compiler" >/dev/null && [ -z "${CXX:-}" ] && command -v apt-get >/dev/null; then
    if [ "$(id -u)" = 0 ]; then
        echo "kernels: no C++ compiler here; installing g++"
        apt-get update -qq && apt-get install -y -qq g++ || without "g++ could not be installed"
    else
        without "no C++ compiler here. Run: sudo apt-get install g++, then make install"
    fi
fi
command -v "$compiler" >/dev/null || without "no C++ compiler ($compiler) here"

stale() {
    [ ! -e "$2" ] || [ -n "$(find kernels/cpu scripts/build_kernels.sh \
        \( -name '*.h' -o -name build_kernels.sh -o -path "$1" \) -newer "$2" -print -quit)" ]
}

sources=(kernels/cpu/*.cc)
to_build=()
built=()
for source in "${sources[@]}"; do
    object="$objects/$(basename "$source" .cc).o"
    built+=("$object")
    if stale "$source" "$object"; then to_build+=("$source"); fi
done
if [ ${#to_build[@]} = 0 ] && [ -e "$out" ]; then exit 0; fi

echo "kernels: compiling ${#to_build[@]} of ${#sources[@]} files"
include="$(.venv/bin/python -c 'import jax.ffi; print(jax.ffi.include_dir())')"
flags+=(-std=c++17 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-unused-parameter
    -isystem "$include" -Ikernels/cpu)
mkdir -p "$objects" "$(dirname "$out")"
running=()
for source in "${to_build[@]}"; do
    isa=(-mavx2 -mfma -mf16c)
    case "$(basename "$source")" in
        # What asks whether the processor has these instructions must do without them.
        support.cc) isa=() ;;
        # GCC 12 warns of its own intrinsics, which start from undefined registers.
        *_vnni.cc) isa+=(-mavx512f -mavx512bw -mavx512vl -mavx512vnni -Wno-maybe-uninitialized) ;;
    esac
    "$compiler" "${flags[@]}" ${isa[@]+"${isa[@]}"} -c "$source" -o "$objects/$(basename "$source" .cc).o" &
    running+=($!)
done
failed=
for pid in ${running[@]+"${running[@]}"}; do
    wait "$pid" || failed=1
done
[ -z "$failed" ] || without "the compiler failed, see above"
# The linker keeps one copy of a function that several files hold, and that must not be one with rarer instructions.
if nm -C "$objects"/*_vnni.o | grep -v -E "asan|ubsan|DW\.ref\." | grep ' [WVu] '; then
    echo "kernels: these functions of a *_vnni.cc may replace those of other files: make them internal or inline" >&2
    exit 1
fi
# Beside the old file and then over it: a running server keeps what it has.
"$compiler" -shared ${link[@]+"${link[@]}"} "${built[@]}" -o "$out.new" -lpthread || without "the linker failed, see above"
mv "$out.new" "$out"
echo "kernels: built $out"
