#!/bin/bash
# Runs every test, in less time than one test program after the other takes: those of whole pods wait for their VMs for half of
# the time, and meanwhile the others compute. What is measured against the CPU time of others comes last, by itself.
#
# Arguments are handed to each `cargo test`. CARGO says which cargo.
set -uo pipefail
cd "$(dirname "$0")/.."

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

# Those on the standard input, as arguments, without those that are named.
selected() {
  grep -vxF "$(printf '%s\n' "$@")" | sort -u | sed 's/^/--test=/'
}

pods=$(programs tests/tests)
mapfile -t pod_tests < <(selected "${alone[@]}" <<<"$pods")
mapfile -t other_tests < <(for directory in */tests; do programs "$directory"; done | selected "${alone[@]}" "$pods")

cargo_test() {
  "${CARGO:-cargo}" test --workspace --no-fail-fast "$@"
}

output=$(mktemp)
failed=0
# A little behind the VMs, whose guests would take longer to boot than others are patient.
# In a process group of its own, so that all of it ends if this does.
set -m
nice -n 10 bash -c "$(declare -f cargo_test)"'; cargo_test --lib --bins "$@"; units=$?; cargo_test --doc || exit; exit "$units"' \
  beside "$@" "${other_tests[@]}" >"$output" 2>&1 &
beside=$!
set +m
trap 'kill -- -"$beside" 2>/dev/null; rm -f "$output"' EXIT
cargo_test "$@" "${pod_tests[@]}" || failed=1
wait "$beside" || failed=1
cat "$output"
cargo_test "$@" "${alone[@]/#/--test=}" || failed=1
exit "$failed"
