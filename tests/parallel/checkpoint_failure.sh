#!/bin/sh
# checkpoint_failure.sh data|metadata PROGRAM MPIRUN...: see checkpoint_failure_main.cc.
what=$1
program=$2
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$@" "$program" "$folder" "$what" >"$folder/out" 2>&1
code=$?
cat "$folder/out"
[ "$code" -eq 4 ] || { echo "exit code $code, not 4"; exit 1; }
grep -q "step 2: checkpoint .*step-00000002.h5.partial can't be" "$folder/out" || exit 1
[ -f "$folder/step-00000001.h5" ] && [ ! -e "$folder/step-00000002.h5" ]
