/* switch: a small Ethernet switch in user space, for kernels that cannot shape traffic themselves (no sch_netem).
 *
 *     switch PREFIX HOSTS RATE_MBIT DELAY_US QUEUE_KB MANAGER
 *
 * It opens a TAP interface eth0 in each network namespace PREFIX1 .. PREFIX<HOSTS>, and one named MANAGER in its own.
 * A frame from one host to another
 *     waits for its sender's uplink (RATE; while 32 KB wait there the TAP is not read, so the sender's kernel waits),
 *     travels for DELAY,
 *     waits for its receiver's downlink (RATE; at most QUEUE_KB, then frames are dropped, as in a real switch).
 * Frames to and from the manager are neither delayed nor limited. RATE 0 means no limit.
 * Prints "ready" once all interfaces exist; counters of every port when it ends.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PORTS = 65, MAX_FRAME = 9216 + 64, UPLINK_LIMIT = 32 * 1024, BURST = 16 };

typedef struct frame {
    struct frame *next;
    uint64_t due; /* nanoseconds: when it leaves the queue it is in */
    int length, to;
    unsigned char data[];
} frame;

typedef struct {
    frame *first, *last;
    long bytes;
} queue;

typedef struct {
    int tap;
    int has_address;
    unsigned char address[6];
    queue up, wire, down;
    uint64_t up_free, down_free; /* when the link has sent all that was given to it */
    uint64_t frames_in, bytes_in, frames_out, bytes_out, dropped;
} port;

static port ports[MAX_PORTS]; /* port 0 is the manager */
static int n_ports;
static volatile sig_atomic_t stop;

static void on_signal(int number) { (void)number; stop = 1; }

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void fail(const char *what) { perror(what); exit(1); }

static void push(queue *q, frame *f) {
    f->next = NULL;
    if (q->last) q->last->next = f; else q->first = f;
    q->last = f;
    q->bytes += f->length;
}

static frame *pop(queue *q) {
    frame *f = q->first;
    q->first = f->next;
    if (!q->first) q->last = NULL;
    q->bytes -= f->length;
    return f;
}

static int open_tap(const char *name) {
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (tap < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(tap, TUNSETIFF, &request) < 0) fail("TUNSETIFF");
    return tap;
}

static void open_ports(const char *prefix, int hosts, const char *manager) {
    int home = open("/proc/self/ns/net", O_RDONLY);
    ports[0].tap = open_tap(manager);
    for (int i = 1; i <= hosts; i++) {
        char path[128];
        snprintf(path, sizeof path, "/var/run/netns/%s%d", prefix, i);
        int space = open(path, O_RDONLY);
        if (space < 0 || setns(space, CLONE_NEWNET)) fail(path);
        close(space);
        ports[i].tap = open_tap("eth0");
    }
    if (setns(home, CLONE_NEWNET)) fail("setns");
    n_ports = hosts + 1;
}

/* The port that owns a frame's destination address; -1 for all of them. */
static int destination(const unsigned char *data) {
    if (data[0] & 1) return -1; /* broadcast or multicast */
    for (int i = 0; i < n_ports; i++)
        if (ports[i].has_address && !memcmp(ports[i].address, data, 6)) return i;
    return -1;
}

static void enter(int from, const unsigned char *data, int length, double ns_per_byte) {
    port *p = &ports[from];
    p->frames_in++;
    p->bytes_in += length;
    memcpy(p->address, data + 6, 6);
    p->has_address = 1;
    int to = destination(data);
    uint64_t arrived = now(), due = arrived;
    int shaped = from > 0 && to > 0;
    if (shaped) {
        due = (p->up_free > arrived ? p->up_free : arrived) + (uint64_t)(length * ns_per_byte);
        p->up_free = due;
    }
    for (int i = 0; i < n_ports; i++) {
        if (i == from || (to >= 0 && i != to)) continue;
        frame *f = malloc(sizeof *f + length);
        f->length = length;
        f->to = i;
        f->due = due;
        memcpy(f->data, data, length);
        push(shaped ? &p->up : &ports[i].down, f);
    }
}

/* Move every frame that is due one queue on; return when the next one will be. */
static uint64_t advance(uint64_t delay, long queue_limit, double ns_per_byte) {
    uint64_t t = now(), next = t + 1000000000ull;
    for (int i = 0; i < n_ports; i++) {
        for (queue *q = &ports[i].up; q->first && q->first->due <= t;) {
            frame *f = pop(q);
            f->due += delay;
            push(&ports[i].wire, f);
        }
        for (queue *q = &ports[i].wire; q->first && q->first->due <= t;) {
            frame *f = pop(q);
            port *receiver = &ports[f->to];
            if (receiver->down.bytes + f->length > queue_limit) {
                receiver->dropped++;
                free(f);
                continue;
            }
            f->due = (f->due > receiver->down_free ? f->due : receiver->down_free) + (uint64_t)(f->length * ns_per_byte);
            receiver->down_free = f->due;
            push(&receiver->down, f);
        }
    }
    for (int i = 0; i < n_ports; i++) {
        for (queue *q = &ports[i].down; q->first && q->first->due <= t;) {
            frame *f = pop(q);
            if (write(ports[i].tap, f->data, f->length) < 0 && errno != EAGAIN && errno != EIO) perror("write");
            ports[i].frames_out++;
            ports[i].bytes_out += f->length;
            free(f);
        }
        queue *waiting[] = {&ports[i].up, &ports[i].wire, &ports[i].down};
        for (int k = 0; k < 3; k++)
            if (waiting[k]->first && waiting[k]->first->due < next) next = waiting[k]->first->due;
    }
    return next;
}

int main(int count, char **words) {
    if (count != 7) {
        fprintf(stderr, "usage: switch PREFIX HOSTS RATE_MBIT DELAY_US QUEUE_KB MANAGER\n");
        return 2;
    }
    double rate = atof(words[3]) * 1e6, ns_per_byte = rate > 0 ? 8e9 / rate : 0;
    uint64_t delay = strtoull(words[4], NULL, 10) * 1000ull;
    long queue_limit = atol(words[5]) * 1024;
    open_ports(words[1], atoi(words[2]), words[6]);
    prctl(PR_SET_TIMERSLACK, 1000);
    struct sched_param priority = {.sched_priority = 10}; /* or ranks that spin would hold up the network */
    if (sched_setscheduler(0, SCHED_FIFO, &priority)) perror("SCHED_FIFO");
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    printf("ready\n");
    fflush(stdout);

    while (!stop) {
        uint64_t next = advance(delay, queue_limit, ns_per_byte), t = now();
        struct pollfd polled[MAX_PORTS];
        for (int i = 0; i < n_ports; i++)
            polled[i] = (struct pollfd){ports[i].tap, i == 0 || ports[i].up.bytes < UPLINK_LIMIT ? POLLIN : 0, 0};
        uint64_t wait = next > t ? next - t : 0;
        struct timespec timeout = {wait / 1000000000ull, wait % 1000000000ull};
        if (ppoll(polled, n_ports, &timeout, NULL) < 0 && errno != EINTR) fail("poll");
        for (int i = 0; i < n_ports; i++)
            for (int k = 0; polled[i].revents & POLLIN && k < BURST && (i == 0 || ports[i].up.bytes < UPLINK_LIMIT); k++) {
                unsigned char data[MAX_FRAME];
                int length = read(ports[i].tap, data, sizeof data);
                if (length < 14) break;
                enter(i, data, length, ns_per_byte);
            }
    }
    for (int i = 0; i < n_ports; i++)
        fprintf(stderr, "port %d: in %lu frames %lu bytes, out %lu frames %lu bytes, dropped %lu\n", i, ports[i].frames_in,
                ports[i].bytes_in, ports[i].frames_out, ports[i].bytes_out, ports[i].dropped);
    return 0;
}
