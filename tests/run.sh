#!/bin/bash
# Runs every test, in less time than one test program after the other takes: those of whole pods wait for their VMs for half of
# the time, and meanwhile the others compute. A program runs several of its tests at a time, so those with one test of a whole pod run
# in pairs. What is measured against the CPU time of others comes last, by itself.
#
# Needs root: pods are made of network namespaces. Arguments are handed to each `cargo test`. CARGO says which cargo.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

[ "$(id -u)" = 0 ] || {
  echo "tests/run.sh: tests of whole pods make network namespaces and so need root, with cargo in its PATH" >&2
  exit 1
}

alone=(fair_shares fair_slicing fair_slicing_cgroup fair_slicing_replaced guest_shares idle priorities slicing slicing_hotplug)

# Names of a directory's test programs. Two crates may have one of the same name: cargo runs both where it is asked for one.
programs() {
  local file
  for file in "$1"/*.rs "$1"/*/main.rs; do
    [ -e "$file" ] || continue
    file=${file%/main.rs}
    basename "$file" .rs
  done
}

# Those on the standard input without those that are named.
without() {
  grep -vxF "$(printf '%s\n' "$@")" | sort -u
}

# How many tests a program with this name has.
tests_of() {
  cat "tests/tests/$1.rs" "tests/tests/$1"/*.rs 2>/dev/null | grep -cF '#[test]'
}

cargo_test() {
  "${CARGO:-cargo}" test --workspace --no-fail-fast "$@"
}

# Runs a program, and shows in one piece what it said.
# shellcheck disable=SC2329 # xargs does it
one_of_a_pair() {
  local said status=0
  said=$(cargo_test "$@" 2>&1) || status=1
  flock "$paired" printf '%s\n' "$said"
  return "$status"
}

pods=$(programs tests/tests)
several=() single=()
while read -r program; do
  if [ "$(tests_of "$program")" = 1 ]; then single+=("$program"); else several+=("--test=$program"); fi
done < <(without "${alone[@]}" <<<"$pods")
mapfile -t others < <(for directory in */tests; do programs "$directory"; done | without "${alone[@]}" "$pods")

output=$(mktemp)
paired=$(mktemp)
export paired
export -f cargo_test one_of_a_pair
failed=0
# A little behind the VMs, whose guests would take longer to boot than others are patient.
# In a process group of its own, so that all of it ends if this does.
set -m
# shellcheck disable=SC2016 # the inner shell is to expand it
nice -n 10 bash -c 'cargo_test --lib --bins "$@"; units=$?; cargo_test --doc || exit; exit "$units"' \
  beside "$@" "${others[@]/#/--test=}" >"$output" 2>&1 &
beside=$!
set +m
trap 'kill -- -"$beside" 2>/dev/null; rm -f "$output" "$paired"' EXIT
cargo_test "$@" "${several[@]}" || failed=1
printf '%s\n' "${single[@]}" | xargs -P 2 -I '{}' bash -c 'one_of_a_pair "--test={}" "$@"' pair "$@" || failed=1
wait "$beside" || failed=1
cat "$output"
# What guests send crosses the pool copied or not, and has to cross it either way.
WADI_RAM=pool cargo_test "$@" --test=failover || failed=1
cargo_test "$@" "${alone[@]/#/--test=}" || failed=1
exit "$failed"
