#!/usr/bin/env bash
# lab.sh - several "hosts" on one Linux machine, for testing a real multi-node cluster.
# Every host has its own net, pid, mount, uts and ipc namespace, its own IP, hostname, ssh daemon
# (which is pid 1 of the host), home, /tmp, /dev/shm and /var/log. Run "lab.sh help" for the commands.
set -euo pipefail

LAB=${NETLAB_NAME:-rtlab}                   # prefix of everything made here; several labs can coexist
D=${NETLAB_DIR:-/var/tmp/$LAB}              # state: keys, pids, the hosts' disks
NET=${NETLAB_NET:-10.77.0}                  # first three octets of the lab's /24
SHM=${NETLAB_SHM:-1g}                       # size of each host's /dev/shm
SELF=$(readlink -f "${BASH_SOURCE[0]}")
SW=$LAB-sw                                  # the "switch": a namespace that holds only the bridge

die() { echo "lab.sh: $*" >&2; exit 1; }
ip_of() { awk -v h="$1" '$2==h {print $1}' "$D/hosts"; }
hosts() { [ -e "$D/hosts" ] && awk -v n="$NET." 'index($1,n)==1 {print $2}' "$D/hosts" || true; }
known() { [ -n "$(ip_of "$1" 2>/dev/null)" ] || die "no host '$1' (hosts: $(hosts | xargs))"; }
port() { echo "p${1##*.}"; }                # name of a host's port on the switch: p2, p3, ...
# pid (as seen from outside) of the host's pid 1; empty when the host is off
init_pid() {
  local p
  p=$(cat "$D/h/$1/pid" 2>/dev/null) && [ "/proc/$p/ns/net" -ef "/run/netns/$LAB-$1" ] && echo "$p" || true
}

usage() {
  cat <<USAGE
usage: lab.sh up [-s PATH]... HOST...   make the hosts (again: adds missing ones, boots those that are off);
                                        -s: a path of this machine that all hosts see (venv, repo, storage)
       lab.sh exec HOST CMD [ARG...]    run a command on a host (no CMD: an interactive login shell)
       lab.sh cut HOST | heal HOST      unplug / plug in its network cable (sockets stay open, packets are lost)
       lab.sh crash HOST | boot HOST    power off without a goodbye (nothing sends FIN) / power on again
       lab.sh ps HOST | ip HOST | key | status
       lab.sh down                      end every process of the lab, remove namespaces and state
environment: NETLAB_NAME=$LAB NETLAB_DIR=$D NETLAB_NET=$NET NETLAB_SHM=$SHM
USAGE
}

# ---- inside the new namespaces: arrange the file system, then become sshd ----------------------------
host_init() {
  local h=$1 me=$D/h/$1 i=0 p
  mount --make-rprivate /
  while read -r p; do                       # hold the shared paths before /tmp and /root are covered
    i=$((i + 1)); mkdir -p "$me/keep/$i"; mount --rbind "$p" "$me/keep/$i"
  done <"$D/share"
  mount --bind "$me/home" "$HOME"
  mount --bind "$me/tmp" /tmp
  mount --bind "$me/log" /var/log
  mount -t tmpfs -o "mode=1777,size=$SHM" tmpfs /dev/shm
  mount --bind "$D/hosts" /etc/hosts
  i=0
  while read -r p; do i=$((i + 1)); mkdir -p "$p"; mount --rbind "$me/keep/$i" "$p"; done <"$D/share"
  hostname "$h"
  ip link set lo up
  mkdir -p /run/sshd
  cd /
  ulimit -n 65536 2>/dev/null || true
  exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "$(command -v sshd)" -D -E /var/log/sshd.log -f "$D/ssh/sshd_config"
}

boot() {
  local h=$1 me=$D/h/$1 ip ns=$LAB-$1 i
  ip=$(ip_of "$h")
  if [ -z "$(init_pid "$h")" ]; then
    mkdir -p "$me"/{home/.ssh,tmp,log,keep}; chmod 700 "$me/home/.ssh"; chmod 1777 "$me/tmp"
    cp "$D/ssh/id.pub" "$me/home/.ssh/authorized_keys"
    [ -e "$me/home/.profile" ] || cp /etc/skel/.profile /etc/skel/.bashrc "$me/home/" 2>/dev/null || true
    if ! ip netns pids "$ns" >/dev/null 2>&1; then
      ip netns add "$ns"
      ip link add "$(port "$ip")" netns "$SW" type veth peer name eth0 netns "$ns"
      ip -n "$SW" link set "$(port "$ip")" master br0
      ip -n "$ns" addr add "$ip/24" dev eth0
      ip -n "$ns" link set eth0 up
    fi
    rm -f "$me/log/sshd.log"
    # --kill-child: when this unshare goes, so does the whole host
    setsid ip netns exec "$ns" unshare --pid --fork --kill-child --mount --uts --ipc --mount-proc \
      "$SELF" __init "$h" >"$me/boot.log" 2>&1 </dev/null &
    local un=$!
    for i in $(seq 100); do
      sleep 0.1
      [ -d "/proc/$un" ] || die "$h did not boot: $(cat "$me/boot.log")"
      pgrep -P "$un" >"$me/pid" || continue
      ! grep -qs 'Server listening' "$me/log/sshd.log" || break
    done
    [ "$i" -lt 100 ] || die "$h did not boot in 10 s: $(cat "$me/boot.log" "$me/log/sshd.log")"
  fi
  ip -n "$SW" link set "$(port "$ip")" up
}

halt() {                                    # ends every process of the host's pid namespace
  local p i; p=$(init_pid "$1"); [ -n "$p" ] || return 0
  kill -9 "$p"; for i in $(seq 50); do [ -d "/proc/$p" ] || break; sleep 0.1; done
  rm -f "$D/h/$1/pid"
}

up() {
  local share=() h p n
  while getopts s: o; do case $o in s) share+=("$(readlink -f "$OPTARG")") ;; *) usage; exit 2 ;; esac; done
  shift $((OPTIND - 1))
  [ "$(id -u)" = 0 ] || die "needs root"
  for p in ip unshare nsenter setsid pgrep sshd ssh-keygen; do
    command -v "$p" >/dev/null || die "$p is missing (Debian: iproute2 util-linux procps openssh-server)"
  done
  case $D/ in /tmp/* | "$HOME"/* | /dev/shm/*) die "NETLAB_DIR=$D lies under a path that hosts cover" ;; esac
  [ ! -e "$D" ] || [ -e "$D/ssh/sshd_config" ] || [ -z "$(ls -A "$D")" ] || die "NETLAB_DIR=$D holds something else"
  mkdir -p "$D/ssh" "$D/h"; touch "$D/share"
  for p in "${share[@]}"; do
    [ -d "$p" ] || die "-s $p is not a folder"
    grep -qxF "$p" "$D/share" || { [ -z "$(hosts)" ] || die "-s $p is new: lab.sh down first"; echo "$p" >>"$D/share"; }
  done
  [ -e "$D/hosts" ] || printf '127.0.0.1 localhost\n' >"$D/hosts"
  [ -e "$D/ssh/id" ] || ssh-keygen -q -t ed25519 -N '' -C "$LAB" -f "$D/ssh/id"
  [ -e "$D/ssh/host" ] || ssh-keygen -q -t ed25519 -N '' -f "$D/ssh/host"
  printf '%s\n' "HostKey $D/ssh/host" 'PermitRootLogin prohibit-password' 'PasswordAuthentication no' \
    'UsePAM no' 'PidFile none' 'MaxStartups 100' 'MaxSessions 100' 'Subsystem sftp internal-sftp' >"$D/ssh/sshd_config"
  ip netns pids "$SW" >/dev/null 2>&1 || {
    ip netns add "$SW"; ip -n "$SW" link add br0 type bridge forward_delay 0; ip -n "$SW" link set br0 up
  }
  for h; do
    [[ $h =~ ^[a-z][a-z0-9-]{0,30}$ && $h != localhost ]] || die "bad host name '$h'"
    n=$(($(hosts | wc -l) + 2)); [ $n -lt 255 ] || die "too many hosts"
    [ -n "$(ip_of "$h")" ] || echo "$NET.$n $h" >>"$D/hosts"     # written in place: hosts bind-mount this file
  done
  for h in $(hosts); do boot "$h"; done
  status
}

down() {
  local h
  for h in $(hosts); do
    halt "$h"; ! ip netns pids "$LAB-$h" >/dev/null 2>&1 || ip netns del "$LAB-$h"
  done
  ! ip netns pids "$SW" >/dev/null 2>&1 || ip netns del "$SW"
  [ ! -e "$D/ssh/sshd_config" ] || rm -rf --one-file-system "$D"   # only ever a folder that "up" made
}

enter() {                                   # a fresh environment, as after a login
  local h=$1 p; shift; p=$(init_pid "$h"); [ -n "$p" ] || die "$h is off"
  [ $# -gt 0 ] || set -- bash --login
  exec nsenter -t "$p" -n -p -m -u -i -- env -i HOME="$HOME" USER=root LOGNAME=root TERM="${TERM:-dumb}" \
    LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    sh -c 'cd; exec "$@"' sh "$@"
}

status() {
  local h ip
  for h in $(hosts); do
    ip=$(ip_of "$h")
    printf '%-12s %-15s %-4s link %s\n' "$h" "$ip" "$([ -n "$(init_pid "$h")" ] && echo on || echo off)" \
      "$(ip -n "$SW" -br link show "$(port "$ip")" 2>/dev/null | awk '{print $2}')"
  done
}

cmd=${1:-help}; [ $# -eq 0 ] || shift
case $cmd in
  help | -h | --help) usage; exit ;;
  __init) host_init "$1" ;;
  up) up "$@"; exit ;;
  down) down; exit ;;
  status) status; exit ;;
  key) echo "$D/ssh/id"; exit ;;
  ps | exec | cut | heal | crash | boot | ip) ;;
  *) usage >&2; exit 2 ;;
esac
h=${1:-}; [ -n "$h" ] || { usage >&2; exit 2; }
known "$h"; shift; P=$(port "$(ip_of "$h")")
case $cmd in
  exec) enter "$h" "$@" ;;
  ps) enter "$h" ps -eo pid,ni,args ww ;;
  ip) ip_of "$h" ;;
  cut) ip -n "$SW" link set "$P" down ;;
  heal) ip -n "$SW" link set "$P" up ;;
  crash) ip -n "$SW" link set "$P" down; halt "$h" ;;
  boot) boot "$h" ;;
esac
