#!/bin/sh
# Runs commands for the host, over the virtio-serial port `wadi.exec`.
#
# From the host, a line and then exactly as many bytes as it says:
#   hello TOKEN                       answered by: hello TOKEN
#   run ID COMMAND-BYTES STDIN-BYTES  the command line for sh -c, then what it reads
#   kill ID SIGNAL                    to the command's whole process group
# To the host, once a command has ended, in any order:
#   done ID STATUS STDOUT-BYTES STDERR-BYTES  then those bytes
# Commands run side by side; outputs are written whole, one at a time.
# shellcheck shell=dash

# The host tells the names of ports a moment after the ports themselves.
port=
looks=0
while [ -z "$port" ] && [ "$looks" -lt 50 ]; do
  [ "$looks" -eq 0 ] || sleep 0.1
  looks=$((looks + 1))
  for name in /sys/class/virtio-ports/*/name; do
    [ -e "$name" ] || continue
    if [ "$(cat "$name")" = wadi.exec ]; then
      port=/dev/$(basename "$(dirname "$name")")
    fi
  done
done
if [ -z "$port" ]; then
  echo "agent: there is no port wadi.exec"
  exit 0
fi

jobs=/tmp/.jobs
mkdir -p "$jobs"
mkfifo "$jobs/ended"
exec 3<>"$port" 4<>"$jobs/ended"

# Takes exactly $1 bytes from the port: dd, because it never reads ahead.
take() {
  if [ "$1" -gt 0 ]; then
    dd bs="$1" count=1 iflag=fullblock <&3 2>/dev/null
  fi
}

# Only this one writes to the port, so that answers do not mix.
write_answers() {
  while read -r verb id status <&4; do
    if [ "$verb" = hello ]; then
      printf 'hello %s\n' "$id" >&3
      continue
    fi
    printf 'done %s %s %s %s\n' "$id" "$status" "$(stat -c %s "$jobs/$id.out")" "$(stat -c %s "$jobs/$id.err")" >&3
    cat "$jobs/$id.out" "$jobs/$id.err" >&3
    rm -f "$jobs/$id".*
  done
}

start() {
  setsid sh "$jobs/$1.sh" <"$jobs/$1.in" >"$jobs/$1.out" 2>"$jobs/$1.err" 3>&- 4>&- &
  echo $! >"$jobs/$1.pid"
  wait $!
  echo "done $1 $?" >&4
}

write_answers &
while :; do
  # End of file means that the host is not there just now.
  if ! read -r verb id first second <&3; then
    sleep 0.05
    continue
  fi
  case "$verb" in
    hello)
      echo "hello $id" >&4
      ;;
    run)
      take "$first" >"$jobs/$id.sh"
      take "$second" >"$jobs/$id.in"
      start "$id" &
      ;;
    kill)
      [ -e "$jobs/$id.pid" ] && kill -"$first" -"$(cat "$jobs/$id.pid")" 2>/dev/null
      ;;
  esac
done
