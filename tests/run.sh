#!/bin/bash
# Runs every test, in less time than one test program after the other takes: those of whole pods wait for their VMs for half of
# the time, and meanwhile the others compute. What is measured against the CPU time of others comes last, by itself.
#
# Needs root: pods are made of network namespaces. Arguments are handed to each `cargo test`. CARGO says which cargo.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

[ "$(id -u)" = 0 ] || {
  echo "tests/run.sh: tests of whole pods make network namespaces and so need root, with cargo in its PATH" >&2
  exit 1
}

alone=(fair_shares fair_slicing fair_slicing_cgroup fair_slicing_replaced guest_shares priorities slicing slicing_hotplug)
alone=("${alone[@]/%/::}")

# The controller's service has the same tests with its state in an etcd, but for those that are about files, replicas, or what does not ask
# where the state is.
files=(completion etcd etcd_members outside page reload replica_disks replica_tcp replication restored schemathesis state_disk tls top)
not_in_etcd=()
for file in "${files[@]/%/::}"; do not_in_etcd+=(--skip "$file"); done

# Names of a directory's test programs. Two crates may have one of the same name: cargo runs both where it is asked for one.
programs() {
  local file
  for file in "$1"/*.rs "$1"/*/main.rs; do
    [ -e "$file" ] || continue
    file=${file%/main.rs}
    basename "$file" .rs
  done
}

cargo_test() {
  "${CARGO:-cargo}" test --workspace --no-fail-fast "$@"
}

mapfile -t pods < <(programs tests/tests)
mapfile -t others < <(for directory in */tests; do programs "$directory"; done | grep -vxF "$(printf '%s\n' "${pods[@]}")" | sort -u)
skipped=()
for file in "${alone[@]}"; do skipped+=(--skip "$file"); done

output=$(mktemp)
failed=0
# A little behind the VMs, whose guests would take longer to boot than others are patient.
beside() {
  local failed=0
  renice -n 5 "$BASHPID" >/dev/null
  cargo_test --lib --bins "$@" "${others[@]/#/--test=}" || failed=1
  cargo_test --doc "$@" || failed=1
  WADI_STORE=etcd cargo_test "$@" --test=service -- "${not_in_etcd[@]}" || failed=1
  return "$failed"
}
# In a process group of its own, so that all of it ends if this does.
set -m
beside "$@" >"$output" 2>&1 &
beside=$!
set +m
trap 'kill -- -"$beside" 2>/dev/null; rm -f "$output"' EXIT
# Two at a time, however many cores there are: each is several hosts and VMs, and some are patient for so long only.
cargo_test "$@" "${pods[@]/#/--test=}" -- --test-threads=2 "${skipped[@]}" || failed=1
wait "$beside" || failed=1
cat "$output"
# What guests send crosses the pool copied or not, and has to cross it either way.
WADI_RAM=pool cargo_test "$@" --test=pods -- failover:: || failed=1
cargo_test "$@" --test=pods -- --test-threads=1 "${alone[@]}" || failed=1
exit "$failed"
