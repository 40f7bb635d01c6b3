#!/bin/bash
# Several hosts on one machine: network namespaces joined by a switch with a rate and a delay. Needs root and a C compiler.
#
#   hosts.sh up N         make N hosts, 10.77.0.1 to 10.77.0.N; RATE=200 (Mbit/s), DELAY_US=1000 (one way), MTU=9000, QUEUE_KB=512
#   hosts.sh down         remove them
#   hosts.sh on I CMD...  run a command on host I
#   hosts.sh mpi N CMD... run a command on N ranks, one per host, with the mpirun or mpiexec found first on PATH;
#                         for N also 2,1,1: so many ranks on each host
#
# mpi starts ranks through agent.sh in place of ssh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
state=${STATE:-/run/mpitrain-hosts} # where root alone can write: the switch in it is run by root
prefix=mth manager=mthmgr net=10.77.0

up() {
    local n=$1 rate=${RATE:-200} delay=${DELAY_US:-1000} mtu=${MTU:-9000} queue=${QUEUE_KB:-512}
    if ! { command -v cc && command -v ip && [[ -c /dev/net/tun ]] && ip netns add ${prefix}0 && ip netns del ${prefix}0; } &> /dev/null
    then
        echo "Hosts are made out of network namespaces here: that needs root, iproute2, a C compiler and /dev/net/tun." >&2
        exit 2
    fi
    down
    mkdir -p "$state"
    [[ $state/switch -nt $here/switch.c ]] || cc -O2 -o "$state/switch" "$here/switch.c"
    rm -f "$state/switch.out" # or the "ready" of the switch before would be taken for this one's
    for ((i = 1; i <= n; i++)); do ip netns add $prefix$i; done
    setsid "$state/switch" $prefix "$n" "$rate" "$delay" "$queue" $manager > "$state/switch.out" 2> "$state/switch.err" < /dev/null &
    echo $! > "$state/switch.pid"
    for ((k = 0; k < 50; k++)); do grep -qs ready "$state/switch.out" && break; sleep 0.1; done
    grep -q ready "$state/switch.out" || { cat "$state/switch.err" >&2; exit 1; }
    ip link set $manager mtu "$mtu" up
    ip addr add $net.254/24 dev $manager
    for ((i = 1; i <= n; i++)); do
        ip -n $prefix$i link set lo up
        ip -n $prefix$i link set eth0 mtu "$mtu" up
        ip -n $prefix$i addr add $net.$i/24 dev eth0
        ip -n $prefix$i route replace $net.0/24 dev eth0 scope link src $net.$i congctl cubic # what most hosts run
    done
}

down() {
    if [[ -f $state/switch.pid ]]; then
        kill "$(cat "$state/switch.pid")" 2> /dev/null || true
        rm "$state/switch.pid"
        sleep 0.2
    fi
    local name
    for name in $(ip netns list | awk '{print $1}' | grep -E "^$prefix[0-9]+$" || true); do ip netns del "$name"; done
}

on() {
    local host=$prefix$1
    shift
    exec ip netns exec "$host" unshare --uts bash -c "hostname $host; $*"
}

mpi() {
    local ranks=0 slots listed="" i
    [[ $1 == *,* ]] && IFS=, read -ra slots <<< "$1" || mapfile -t slots < <(yes 1 | head -n "$1")
    shift
    for i in "${!slots[@]}"; do
        listed+="$net.$((i + 1)):${slots[i]},"
        ranks=$((ranks + slots[i]))
    done
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
    if mpirun --version 2>&1 | grep -q "Open MPI"; then
        tr , '\n' <<< "${listed%,}" | sed 's/:/ slots=/' > "$state/hostfile"
        mpirun --prtemca plm_ssh_agent "$here/agent.sh" --prtemca oob_tcp_if_include $net.0/24 --hostfile "$state/hostfile" \
            -n "$ranks" --map-by slot --bind-to none --mca pml ob1 --mca btl sm,tcp,self --mca btl_tcp_if_include $net.0/24 \
            --mca osc ^ucx "$@"
    else
        MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp FI_TCP_IFACE=eth0 mpiexec -launcher ssh -launcher-exec "$here/agent.sh" \
            -hosts "${listed%,}" -n "$ranks" -iface $manager "$@"
    fi
}

agent() { # as ssh: [options] HOST COMMAND...
    while [[ $1 == -* ]]; do shift; done
    local host=${1##*.}
    shift
    on "$host" "$@"
}

"$@"
