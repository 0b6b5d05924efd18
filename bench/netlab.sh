#!/usr/bin/env bash
# netlab: N "hosts" on one machine. Each is a network namespace with one rate-limited veth link into a shared bridge, and runs
# one torchrun node, so that a distributed program sees a real, slow network and its wall-clock overlap can be measured.
#
#   bench/netlab.sh [-n HOSTS] [-r RATE] [-d DELAY] [-p PROCESSES_PER_HOST] -- SCRIPT.py|-m MODULE [ARGS...]
#
#   -n  number of hosts (default 2)
#   -r  rate of each host's link, each way, as tc writes it (default 1gbit; "none" for no limit)
#   -d  one-way delay of each link (default none), e.g. 100us
#   -p  processes per host (default 1)
#   -c  command to run instead of torchrun; it gets MASTER_ADDR, MASTER_PORT, NNODES and NODE_RANK
#
# Needs root, iproute2 (ip, tc) and the kernel's tbf queue. Host k has the address 10.77.0.(k+1), on interface eth0. Output
# of host 0 is shown; that of the others goes to a log that is printed when they fail. Everything is removed at the end.
set -euo pipefail

hosts=2 rate=1gbit delay="" processes=1 command=""
while getopts "n:r:d:p:c:h" option; do
  case $option in
    n) hosts=$OPTARG ;;
    r) rate=$OPTARG ;;
    d) delay=$OPTARG ;;
    p) processes=$OPTARG ;;
    c) command=$OPTARG ;;
    *) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done
shift $((OPTIND - 1))

fail() { echo "netlab: $*" >&2; exit 3; }
[ "$(id -u)" = 0 ] || fail "needs root (network namespaces); not run"
command -v ip >/dev/null && command -v tc >/dev/null || fail "needs ip and tc (package iproute2); not run"
[ -n "$command" ] || [ $# -gt 0 ] || fail "no program given; see -h"
case $hosts$processes in *[!0-9]*) fail "-n and -p take whole numbers" ;; esac

id=tw$$
logs=$(mktemp -d)
pids=()
cleanup() {
  for pid in "${pids[@]:-}"; do [ -n "$pid" ] && kill -TERM -- "-$pid" 2>/dev/null || true; done
  for ((k = 0; k < hosts; k++)); do ip netns del "$id-$k" 2>/dev/null || true; done
  ip netns del "$id-switch" 2>/dev/null || true
  rm -rf "$logs"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip netns add "$id-switch" 2>/dev/null || fail "cannot make a network namespace here; not run"
ip -n "$id-switch" link add bridge type bridge
ip -n "$id-switch" link set bridge up

# tbf on both ends of a link: what the host sends, and what the switch sends to it. The burst covers 2 ms at the rate, so that
# the limit holds over the time of a small bucket; the queue holds 50 ms, so that TCP is not starved by drops.
limit() {  # limit NAMESPACE INTERFACE
  local parent=root
  if [ "$rate" != none ]; then
    tc -n "$1" qdisc add dev "$2" root handle 1: tbf rate "$rate" burst 256kb latency 50ms
    parent="parent 1:"
  fi
  # shellcheck disable=SC2086
  [ -z "$delay" ] || tc -n "$1" qdisc add dev "$2" $parent netem delay "$delay" limit 10000
}

for ((k = 0; k < hosts; k++)); do
  ip netns add "$id-$k"
  ip -n "$id-$k" link set lo up
  ip link add "$id-h$k" type veth peer name "$id-s$k" 2>/dev/null || fail "cannot make a veth link; not run"
  ip link set "$id-h$k" netns "$id-$k" name eth0
  ip link set "$id-s$k" netns "$id-switch" name "port$k"
  ip -n "$id-switch" link set "port$k" master bridge up
  ip -n "$id-$k" addr add "10.77.0.$((k + 1))/24" dev eth0
  ip -n "$id-$k" link set eth0 up
  limit "$id-$k" eth0
  limit "$id-switch" "port$k"
done

torchrun=${TORCHRUN:-$(command -v torchrun || true)}
[ -n "$command" ] || [ -n "$torchrun" ] || fail "torchrun is not on PATH (set TORCHRUN)"
for ((k = 0; k < hosts; k++)); do
  environment=(MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 NNODES="$hosts" NODE_RANK="$k"
    GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 NETLAB_RATE="$rate" NETLAB_HOSTS="$hosts")
  if [ -n "$command" ]; then
    program=(bash -c "$command")
  else
    program=("$torchrun" --nnodes "$hosts" --node-rank "$k" --nproc-per-node "$processes"
      --master-addr 10.77.0.1 --master-port 29500 "$@")
  fi
  if [ "$k" = 0 ]; then
    setsid ip netns exec "$id-$k" env "${environment[@]}" "${program[@]}" &
  else
    setsid ip netns exec "$id-$k" env "${environment[@]}" "${program[@]}" >"$logs/$k" 2>&1 &
  fi
  pids+=($!)
done

status=0
for ((k = 0; k < hosts; k++)); do
  if ! wait "${pids[$k]}"; then
    status=1
    [ "$k" = 0 ] || { echo "netlab: host $k failed:" >&2; tail -n 40 "$logs/$k" >&2; }
  fi
done
exit $status
