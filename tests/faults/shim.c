/* Injects faults into the system calls of libcinch.so, for scripts/test-faults. Preload it with LD_PRELOAD.
 *
 * Only calls whose return address is in libcinch.so count, so that the rank program and libc stay unharmed.
 * FAULT_REPORT is the file of `struct report`. FAULT_SPEC describes one fault in numbers and a name:
 * `FAULT PHASE CALL NTH SPAN SEED`. It happens at the NTH such call of the phase, and at the SPAN - 1 calls that
 * follow; a SPAN of 0 has no end in the phase. eintr and short happen at random calls of the whole phase.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/futex.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum fault {
    NO_FAULT, KILL, STOP, EXIT, ABORT, EINTR_STORM, SHORT, RESET, PIPE, ERRNO, DELAY, BLACK_HOLE, CLOSED, STDERR,
    STDERR_KILL, FLIP, FLIP_DATA
};

/* Names of FAULT_SPEC; `value` is an errno, or the seconds of a delay. */
static const struct { const char *name; enum fault fault; int value; } FAULTS[] = {
    {"kill", KILL, 0}, {"stop", STOP, 0}, {"exit", EXIT, 0}, {"abort", ABORT, 0}, {"eintr", EINTR_STORM, 0},
    {"short", SHORT, 0}, {"reset", RESET, ECONNRESET}, {"epipe", PIPE, EPIPE}, {"enomem", ERRNO, ENOMEM},
    {"emfile", ERRNO, EMFILE}, {"enfile", ERRNO, ENFILE}, {"enospc", ERRNO, ENOSPC}, {"mmap", ERRNO, ENOMEM},
    {"thread", ERRNO, EAGAIN}, {"delay1", DELAY, 1}, {"delay10", DELAY, 10}, {"blackhole", BLACK_HOLE, 0},
    {"closed", CLOSED, 0}, {"stderr", STDERR, 0}, {"stderrkill", STDERR_KILL, 0}, {"flip", FLIP, 0},
    /* Only messages with payload behind a header: data between ranks, no control frames. */
    {"flipdata", FLIP_DATA, 0},
};

/* Marks of a descriptor. */
enum { IS_RESET = 1, IS_BLACK = 2 };
#define DESCRIPTORS 65536

static struct report private_report;
static struct report *report = &private_report;
static enum fault fault;
static int value, at_phase, at_call;
static unsigned nth, span, seed, black_all;
static atomic_uint matched, drawn;
static _Atomic unsigned char marks[DESCRIPTORS];
static uintptr_t library_begin, library_end;
static timer_t timer;
static int has_timer;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void fire(void) {
    report->last = now();
    if (report->first == 0) report->first = report->last;
    atomic_fetch_add((_Atomic uint32_t *)&report->fired, 1);
}

/* Returns the next number of a sequence that the seed determines. */
static unsigned draw(void) {
    unsigned x = seed * 2654435761u + atomic_fetch_add(&drawn, 1) * 40503u + 1;
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
    return x ^ x >> 16;
}

static int find_library(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    const char *name = strrchr(info->dlpi_name, '/');
    if (strncmp(name ? name + 1 : info->dlpi_name, "libcinch.so", 11) != 0) return 0;
    for (int at = 0; at < info->dlpi_phnum; at++) {
        if (info->dlpi_phdr[at].p_type == PT_LOAD && info->dlpi_phdr[at].p_flags & PF_X) {
            library_begin = info->dlpi_addr + info->dlpi_phdr[at].p_vaddr;
            library_end = library_begin + info->dlpi_phdr[at].p_memsz;
        }
    }
    return 1;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULT_REPORT"), *text = getenv("FAULT_SPEC");
    char name[32];
    dl_iterate_phdr(find_library, NULL);
    if (path != NULL) {
        int file = open(path, O_RDWR | O_CLOEXEC);
        void *memory = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory == MAP_FAILED) abort();
        report = memory;
        close(file);
    }
    if (text == NULL) return;
    if (sscanf(text, "%31s %d %d %u %u %u", name, &at_phase, &at_call, &nth, &span, &seed) != 6) abort();
    for (size_t at = 0; at < sizeof FAULTS / sizeof *FAULTS; at++) {
        if (strcmp(name, FAULTS[at].name) == 0) fault = FAULTS[at].fault, value = FAULTS[at].value;
    }
    if (fault == NO_FAULT) abort();
}

/* Fills the pipe of standard error, which nobody reads, through an open file of its own. */
static void fill_stderr(void) {
    static const char block[4096];
    int pipe = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    if (pipe < 0) abort();
    for (size_t size = sizeof block; size > 0;) {
        if (write(pipe, block, size) < 0) size /= 2;
    }
    close(pipe);
}

void faults_phase(int phase) {
    if (has_timer) timer_delete(timer), has_timer = 0;
    report->phase = phase;
    if (phase != at_phase) return;
    if (fault == STDERR || fault == STDERR_KILL) fill_stderr();
    if (fault == STDERR) fire();
    if (at_call == TIMER) {
        struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = fault == STOP ? SIGSTOP : SIGKILL};
        struct itimerspec time = {.it_value = {0, 1 + nth * 100000L % 900000000L}};
        if (timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) abort();
        has_timer = 1;
        timer_settime(timer, 0, &time, NULL);
    }
}

static void sleep_whole(int seconds) {
    struct timespec rest = {seconds, 0};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {}
}

/* Returns whether `fd` is a socket that network faults can hit: no end of a pair, which carries wake-ups
 * inside the process. */
static int is_network(int fd) {
    struct sockaddr_un name;
    socklen_t size = sizeof name;
    if (getsockname(fd, (struct sockaddr *)&name, &size) != 0) return 0;
    if (name.sun_family != AF_UNIX) return 1;
    if (fault == BLACK_HOLE || fault == FLIP || fault == FLIP_DATA) return 0;
    if (size > sizeof name.sun_family) return 1;
    size = sizeof name;
    return getpeername(fd, (struct sockaddr *)&name, &size) == 0 && size > sizeof name.sun_family;
}

static int needs_network(void) {
    return fault == RESET || fault == PIPE || fault == CLOSED || fault == BLACK_HOLE || fault == FLIP ||
           fault == FLIP_DATA;
}

/* Returns whether the kernel may interrupt the call. It interrupts no non-blocking connect. */
static int is_interruptible(enum call call) {
    switch (call) {
    case ACCEPT4: case READV: case RECV: case RECVMSG: case READ: case SEND: case SENDMSG: case WRITE: case POLL:
    case PPOLL: case FUTEX: case OPEN: return 1;
    default: return 0;
    }
}

/* Returns whether the fault happens at this call. */
static int is_hit(enum call call, int fd) {
    if (fault == NO_FAULT || (int)report->phase != at_phase) return 0;
    if (at_call != ANY ? at_call != (int)call : call == POINT) return 0;
    if (needs_network() && call != CONNECT_CALL && (fd < 0 || !is_network(fd))) return 0;
    /* exit runs handlers of the library on a thread of the program. */
    if (fault == EXIT && gettid() != getpid()) return 0;
    unsigned number = atomic_fetch_add(&matched, 1) + 1;
    if (fault == EINTR_STORM) return is_interruptible(call) && draw() % 2;
    if (fault == SHORT) return draw() % 2;
    return number >= nth && (span == 0 || number - nth < span);
}

static void mark(int fd, unsigned char as) {
    if (fd >= 0 && fd < DESCRIPTORS) marks[fd] = as;
}

static int marked(int fd) {
    if (black_all && is_network(fd)) return IS_BLACK;
    return fd >= 0 && fd < DESCRIPTORS ? marks[fd] : 0;
}

static void break_connection(int fd) {
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    /* For TCP this sends RST. */
    if (syscall(SYS_connect, fd, &none, sizeof none) != 0) shutdown(fd, SHUT_RDWR);
    mark(fd, IS_RESET);
}

/* Counts a call and does to it what does not depend on its kind. Returns 0 if the call goes on, else the errno
 * with which it fails. SHORT, FLIP and BLACK_HOLE are left to the callers, by `*hit`. */
static int pass(enum call call, int fd, const void *caller, int *hit) {
    uintptr_t address = (uintptr_t)caller;
    *hit = 0;
    if (call != POINT && (address < library_begin || address >= library_end)) return 0;
    atomic_fetch_add((_Atomic uint32_t *)&report->seen[report->phase][call], 1);
    if (fd >= 0 && marked(fd) & IS_RESET && fault == RESET) return ECONNRESET;
    if (!is_hit(call, fd)) return 0;
    switch (fault) {
    case KILL: case STDERR_KILL: fire(); kill(getpid(), SIGKILL); return 0;
    case STOP: fire(); kill(getpid(), SIGSTOP); return 0;
    case ABORT: fire(); abort();
    case EXIT: fire(); exit(0);
    case DELAY: fire(); sleep_whole(value); report->last = now(); return 0;
    case CLOSED: fire(); shutdown(fd, SHUT_RDWR); return 0;
    case RESET: fire(); break_connection(fd); return ECONNRESET;
    case PIPE: fire(); shutdown(fd, SHUT_WR); return EPIPE;
    case ERRNO: fire(); return value;
    case EINTR_STORM: fire(); return EINTR;
    default: *hit = 1; return 0;
    }
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define PASS(call, fd) \
    int hit, failed = pass(call, fd, __builtin_return_address(0), &hit); \
    (void)hit; \
    if (failed != 0) return errno = failed, -1

void faults_point(void) {
    int hit;
    pass(POINT, -1, NULL, &hit);
}

int socket(int domain, int type, int protocol) {
    REAL(socket);
    PASS(SOCKET, -1);
    int fd = real(domain, type, protocol);
    mark(fd, 0);
    return fd;
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    REAL(connect);
    PASS(CONNECT_CALL, fd);
    return real(fd, address, size);
}

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) {
    REAL(accept4);
    PASS(ACCEPT4, fd);
    int made = real(fd, address, size, flags);
    mark(made, 0);
    return made;
}

int bind(int fd, const struct sockaddr *address, socklen_t size) {
    REAL(bind);
    PASS(BIND, fd);
    return real(fd, address, size);
}

int listen(int fd, int backlog) {
    REAL(listen);
    PASS(LISTEN, fd);
    return real(fd, backlog);
}

#define PARTS 8
/* Bytes that a short call moves: 1 to 4096. */
static size_t short_size(void) {
    return 1 + draw() % (1u << draw() % 13);
}

/* Copies the first parts of a vector, at most `size` bytes and PARTS parts. Returns their number. */
static int cut(struct iovec *to, const struct iovec *from, int count, size_t size) {
    int at = 0;
    for (; at < count && at < PARTS && size > 0; at++) {
        to[at] = from[at];
        if (to[at].iov_len > size) to[at].iov_len = size;
        size -= to[at].iov_len;
    }
    return at;
}

/* Result of a read: what a black hole swallows has not arrived. */
static ssize_t arrived(int fd, ssize_t count) {
    if (count > 0 && fault == BLACK_HOLE && marked(fd) & IS_BLACK) return errno = EAGAIN, -1;
    return count;
}

ssize_t readv(int fd, const struct iovec *parts, int count) {
    REAL(readv);
    struct iovec some[PARTS];
    PASS(READV, fd);
    if (hit && fault == SHORT) {
        fire();
        return real(fd, some, cut(some, parts, count, short_size()));
    }
    return arrived(fd, real(fd, parts, count));
}

ssize_t recv(int fd, void *bytes, size_t size, int flags) {
    REAL(recv);
    PASS(RECV, fd);
    size_t limit = hit && fault == SHORT ? (fire(), short_size()) : size;
    return arrived(fd, real(fd, bytes, size < limit ? size : limit, flags));
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(recvmsg);
    PASS(RECVMSG, fd);
    return arrived(fd, real(fd, message, flags));
}

ssize_t read(int fd, void *bytes, size_t size) {
    REAL(read);
    PASS(READ, fd);
    size_t limit = hit && fault == SHORT ? (fire(), short_size()) : size;
    return real(fd, bytes, size < limit ? size : limit);
}

static size_t size_of(const struct iovec *parts, size_t count) {
    size_t size = 0;
    for (size_t at = 0; at < count; at++) size += parts[at].iov_len;
    return size;
}

/* Sends a copy in which a bit of the last part is flipped: of the payload, if there is a header before it. */
static ssize_t send_flipped(int fd, const struct msghdr *message, int flags) {
    const struct iovec *last = &message->msg_iov[message->msg_iovlen - 1];
    size_t size = size_of(message->msg_iov, message->msg_iovlen);
    unsigned char *copy = malloc(size + 1), *to = copy;
    for (size_t at = 0; at < message->msg_iovlen; at++) {
        memcpy(to, message->msg_iov[at].iov_base, message->msg_iov[at].iov_len);
        to += message->msg_iov[at].iov_len;
    }
    size_t place = size - last->iov_len + draw() % last->iov_len;
    copy[place] ^= 1u << draw() % 8;
    ssize_t sent = send(fd, copy, size, flags);
    free(copy);
    /* The kernel may have taken less: then the bit goes out unharmed with a later call. */
    if (sent > (ssize_t)place) fire();
    else atomic_fetch_sub(&matched, 1);
    return sent;
}

static ssize_t send_message(int fd, const struct msghdr *message, int flags, int hit) {
    static ssize_t (*real)(int, const struct msghdr *, int);
    if (real == NULL) real = (ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    if (hit && fault == BLACK_HOLE) {
        fire();
        /* By the seed a whole host is cut off, or one connection. */
        if (seed % 2) black_all = 1;
        else mark(fd, IS_BLACK);
    }
    if (fault == BLACK_HOLE && marked(fd) & IS_BLACK) return size_of(message->msg_iov, message->msg_iovlen);
    if (message->msg_controllen != 0) return real(fd, message, flags);
    if (hit && fault == SHORT) {
        struct iovec some[PARTS];
        struct msghdr less = *message;
        fire();
        less.msg_iov = some;
        less.msg_iovlen = cut(some, message->msg_iov, message->msg_iovlen, short_size());
        return real(fd, &less, flags);
    }
    size_t count = message->msg_iovlen;
    if (hit && count > (fault == FLIP_DATA) && message->msg_iov[count - 1].iov_len > 0) {
        if (fault == FLIP || fault == FLIP_DATA) return send_flipped(fd, message, flags);
    }
    return real(fd, message, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    PASS(SENDMSG, fd);
    return send_message(fd, message, flags, hit);
}

ssize_t send(int fd, const void *bytes, size_t size, int flags) {
    REAL(send);
    PASS(SEND, fd);
    if (!hit && !(fault == BLACK_HOLE && marked(fd) & IS_BLACK)) return real(fd, bytes, size, flags);
    struct iovec part = {(void *)bytes, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    return send_message(fd, &message, flags, hit);
}

ssize_t write(int fd, const void *bytes, size_t size) {
    REAL(write);
    PASS(WRITE, fd);
    size_t limit = hit && fault == SHORT ? (fire(), short_size()) : size;
    return real(fd, bytes, size < limit ? size : limit);
}

int poll(struct pollfd *fds, nfds_t count, int timeout) {
    REAL(poll);
    PASS(POLL, -1);
    return real(fds, count, timeout);
}

int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask) {
    REAL(ppoll);
    PASS(PPOLL, -1);
    return real(fds, count, timeout, mask);
}

long syscall(long number, ...) {
    REAL(syscall);
    va_list list;
    long words[6];
    va_start(list, number);
    for (int at = 0; at < 6; at++) words[at] = va_arg(list, long);
    va_end(list);
    /* Waits alone: a wake-up that failed would be lost, and the kernel lets none fail. */
    int operation = (int)words[1] & FUTEX_CMD_MASK;
    if (number == SYS_futex && (operation == FUTEX_WAIT || operation == FUTEX_WAIT_BITSET)) {
        PASS(FUTEX, -1);
    }
    return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

int memfd_create(const char *name, unsigned flags) {
    REAL(memfd_create);
    PASS(MEMFD_CREATE, -1);
    return real(name, flags);
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    PASS(FTRUNCATE, -1);
    return real(fd, size);
}

int fallocate(int fd, int mode, off_t offset, off_t size) {
    REAL(fallocate);
    PASS(FALLOCATE, -1);
    return real(fd, mode, offset, size);
}

int posix_fallocate(int fd, off_t offset, off_t size) {
    REAL(posix_fallocate);
    int hit, failed = pass(FALLOCATE, -1, __builtin_return_address(0), &hit);
    return failed != 0 ? failed : real(fd, offset, size);
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    REAL(mmap);
    int hit, failed = pass(MMAP, -1, __builtin_return_address(0), &hit);
    if (failed != 0) return errno = failed, MAP_FAILED;
    return real(address, size, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    int hit, failed = pass(MMAP, -1, __builtin_return_address(0), &hit);
    if (failed != 0) return errno = failed, MAP_FAILED;
    return real(address, size, protection, flags, fd, offset);
}

int fcntl(int fd, int command, ...) {
    REAL(fcntl);
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    PASS(FCNTL, -1);
    return real(fd, command, argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    REAL(pthread_create);
    int hit, failed = pass(PTHREAD_CREATE, -1, __builtin_return_address(0), &hit);
    int outcome = failed != 0 ? failed : real(thread, attributes, start, argument);
    /* The thread of the control plane is the last step of the rendezvous. Rank 0 of a job that starts by the
     * environment makes the thread of the rendezvous before. */
    static int threads = 0;
    const char *before = getenv("FAULT_THREADS");
    if (report->phase == RENDEZVOUS && threads++ == (before != NULL ? atoi(before) : 0)) faults_phase(CONNECT);
    return outcome;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    REAL(getaddrinfo);
    int hit, failed = pass(GETADDRINFO, -1, __builtin_return_address(0), &hit);
    if (failed != 0) return errno = failed, EAI_SYSTEM;
    return real(node, service, hints, found);
}

static int open_file(int (*real)(const char *, int, ...), const char *path, int flags, unsigned mode, void *caller) {
    int hit, failed = pass(OPEN, -1, caller, &hit);
    if (failed != 0) return errno = failed, -1;
    return real(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    REAL(open);
    va_list list;
    va_start(list, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, unsigned) : 0;
    va_end(list);
    return open_file(real, path, flags, mode, __builtin_return_address(0));
}

int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list list;
    va_start(list, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, unsigned) : 0;
    va_end(list);
    return open_file(real, path, flags, mode, __builtin_return_address(0));
}

int close(int fd) {
    REAL(close);
    if (fd >= 0 && fd < DESCRIPTORS) marks[fd] = 0;
    return real(fd);
}
