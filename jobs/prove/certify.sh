#!/usr/bin/env bash
# certify names the node at fault. Four hosts are network namespaces behind a switch (jobs/hosts), and each fault is planted on
# the third: a slow link, wrong bytes, a slow core, another BLAS, a flipped bit, no locks, a small /dev/shm, a wrong clock, no
# answer. A run without a fault comes first. Needs root, tc, a C compiler; the slow core needs a writable cgroup, and the clock
# needs faketime.
#     bash jobs/prove/certify.sh [FAULT ...]        default: all; about half a minute each on an idle machine
#     REPEATS=30 bash jobs/prove/certify.sh none    30 runs without a fault
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
hosts=$here/hosts/hosts.sh
folder=$(mktemp -d)
trap '$hosts down; rm -r "$folder"; rmdir "$group" 2> /dev/null || true' EXIT
faults=("$@")
((${#faults[@]})) || faults=(none link bytes core blas bit locks shm clock missing)
wrong=0

cc -shared -fPIC -o "$folder/locks.so" -x c - << 'CODE'
#include <errno.h>
int flock(int descriptor, int operation) { errno = ENOLCK; return -1; }
CODE

cat > "$folder/bit.py" << 'CODE'
import numpy as np
product = np.matmul
def flipped(*operands, **options):
    found = product(*operands, **options)
    if found.dtype == np.float32:
        found.reshape(-1)[:1].view(np.uint32)[:] ^= 1 << 12
    return found
np.matmul = flipped
from mpitrain.cli import main
main()
CODE

cat > "$folder/bytes.py" << 'CODE'
import numpy as np
from mpitrain.transport import mpi
class Corrupted(mpi.ReceiveRequest):
    def __init__(self, transport, request, array, *rest):
        super().__init__(transport, request, array, *rest)
        self._array = array
    def _finish(self):
        if self._array.nbytes >= 4096:
            self._array.reshape(-1).view(np.uint8)[1000] ^= 1
        return super()._finish()
mpi.ReceiveRequest = Corrupted
from mpitrain.cli import main
main()
CODE

cat > "$folder/faulty.sh" << 'CODE'
#!/usr/bin/env bash
# faulty.sh FAULT COMMAND ...   run a command, with the fault on the third host alone
fault=$1
shift
export OPENBLAS_NUM_THREADS=1
[[ $(hostname) == mth3 ]] || exec "$@"
case $fault in
    core)
        # The /sys of a network namespace has no cgroups, so the script outside moves this process.
        echo $$ > "$FOLDER/pid"
        while [[ -e $FOLDER/pid ]]; do sleep 0.1; done ;;
    blas) export OPENBLAS_CORETYPE=Nehalem ;;
    bit | bytes) shift 3; exec python "$FOLDER/$fault.py" "$@" ;;
    locks) export LD_PRELOAD=$FOLDER/locks.so ;;
    shm) exec unshare --mount bash -c 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"' bash "$@" ;;
    clock) exec faketime -f +5s "$@" ;;
esac
exec "$@"
CODE
chmod +x "$folder/faulty.sh"
export FOLDER=$folder
root=/sys/fs/cgroup
[[ -d $root/cpu ]] && root=$root/cpu # version 1
group=$root/mpitrain-certify

slow_core() { # give the process that announces itself a twentieth of a core
    mkdir -p "$group"
    if [[ -e $group/cpu.max ]]; then
        echo "5000 100000" > "$group/cpu.max"
    else
        echo 100000 > "$group/cpu.cfs_period_us" && echo 5000 > "$group/cpu.cfs_quota_us"
    fi
    while [[ ! -s $folder/pid ]]; do sleep 0.1; done
    cat "$folder/pid" > "$group/cgroup.procs" && rm "$folder/pid"
}

judged() { # FAULT FILE CODE: check the verdicts
    local bad
    bad=$(awk '/^[^ ]+ +FAIL  /{print $1}' "$2" | sort -u | xargs)
    local right=mth3 code=1
    [[ $1 == none ]] && right="" code=0
    [[ $1 == missing ]] && right=10.77.0.9
    if [[ $bad == "$right" && $3 == "$code" ]]; then
        echo "$1: as planted: $(grep -m 1 '  FAIL  ' "$2" || echo all pass)"
    else
        echo "$1: WRONG: '$bad' fail, exit code $3" && cat "$2" "$2.err"
        wrong=1
    fi
}

if [[ -n ${REPEATS:-} ]]; then
    mapfile -t faults < <(for ((k = 0; k < REPEATS; k++)); do printf '%s\n' "${faults[@]}"; done)
fi
RATE=200 "$hosts" up 4
for fault in "${faults[@]}"; do
    if [[ $fault == core && ! -w $root/cgroup.procs ]] || { [[ $fault == clock ]] && ! command -v faketime > /dev/null; }; then
        echo "$fault: not shown: this machine cannot plant it"
        continue
    fi
    [[ $fault == link ]] && ip netns exec mth3 tc qdisc add dev eth0 root tbf rate 20mbit burst 32kb latency 50ms
    [[ $fault == core ]] && slow_core &
    code=0
    if [[ $fault == missing ]]; then
        # The launcher's options are those of hosts.sh.
        python -m mpitrain certify --hosts 10.77.0.1,10.77.0.2,10.77.0.9,10.77.0.4 --agent "$here/hosts/agent.sh" --dir "$folder" \
            --with "--prtemca plm_ssh_agent $here/hosts/agent.sh --prtemca oob_tcp_if_include 10.77.0.0/24 \
                --mca pml ob1 --mca btl sm,tcp,self --mca btl_tcp_if_include 10.77.0.0/24" \
            > "$folder/out" 2> "$folder/out.err" || code=$?
    else
        # Links of hosts that share cores are compared with limits alone.
        echo "link_GBs = $([[ $fault == link ]] && echo 0.008 || echo 0.0)" > "$folder/limits.toml"
        "$hosts" mpi 4 "$folder/faulty.sh" "$fault" python -m mpitrain certify --dir "$folder" --expect "$folder/limits.toml" \
            > "$folder/out" 2> "$folder/out.err" || code=$?
    fi
    judged "$fault" "$folder/out" "$code"
    [[ $fault == link ]] && ip netns exec mth3 tc qdisc del dev eth0 root
done
exit $wrong
