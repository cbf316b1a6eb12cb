#!/bin/bash
# Boots systemd on a copy of this machine that nobody else sees, with the Debian package installed: what its units forbid is forbidden
# then. The directory `shared` tells how far it is: `at-work` appears when an instance can be used, with its address; its log grows; it goes on when
# there is a file `tried`.
#
#   tests/packaging/boot.sh PACKAGE EMPTY-DIRECTORY
set -euo pipefail

package=$1
base=$2
stage=${3:-outside}

if [ "$stage" = outside ]; then
  # In control groups of its own: those that systemd makes below them go with them.
  groups=()
  for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified; do
    [ -e "$hierarchy/cgroup.procs" ] || continue
    group=$hierarchy/wadi-boot-$$
    mkdir "$group"
    echo $$ >"$group/cgroup.procs"
    groups+=("$group")
  done
  # shellcheck disable=SC2317,SC2329 # the trap does it
  leave() {
    for group in "${groups[@]}"; do
      echo $$ >"${group%/*}/cgroup.procs"
      find "$group" -depth -type d -exec rmdir {} +
    done
  }
  trap leave EXIT
  timeout --kill-after=10 240 unshare --mount --pid --fork --kill-child "$0" "$package" "$base" inside
  exit
fi

mount -t proc proc /proc
mkdir "$base/shared" "$base/disk"
mount -t tmpfs wadi-test "$base/disk"
mkdir "$base/disk"/{upper,work,root}
root=$base/disk/root
mount -t overlay wadi-test -o "lowerdir=/,upperdir=$base/disk/upper,workdir=$base/disk/work" "$root"
cp "$package" "$root/wadi.deb"
chroot "$root" dpkg -i /wadi.deb
# The units let daemons lock as much memory as they like. Where not even root may say so, a capability stands for that.
if ! (ulimit -l unlimited) 2>/dev/null; then
  mkdir -p "$root/etc/systemd/system/wadi-.service.d"
  printf '[Service]\nCapabilityBoundingSet=CAP_IPC_LOCK\n' >"$root/etc/systemd/system/wadi-.service.d/60-memory.conf"
fi
# What this machine has enabled is not asked for, and is not like it anywhere else.
rm -f "$root"/etc/machine-id
# Not called wadi-*: what those have in common would hold for it too.
cat >"$root/etc/systemd/system/booted.target" <<'UNIT'
[Unit]
Requires=basic.target booted.service
After=basic.target
UNIT
cat >"$root/etc/systemd/system/booted.service" <<'UNIT'
[Unit]
After=basic.target
[Service]
Type=oneshot
ExecStart=/bin/bash -euo pipefail /booted.sh
ExecStopPost=/bin/systemctl --no-block exit 0
StandardOutput=file:/shared/log
StandardError=inherit
TimeoutStartSec=infinity
UNIT
cat >"$root/booted.sh" <<'INSIDE'
step() { echo "== $*"; }
die() { echo "FAILED: $*"; exit 1; }
# Tries again for a minute.
eventually() {
  for _ in $(seq 600); do
    if "$@" >/tmp/said 2>&1; then return; fi
    sleep 0.1
  done
  cat /tmp/said
  journalctl --no-pager --output=cat --unit='wadi-*' --lines=100
  die "$*"
}
daemons=(wadi-controller wadi-net-backend wadi-blk-backend wadi-net-frontend wadi-blk-frontend)
property() { systemctl show --property="$2" --value "$1"; }
works() {
  podctl instances get vm1 | grep -q "^ready: *yes" && [ "$(podctl devices list | grep -c '^h1/.* up ')" = 3 ]
}

step start
# As the manual says.
mkdir -p /dev/shm/wadi
cp /usr/share/doc/wadi/examples/*.toml /etc/wadi/
sed -i 's/^size = "8G"/size = "64M"/; s/^driver = "tap".*/driver = "af-xdp"/; s/^interface = "wadi0"/interface = "eth1"/' /etc/wadi/host.toml
printf '\n[[nic]]\nname = "nic1"\ndriver = "tap"\ninterface = "wadi0"\nbackup = true\n' >>/etc/wadi/host.toml
sed -i 's,^\[controller\]$,&\naudit-log = "/var/log/wadi/audit.jsonl",' /etc/wadi/controller.toml
ip link add eth1 type veth peer name cable
ip link set eth1 up
ip link set cable up
wadi-pool create /dev/shm/wadi/pool --size 256M
systemctl enable --now "${daemons[@]}"
eventually podctl volumes create vol0 --size 16M --device h1/ssd0
eventually podctl instances create vm1 --host h1 --nic --volume vol0
eventually works

step sandbox
for daemon in "${daemons[@]}"; do
  pid=$(property "$daemon" MainPID)
  grep -q '^Seccomp:\s*2' "/proc/$pid/status" || die "$daemon may call the kernel for anything"
  grep -q '^NoNewPrivs:\s*1' "/proc/$pid/status" || die "$daemon may gain privileges"
  for place in /usr /etc /home; do
    if nsenter --mount --target "$pid" touch "$place/wadi-was-here" 2>/dev/null; then die "$daemon may write to $place"; fi
  done
done

step devices
# Whether what is in a process' control group may open a device.
may_open() {
  bash -c '
    place=/sys/fs/cgroup$(sed -n "s/^0:://p" "/proc/$0/cgroup")
    echo $$ >"$place/cgroup.procs" && : <"$1"' "$1" "$2" 2>/dev/null
}
mknod /dev/some-disk b 7 0
mknod /dev/some-log c 1 11
for node in /dev/some-disk /dev/some-log; do
  may_open $$ "$node" || die "here nobody may open what daemons are to be kept from"
done
for daemon in "${daemons[@]}"; do
  pid=$(property "$daemon" MainPID)
  may_open "$pid" /dev/null || die "$daemon may not open /dev/null"
  if may_open "$pid" /dev/some-log; then die "$daemon may read the kernel's log"; fi
  if [ "$daemon" = wadi-blk-backend ]; then
    may_open "$pid" /dev/some-disk || die "$daemon may not open a disk"
  elif may_open "$pid" /dev/some-disk; then
    die "$daemon may open disks"
  fi
done
may_open "$(property wadi-net-backend MainPID)" /dev/net/tun || die "the NICs' backend may not open TAP devices"

step work
sent() { cat /sys/class/net/cable/statistics/rx_packets; }
before=$(sent)
# Whoever sends with another address is not let through.
podctl instances get vm1 | grep -oE '([0-9a-f]{2}:){5}[0-9a-f]{2}' | head -n 1 >/shared/mac
mv /shared/mac /shared/at-work
for _ in $(seq 1200); do
  [ ! -e /shared/tried ] || break
  sleep 0.1
done
[ -e /shared/tried ] || die "nobody has used the devices"
[ "$(sent)" -ge $((before + 40)) ] || die "only $(($(sent) - before)) frames came out of the NIC"

step reload
systemctl reload "${daemons[@]}"
for daemon in "${daemons[@]}"; do systemctl is-active --quiet "$daemon" || die "$daemon has ended"; done

step kill
for daemon in "${daemons[@]}"; do
  restarts=$(property "$daemon" NRestarts)
  [ "$restarts" = 0 ] || die "$daemon was started $restarts times again"
  systemctl kill --signal=KILL --kill-whom=main "$daemon"
  is_back() { [ "$(property "$daemon" NRestarts)" = 1 ] && systemctl is-active --quiet "$daemon"; }
  eventually is_back
  eventually works
done

step stop
systemctl stop "${daemons[@]}"
for daemon in "${daemons[@]}"; do
  [ "$(property "$daemon" Result)" = success ] || die "$daemon: $(property "$daemon" Result)"
done
[ -s /var/log/wadi/audit.jsonl ] || die "the audit log is not where the unit lets it be"
if journalctl --no-pager --unit='wadi-*' | grep -iE 'not permitted|EPERM|read-only file system|panicked'; then
  die "a daemon may do too little"
fi
step done
INSIDE
# With control groups of the second version only, whatever this machine has: in those of the first one, nobody could keep processes there from devices.
export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1
exec systemd-nspawn --quiet --directory="$root" --boot --register=no --keep-unit --private-network --capability=all --system-call-filter=bpf \
  --bind="$base/shared:/shared" --bind=/dev/net/tun --link-journal=no --console=pipe systemd.unit=booted.target </dev/null
