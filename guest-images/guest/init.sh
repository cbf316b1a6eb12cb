#!/bin/sh
# The test guest's first process: mounts, modules in order, then the agent.
# shellcheck shell=dash
export PATH=/usr/sbin:/usr/bin:/bin
export HOME=/root

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm /dev/pts
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp

# The kernel was told to start one vCPU only, until it has rewritten its own code. Before the NICs' driver comes, which
# counts them.
for vcpu in /sys/devices/system/cpu/cpu[0-9]*/online; do
  [ "$(cat "$vcpu")" = 1 ] || echo 1 >"$vcpu"
done

while read -r module; do
  insmod "/lib/modules/$module" || echo "init: cannot load $module"
done </lib/modules/order

hostname wadi-guest
ip link set lo up
for queue in /sys/block/vd*/queue/scheduler; do
  [ -e "$queue" ] && echo none >"$queue"
done

/sbin/wadi-agent &

# A shell for whoever looks around, on the serial console.
while :; do
  setsid cttyhack sh
  sleep 1
done
