#!/bin/sh
# Runs a program of this bundle on a host with an NVIDIA GPU. Finds the CUDA toolkit and says what is missing.
#
#   ./run.sh decode LATENTS --vae PATH     decode --help tells more
#   ./run.sh xtask bench --family flux2    xtask bench --help tells more
#   ./run.sh tests [ARGUMENTS]             the tests that need an NVIDIA GPU
#
# CUDA_PATH names a toolkit elsewhere than /usr/local/cuda, BURN_VAE_FIXTURES another folder of fixtures.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

say() { echo "run.sh: $*" >&2; }

usage() {
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

# The first of the folders "$2"... with a file like $1.
folder_with() {
  pattern=$1
  shift
  for folder in "$@"; do
    for file in "$folder"/$pattern; do
      if [ -e "$file" ]; then
        echo "$folder"
        return 0
      fi
    done
  done
  return 1
}

use_libraries_in() { export LD_LIBRARY_PATH="$1${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; }

find_cuda() {
  : "${CUDA_PATH:=/usr/local/cuda}"
  export CUDA_PATH
  ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)
  if ! "$ldconfig" -p 2>/dev/null | grep -q 'libcuda\.so'; then
    old_ifs=$IFS
    IFS=:
    # shellcheck disable=SC2086 # Folders of LD_LIBRARY_PATH are words here.
    set -- ${LD_LIBRARY_PATH:-} /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib/wsl/lib
    IFS=$old_ifs
    if driver=$(folder_with 'libcuda.so*' "$@"); then
      use_libraries_in "$driver"
    else
      say "no NVIDIA driver was found (libcuda.so): install it, or pass --device cpu"
    fi
  fi
  if nvrtc=$(folder_with 'libnvrtc.so*' "$CUDA_PATH/lib64" "$CUDA_PATH/lib" "$CUDA_PATH/targets/x86_64-linux/lib"); then
    use_libraries_in "$nvrtc"
  else
    say "libnvrtc was not found under $CUDA_PATH: set CUDA_PATH to a CUDA toolkit, or pass --device cpu"
  fi
  if ! [ -e "$CUDA_PATH/include/cuda_fp16.h" ]; then
    say "the CUDA headers were not found in $CUDA_PATH/include: set CUDA_PATH to a CUDA toolkit, or pass --device cpu"
  fi
}

[ $# -gt 0 ] || usage
program=$1
shift
case $program in
  decode | xtask | tests) ;;
  *) usage ;;
esac

find_cuda
export BURN_VAE_FIXTURES="${BURN_VAE_FIXTURES:-$here/tests/fixtures}"
if [ "$program" != tests ]; then
  exec "$here/bin/$program" "$@"
fi

# An absent device would only skip the tests on it.
export BURN_VAE_REQUIRE_DEVICE=cuda
[ $# -gt 0 ] || set -- cuda
for test in "$here"/bin/tests/*; do
  "$test" "$@"
done
