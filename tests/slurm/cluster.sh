#!/bin/bash
# A real Slurm with virtual nodes on one Debian machine, for root; no systemd is needed.
#   tests/slurm/cluster.sh up      install what is missing, write the configuration, start, wait for idle nodes
#   tests/slurm/cluster.sh down    cancel all jobs and stop the daemons that this script started
#   tests/slurm/cluster.sh status
# Exit code 77: Slurm cannot run here; the reason is in the last line.
# It writes /etc/slurm, a key in /etc/munge, and names of nodes into /etc/hosts: use a machine without a Slurm of its own.
set -euo pipefail
nodes=${NODES:-4} cores=${CORES:-4} gpus=2 state=${STATE:-/tmp/mpitrain-slurm}
host=$(hostname -s) run=$state/run
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin # the daemons are there

say() { printf '[slurm %3ss] %s\n' "$SECONDS" "$*"; }
unable() { say "no Slurm here: $*"; exit 77; }

# Return whether the file $1 holds the process number of a live program $2.
is_alive() { [ -s "$1" ] && [ "$(cat "/proc/$(cat "$1")/comm" 2>/dev/null)" = "$2" ]; }

end() { # pid file, program
  is_alive "$1" "$2" || { rm -f "$1"; return 0; }
  local pid; pid=$(cat "$1")
  kill -TERM "$pid"
  for _ in $(seq 150); do [ -d "/proc/$pid" ] || break; sleep 0.1; done
  [ ! -d "/proc/$pid" ] || kill -KILL "$pid" || true
  rm -f "$1"
}

install_packages() {
  local wanted=(munge slurmctld slurmd slurm-client libpmix2 libpmi2-0 libpmi0) missing=() package
  for package in "${wanted[@]}"; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  # Without systemd the packages must not start their own services.
  local policy=/usr/sbin/policy-rc.d is_ours=
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy; chmod 755 $policy; is_ours=1; }
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
    >"$state/apt.log" 2>&1 || { [ -z "$is_ours" ] || rm -f $policy; unable "apt-get: $(tail -1 "$state/apt.log")"; }
  [ -z "$is_ours" ] || rm -f $policy
}

configure() {
  mkdir -p /etc/slurm "$state"/{run,log,controller,dev}
  # The plugin of PMIx opens libpmix.so, which Debian ships in the package for developers alone.
  local pmix=/usr/lib/$(uname -m)-linux-gnu/pmix2/lib
  [ -e "$pmix/libpmix.so" ] || ln -s libpmix.so.2 "$pmix/libpmix.so"
  # proctrack/cgroup sends TERM to the batch shell and to srun's tasks alone, as most clusters do.
  local track=linuxproc
  if mkdir /sys/fs/cgroup/freezer/mpitrain_probe 2>/dev/null; then rmdir /sys/fs/cgroup/freezer/mpitrain_probe; track=cgroup; fi
  {
    cat <<END
ClusterName=mpitrain
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job waits until its old credential has expired: 120 s by default.
AuthInfo=cred_expire=5
StateSaveLocation=$state/controller
SlurmdSpoolDir=$state/spool.%n
# Nodes with one folder for temporary files would collide in the start of PMIx.
TmpFS=$state/tmp.%n
SlurmctldPidFile=$run/slurmctld.pid
SlurmdPidFile=$run/slurmd.%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.%n.log
ProctrackType=proctrack/$track
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
# The nodes together have more cores than the machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
InactiveLimit=0
MinJobAge=3600
KillWait=10
AccountingStorageType=accounting_storage/none
END
    for node in $(seq "$nodes"); do
      echo "NodeName=node$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((17000 + node)) CPUs=$cores RealMemory=4000 Gres=gpu:$gpus"
    done
    echo "PartitionName=main Nodes=node[1-$nodes] Default=YES MaxTime=1-0 DefaultTime=10 State=UP"
  } >/etc/slurm/slurm.conf
  # slurmd accepts device files alone as GPUs: copies of /dev/null.
  for number in $(seq 0 $((gpus - 1))); do [ -c "$state/dev/nvidia$number" ] || mknod "$state/dev/nvidia$number" c 1 3; done
  echo "NodeName=node[1-$nodes] Name=gpu File=$state/dev/nvidia[0-$((gpus - 1))]" >/etc/slurm/gres.conf
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=/sys/fs/cgroup CgroupAutomount=no ConstrainCores=no \
    ConstrainRAMSpace=no ConstrainDevices=no >/etc/slurm/cgroup.conf
  for node in $(seq "$nodes"); do grep -qw "node$node" /etc/hosts || echo "127.0.0.1 node$node" >>/etc/hosts; done
}

answers() { munge -n </dev/null 2>/dev/null | unmunge >/dev/null 2>&1; }

start_munge() {
  answers && return
  install -d -o munge -g munge -m 755 /run/munge
  install -d -o munge -g munge -m 700 /var/log/munge /var/lib/munge /etc/munge
  if [ ! -s /etc/munge/munge.key ]; then
    dd if=/dev/urandom of=/etc/munge/munge.key bs=128 count=1 status=none
    chown munge:munge /etc/munge/munge.key; chmod 400 /etc/munge/munge.key
  fi
  runuser -u munge -- /usr/sbin/munged
  for _ in $(seq 50); do answers && return; sleep 0.1; done
  unable "munged does not answer"
}

up() {
  [ "$(id -u)" = 0 ] || unable "this needs root"
  command -v apt-get >/dev/null || unable "this needs apt-get"
  if sinfo -h >/dev/null 2>&1 && ! is_alive "$run/slurmctld.pid" slurmctld; then unable "another Slurm answers on this machine"; fi
  mkdir -p "$state"
  install_packages; configure; start_munge
  is_alive "$run/slurmctld.pid" slurmctld || slurmctld || unable "slurmctld does not start"
  for node in $(seq "$nodes"); do
    is_alive "$run/slurmd.node$node.pid" slurmd && continue
    mkdir -p "$state/spool.node$node" "$state/tmp.node$node"
    # Its own UTS namespace gives each node its own host name. The wheel of Open MPI has no munge in PMIx.
    unshare --uts sh -c "hostname node$node && exec env PMIX_MCA_psec=native slurmd -N node$node" || unable "slurmd of node$node does not start"
  done
  local ready=0
  for _ in $(seq 300); do
    ready=$(sinfo -h -N -o %T 2>/dev/null | grep -cE '^(idle|mixed|allocated)$' || true)
    [ "$ready" = "$nodes" ] && { say "$ready nodes are ready"; return; }
    sleep 0.2
  done
  unable "$ready of $nodes nodes are ready; see $state/log"
}

down() {
  if is_alive "$run/slurmctld.pid" slurmctld; then
    scancel --user=root 2>/dev/null || true
    for _ in $(seq 75); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
  fi
  end "$run/slurmctld.pid" slurmctld
  for file in "$run"/slurmd.*.pid; do [ ! -e "$file" ] || end "$file" slurmd; done
  say "stopped; munged still runs"
}

case "${1:-}" in
  up) up ;;
  down) down ;;
  status) sinfo -N -l; squeue ;;
  *) echo "usage: $0 up|down|status" >&2; exit 2 ;;
esac
