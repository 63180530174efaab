/* Sends a stream of bytes over one TCP connection by one of the ways that the kernel has, and measures rate and
 * processor time of both ends.
 *
 * stream_probe listen ADDRESS PORT recv|uring BLOCK TOTAL
 * stream_probe connect ADDRESS PORT send|zerocopy|uring|uring_zc BLOCK TOTAL
 *
 *   send, recv   a system call a block, which copies
 *   zerocopy     send with MSG_ZEROCOPY: the kernel pins the block's pages and reports when it has sent them
 *   uring        io_uring, four blocks in flight, which copies
 *   uring_zc     io_uring with IORING_OP_SEND_ZC from a registered buffer
 *
 * BLOCK and TOTAL are bytes. Blocks rotate over 64 MiB. Each end prints a JSON line: bytes, seconds, processor seconds,
 * and, if the kernel was asked not to copy, the number of blocks that it copied all the same. The receiver compares the
 * first word of each block. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/errqueue.h>
#include <linux/io_uring.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define POOL ((size_t)64 << 20)
#define IN_FLIGHT 4

static char *pool;
static size_t block, total;
static long copied = -1;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double processor_seconds(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec)
        + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static char *block_at(size_t at)
{
    return pool + at % POOL;
}

/* The first word of the block that begins at byte `at` of the stream. */
static uint64_t mark(size_t at)
{
    return (at / block + 1) * 0x9e3779b97f4a7c15u;
}

static void put_mark(size_t at)
{
    uint64_t word = mark(at);
    memcpy(block_at(at), &word, sizeof word);
}

static void check(size_t at)
{
    uint64_t found;
    memcpy(&found, block_at(at), sizeof found);
    if (found != mark(at)) {
        fprintf(stderr, "the block at byte %zu has the wrong bytes\n", at);
        exit(1);
    }
}

/* Reads completions of zero-copy sends from the error queue; waits for the first if `wait`. Returns their number. */
static unsigned completions(int peer, int wait)
{
    unsigned done = 0;
    for (;;) {
        char control[128];
        struct msghdr message = {.msg_control = control, .msg_controllen = sizeof control};
        if (recvmsg(peer, &message, MSG_ERRQUEUE) < 0) {
            struct pollfd event = {.fd = peer};
            if (errno != EAGAIN) die("recvmsg of the error queue");
            if (done || !wait) return done;
            if (poll(&event, 1, 1000) <= 0) {
                fprintf(stderr, "no completion of a zero-copy send within 1 s\n");
                exit(1);
            }
            continue;
        }
        struct cmsghdr *part = CMSG_FIRSTHDR(&message);
        if (!part) continue;
        struct sock_extended_err *report = (void *)CMSG_DATA(part);
        if (report->ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
        unsigned count = report->ee_data - report->ee_info + 1;
        if (report->ee_code & SO_EE_CODE_ZEROCOPY_COPIED) copied += count;
        done += count;
    }
}

static void by_calls(int peer, int sends, int zerocopy)
{
    unsigned begun = 0, done = 0;
    int one = 1;
    if (zerocopy && setsockopt(peer, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) < 0) die("SO_ZEROCOPY");
    for (size_t at = 0; at < total; at += block) {
        if (sends) put_mark(at);
        for (size_t moved = 0; moved < block;) {
            ssize_t now;
            if (sends) {
                now = send(peer, block_at(at) + moved, block - moved, zerocopy ? MSG_ZEROCOPY : 0);
                if (now < 0 && errno == ENOBUFS && zerocopy) {
                    done += completions(peer, 1);
                    continue;
                }
                begun += now > 0;
            } else {
                now = recv(peer, block_at(at) + moved, block - moved, MSG_WAITALL);
            }
            if (now <= 0) die(sends ? "send" : "recv");
            moved += (size_t)now;
        }
        if (!sends) check(at);
        if (zerocopy) done += completions(peer, 0);
        /* The next round over the pool may change a block only when the kernel has sent it. */
        while (zerocopy && begun - done > POOL / block / 2) done += completions(peer, 1);
    }
    while (zerocopy && done < begun) done += completions(peer, 1);
}

struct ring {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
};

static struct ring open_ring(void)
{
    struct io_uring_params params = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN};
    struct ring ring = {.fd = (int)syscall(__NR_io_uring_setup, 64, &params)};
    if (ring.fd < 0) die("io_uring_setup");
    size_t sq = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    char *both = mmap(NULL, sq > cq ? sq : cq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQ_RING);
    void *sqes = mmap(NULL, params.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
    if (both == MAP_FAILED || sqes == MAP_FAILED || !(params.features & IORING_FEAT_SINGLE_MMAP)) die("mmap of the ring");
    ring.sq_tail = (void *)(both + params.sq_off.tail);
    ring.sq_mask = (void *)(both + params.sq_off.ring_mask);
    ring.sq_array = (void *)(both + params.sq_off.array);
    ring.cq_head = (void *)(both + params.cq_off.head);
    ring.cq_tail = (void *)(both + params.cq_off.tail);
    ring.cq_mask = (void *)(both + params.cq_off.ring_mask);
    ring.cqes = (void *)(both + params.cq_off.cqes);
    ring.sqes = sqes;
    return ring;
}

static void submit(struct ring *ring, unsigned count, unsigned wait)
{
    while (syscall(__NR_io_uring_enter, ring->fd, count, wait, wait ? IORING_ENTER_GETEVENTS : 0, NULL, 0) < 0)
        if (errno != EINTR) die("io_uring_enter");
}

static void by_ring(int peer, int sends, int zerocopy)
{
    struct ring ring = open_ring();
    struct iovec whole = {pool, POOL};
    unsigned notices = 0, noticed = 0;
    if (zerocopy && syscall(__NR_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &whole, 1) < 0)
        die("registration of the buffer");
    for (size_t at = 0; at < total;) {
        unsigned count = 0, tail = *ring.sq_tail;
        size_t begin = at;
        /* Links keep the order of the blocks. */
        for (; count < IN_FLIGHT && at < total; count++, at += block) {
            if (sends) put_mark(at);
            struct io_uring_sqe *entry = &ring.sqes[tail & *ring.sq_mask];
            *entry = (struct io_uring_sqe){
                .opcode = zerocopy ? IORING_OP_SEND_ZC : sends ? IORING_OP_SEND : IORING_OP_RECV,
                .fd = peer,
                .addr = (uintptr_t)block_at(at),
                .len = (unsigned)block,
                .msg_flags = MSG_WAITALL,
                .ioprio = zerocopy ? IORING_RECVSEND_FIXED_BUF | IORING_SEND_ZC_REPORT_USAGE : 0,
                .user_data = at,
                .flags = count + 1 < IN_FLIGHT && at + block < total ? IOSQE_IO_LINK : 0,
            };
            ring.sq_array[tail & *ring.sq_mask] = tail & *ring.sq_mask;
            tail++;
        }
        __atomic_store_n(ring.sq_tail, tail, __ATOMIC_RELEASE);
        submit(&ring, count, count);
        for (unsigned ended = 0; ended < count || notices - noticed > POOL / block / 2;) {
            unsigned head = *ring.cq_head;
            if (head == __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE)) {
                submit(&ring, 0, 1);
                continue;
            }
            struct io_uring_cqe *cqe = &ring.cqes[head & *ring.cq_mask];
            if (cqe->flags & IORING_CQE_F_NOTIF) {
                noticed++;
                copied += (unsigned)cqe->res == IORING_NOTIF_USAGE_ZC_COPIED;
            } else {
                if (cqe->res != (int)block) {
                    fprintf(stderr, "a block ended with %d of %zu bytes\n", cqe->res, block);
                    exit(1);
                }
                notices += !!(cqe->flags & IORING_CQE_F_MORE);
                ended++;
            }
            __atomic_store_n(ring.cq_head, head + 1, __ATOMIC_RELEASE);
        }
        for (size_t done = begin; !sends && done < at; done += block) check(done);
    }
}

static int connection(int listens, const char *address, int port)
{
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int one = 1, own = socket(AF_INET, SOCK_STREAM, 0), peer = -1;
    if (inet_pton(AF_INET, address, &place.sin_addr) != 1) die("inet_pton");
    setsockopt(own, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (listens) {
        if (bind(own, (void *)&place, sizeof place) < 0 || listen(own, 1) < 0) die("listen");
        if ((peer = accept(own, NULL, NULL)) < 0) die("accept");
        return peer;
    }
    for (int tries = 0; connect(own, (void *)&place, sizeof place) < 0; tries++) {
        if (tries == 200) die("connect");
        usleep(50000);
        close(own);
        own = socket(AF_INET, SOCK_STREAM, 0);
    }
    setsockopt(own, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return own;
}

int main(int argc, char **argv)
{
    if (argc != 7) {
        fprintf(stderr, "usage: see the head of stream_probe.c\n");
        return 2;
    }
    const char *way = argv[4];
    int listens = !strcmp(argv[1], "listen");
    block = strtoull(argv[5], NULL, 10);
    total = strtoull(argv[6], NULL, 10) / block * block;
    if (block < 8 || POOL % block) {
        fprintf(stderr, "a block takes a divisor of 64 MiB\n");
        return 2;
    }
    pool = mmap(NULL, POOL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (pool == MAP_FAILED) die("mmap");
    for (size_t at = 0; at < POOL; at += 8) {
        uint64_t word = at * 0x2545f4914f6cdd1du | 1;
        memcpy(pool + at, &word, 8);
    }
    int peer = connection(listens, argv[2], atoi(argv[3]));
    double begin = seconds(), used = processor_seconds();
    int zerocopy = strstr(way, "z") != NULL;
    if (zerocopy) copied = 0;
    if (!strncmp(way, "uring", 5)) by_ring(peer, !listens, zerocopy);
    else by_calls(peer, !listens, zerocopy);
    printf("{\"way\": \"%s\", \"bytes\": %zu, \"seconds\": %.6f, \"processor_seconds\": %.6f, \"copied_blocks\": %ld}\n", way,
           total, seconds() - begin, processor_seconds() - used, copied);
    return 0;
}
