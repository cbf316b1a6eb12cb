#!/bin/bash
# Installs the Debian package, runs a host by its units' command lines, and purges it: on a copy of this machine that nobody
# else sees. To be run in mount, network and process namespaces of its own:
#
#   unshare --mount --net --pid --fork --kill-child tests/packaging/install.sh PACKAGE EMPTY-DIRECTORY
set -euo pipefail

package=$1
base=$2
mount -t tmpfs wadi-test "$base"
mkdir "$base"/{upper,work,root}
root=$base/root
mount -t overlay wadi-test -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs shm "$root/dev/shm"
mount -t tmpfs run "$root/run"
mount -t tmpfs tmp "$root/tmp"
cp "$package" "$root/tmp/wadi.deb"
# All that is mounted here goes with the namespace.
exec chroot "$root" /bin/bash -euo pipefail <<'INSIDE'
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

step() { echo "== $*"; }
die() { echo "FAILED: $*"; exit 1; }
# Tries again for half a minute.
eventually() {
  for _ in $(seq 300); do
    if "$@" >/tmp/said 2>&1; then return; fi
    sleep 0.1
  done
  cat /tmp/said /tmp/*.log
  die "$*"
}

step install
dpkg -i /tmp/wadi.deb
[ -z "$(dpkg --verify wadi)" ] || die "dpkg --verify says that files differ"
for program in wadi-pool pod-controller podctl vhost-net-cxl vhost-blk-cxl vmm; do
  "$program" --version
done
dpkg --search /etc/wadi >/dev/null || die "the package does not bring the directory of the configuration"
for script in bash-completion/completions/podctl zsh/vendor-completions/_podctl fish/vendor_completions.d/podctl.fish; do
  grep -q PODCTL_COMPLETE "/usr/share/$script" || die "$script does not ask podctl"
done

step units
cd /usr/lib/systemd/system
verified=$(systemd-analyze verify --man=no wadi-*.service 2>&1) || die "systemd-analyze: $verified"
[ -z "$verified" ] || die "systemd-analyze: $verified"
for unit in wadi-*.service; do
  systemd-analyze security --offline=true --threshold=40 "$unit" | tail -n 1
done

step run
# systemd would make these.
mkdir -p /run/wadi /var/lib/wadi
# As the manual says.
mkdir -p /dev/shm/wadi
cp /usr/share/doc/wadi/examples/*.toml /etc/wadi/
sed -i 's/^size = "8G"/size = "64M"/' /etc/wadi/host.toml
# The audit log of the manual; systemd would make its directory.
sed -i 's,^\[controller\]$,&\naudit-log = "/var/log/wadi/audit.jsonl",' /etc/wadi/controller.toml
# AF_XDP needs the most of all drivers.
ip link add eth1 type veth peer name cable
ip link set eth1 up
ip link set cable up
printf '\n[[nic]]\nname = "nic1"\ndriver = "af-xdp"\ninterface = "eth1"\n' >>/etc/wadi/host.toml
wadi-pool create /dev/shm/wadi/pool --size 256M
for unit in wadi-controller wadi-net-backend wadi-blk-backend wadi-net-frontend wadi-blk-frontend; do
  command=$(sed -n 's/^ExecStart=//p' $unit.service)
  # With no capability but those of the unit, as systemd would.
  allowed=$(sed -n 's/^CapabilityBoundingSet=//p' $unit.service | tr 'A-Z' 'a-z' | sed 's/cap_/+/g; s/ /,/g')
  # It would also let them lock as much memory as they like. Where not even root may say so, the capability stands for that.
  ulimit -l unlimited 2>/dev/null || allowed="${allowed:+$allowed,}+ipc_lock"
  # shellcheck disable=SC2086 # the command line is words
  setpriv --inh-caps=-all --bounding-set="-all${allowed:+,$allowed}" --no-new-privs $command >/tmp/$unit.log 2>&1 &
  if [ $unit = wadi-controller ]; then
    controller=$!
    eventually podctl hosts list
  fi
done
eventually podctl volumes create vol0 --size 16M --device h1/ssd0
eventually podctl instances create vm1 --host h1 --nic --volume vol0
eventually sh -c 'podctl instances get vm1 | tee /dev/stderr | grep -q "^ready: *yes"'
eventually sh -c 'podctl devices list | tee /dev/stderr | grep -c "^h1/.* up " | grep -qx 3'
podctl hosts list
podctl devices list
podctl instances get vm1

step slice
command=$(sed -n 's/^ExecStart=//p' wadi-slice@.service | sed 's/%i/vm1/')
allowed=$(sed -n 's/^CapabilityBoundingSet=//p' wadi-slice@.service | tr 'A-Z' 'a-z' | sed 's/cap_/+/g; s/ /,/g')
# shellcheck disable=SC2086 # the command line is words
setpriv --inh-caps=-all --bounding-set="-all,$allowed" --no-new-privs $command >/tmp/wadi-slice.log 2>&1 &
slice=$!
eventually grep -q 'no machine vm1 runs here.*; it is waited for' /tmp/wadi-slice.log
kill "$slice"
wait "$slice" || die "the agent of vCPUs does not end in order"

step logs
grep -q '"path":"/v1/instances"' /var/log/wadi/audit.jsonl || die "the audit log does not say who has created an instance"
if command -v logrotate >/dev/null; then
  logrotate --force --state /tmp/rotated /etc/logrotate.d/wadi
  [ -s /var/log/wadi/audit.jsonl.1 ] || die "the audit log was not moved away"
  # As systemd would.
  kill -HUP "$controller"
  eventually test -e /var/log/wadi/audit.jsonl
fi

step libvirt
hook=/etc/libvirt/hooks/qemu.d/wadi
cat >/tmp/domain.xml <<'DOMAIN'
<domain type='kvm'><name>vm2</name><uuid>7a1d1cf5-1f0a-4c41-9a5b-1f2d6a6a1b4e</uuid>
<metadata><wadi:instance xmlns:wadi='urn:wadi:domain:1'/></metadata>
<devices><interface type='vhostuser'><mac address='52:54:00:00:00:02'/>
<source type='unix' path='/run/wadi/sockets/vm2-net0.sock' mode='client'/></interface></devices></domain>
DOMAIN
$hook vm2 prepare begin - </tmp/domain.xml
podctl instances get vm2 | tee /dev/stderr | grep -q "52:54:00:00:00:02"
$hook vm2 release end - </tmp/domain.xml
if podctl instances get vm2; then die "the hook has given nothing back"; fi
# No daemon has tried what it may not.
if grep -iE 'not permitted|EPERM|panicked' /tmp/*.log; then die "a daemon may do too little"; fi

step remove
# shellcheck disable=SC2046 # several
kill $(jobs -p)
wait
systemctl enable wadi-controller.service
[ -L /etc/systemd/system/multi-user.target.wants/wadi-controller.service ] || die "nothing is enabled"
dpkg --remove wadi
# A domain that asks for devices is the only one that misses them.
$hook vm2 prepare begin - </tmp/domain.xml || die "the hook that is left forbids what nobody asked it"
dpkg --purge wadi
left=$(find /usr/bin /usr/lib/systemd /usr/share/doc /etc/libvirt /etc/logrotate.d -path '*wadi*' -o -name 'vhost-*-cxl' -o -name 'podctl')
[ -z "$left" ] || die "left behind: $left"
left=$(find /etc/systemd -name 'wadi-*')
[ -z "$left" ] || die "still enabled: $left"
[ -s /var/lib/wadi/ssd0.img ] || die "what guests wrote must outlive the package"
step done
INSIDE
