#!/bin/bash
# Installs from Debian's packages what this machine lacks for building, the demo, tests or benchmarks.
# Says what and why, once. Run again, it installs nothing and says nothing.
#
#   setup-debian.sh build    for building the programs and the package
#   setup-debian.sh demo     for that and the demo
#   setup-debian.sh test     for that and the tests; so without an argument, too
#   setup-debian.sh bench    for the demo and the benchmarks
set -euo pipefail

fail() {
  echo "setup: $*" >&2
  exit 1
}

# package, a file that it brings (or a pattern, where a version is part of its name), and what it is for
to_build=(
  "gcc:/usr/bin/gcc:links Rust programs; builds the guest's stub libraries"
  "libc6-dev:/usr/include/stdio.h:links Rust programs"
  "dpkg-dev:/usr/bin/dpkg-shlibdeps:puts the Debian package together"
)
for_the_demo=(
  "qemu-system-x86:/usr/bin/qemu-system-x86_64:runs the virtual machines"
  "iperf3:/usr/bin/iperf3:the other end of the guest's network traffic"
  "iproute2:/usr/sbin/ip:builds a pod's hosts from network namespaces"
  "iputils-ping:/usr/bin/ping:lets you look around in a pod that was kept"
  "procps:/usr/bin/ps:lets you look around in a pod that was kept"
)
for_tests=(
  "ovmf:/usr/share/qemu/firmware/60-edk2-x86_64.json:UEFI for virtual machines that boot from their volumes"
  "qemu-utils:/usr/bin/qemu-storage-daemon:serves an SSD of another program"
  "ethtool:/usr/sbin/ethtool:turns offloads off on the switch port of an AF_XDP NIC"
  "python3-venv:/usr/lib/python3.*/ensurepip/__init__.py:a place of its own for schemathesis, which comes from PyPI"
  "systemd:/usr/bin/systemd-analyze:checks the units that the package brings"
  "systemd-container:/usr/bin/systemd-nspawn:boots a host from the package, with what its units forbid"
  "chromium-headless-shell:/usr/bin/chromium-headless-shell:looks at the controller's page (100 MB)"
  "etcd-server:/usr/bin/etcd:keeps a controller's state (30 MB)"
  "prometheus:/usr/bin/promtool:checks metrics, and alert rules against what they are for (95 MB)"
  "libfaketime:/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1:sets the clocks of daemons"
  "fish:/usr/bin/fish:completes podctl's commands"
  "zsh:/usr/bin/zsh:the same"
  "libvirt-daemon-system:/etc/default/libvirtd:libvirt's QEMU driver and its user: runs the domain that vmm prints"
)
for_benchmarks=(
  "qemu-utils:/usr/bin/qemu-storage-daemon:the rival of the storage benchmarks"
  "dpdk-dev:/usr/bin/dpdk-testpmd:dpdk-testpmd drives the network benchmark, and is its rival"
)

needed=("${to_build[@]}")
# The test guest is put together from packages that are fetched, not installed.
with_guest=yes
case "$*" in
  build) with_guest= ;;
  demo) needed+=("${for_the_demo[@]}") ;;
  test | "") needed+=("${for_the_demo[@]}" "${for_tests[@]}") ;;
  bench) needed+=("${for_the_demo[@]}" "${for_benchmarks[@]}") ;;
  *) fail "unknown arguments: $*. Say build, demo, test or bench" ;;
esac

exists() {
  # /bin, /usr/bin and their sbin twins are one place on some systems and two on others.
  compgen -G "$1" >/dev/null || compgen -G "${1#/usr}" >/dev/null
}

missing=()
reasons=()
for entry in "${needed[@]}"; do
  IFS=: read -r package file reason <<<"$entry"
  if ! exists "$file"; then
    missing+=("$package")
    reasons+=("$(printf '  %-16s %s' "$package" "$reason")")
  fi
done

command -v apt-get >/dev/null ||
  fail "apt-get is not here: this script knows Debian 12 and its relatives. Install by hand what provides: ${missing[*]:-nothing is missing}"

# For the guest apt must know the packages that are fetched.
lists_known() {
  [ -z "$with_guest" ] || [ -n "$(apt-cache --quiet=0 show --no-all-versions linux-image-cloud-amd64 2>/dev/null)" ]
}

if [ ${#missing[@]} -eq 0 ] && lists_known; then
  exit 0
fi
[ "$(id -u)" = 0 ] || fail "needs root to install: ${missing[*]:-package lists}. Run: sudo $0 $*"

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
made=()
trap 'rm -f "$log" "${made[@]}"' EXIT

# Tests start what they need of these packages by themselves: no etcd, Prometheus or libvirt is to run on this machine for that.
# Whoever has said already what starts while packages are installed is left alone.
policy=/usr/sbin/policy-rc.d
if [ ${#missing[@]} -gt 0 ] && [ ! -e "$policy" ] && [ ! -L "$policy" ]; then
  made+=("$policy")
  printf '#!/bin/sh\n# Made by %s, and to go when it ends.\nexit 101\n' "$0" >"$policy"
  chmod 755 "$policy"
fi

quietly() {
  "$@" >"$log" 2>&1 || {
    cat "$log" >&2
    fail "'$*' failed: see above. Is the package mirror within reach?"
  }
}

update() {
  echo "setup: fetching Debian's package lists"
  quietly apt-get update
}

lists_known || update
lists_known || fail "linux-image-cloud-amd64 is in none of apt's sources: the test guest needs Debian's main archive"

if [ ${#missing[@]} -gt 0 ]; then
  echo "setup: installing from Debian's packages:"
  printf '%s\n' "${reasons[@]}"
  # Lists that are there may be too old to fetch from: only then fetch new ones.
  if ! apt-get install --yes --no-install-recommends "${missing[@]}" >"$log" 2>&1; then
    update
    quietly apt-get install --yes --no-install-recommends "${missing[@]}"
  fi
fi
