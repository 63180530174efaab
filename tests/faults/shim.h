/* Shared by the shim and the rank program: phases of a rank, and the report that the driver reads. */
#ifndef FAULTS_SHIM_H
#define FAULTS_SHIM_H

#include <stdint.h>

/* Phases of a rank, in order. The shim itself separates `connect` from `rendezvous`: one function of the
 * library contains both. */
enum phase { NO_PHASE, ID, RENDEZVOUS, CONNECT, FIRST, STEADY, GROUP, SPLIT, GROW, DESTROY, AFTER, PHASES };

/* Calls that the shim counts. POINT is a place of the rank program between two calls of the library; TIMER
 * is a moment that the kernel's timer chooses. */
enum call {
    ANY, POINT, TIMER, SOCKET, CONNECT_CALL, ACCEPT4, BIND, LISTEN, READV, RECV, RECVMSG, READ, SEND, SENDMSG,
    WRITE, POLL, PPOLL, FUTEX, MEMFD_CREATE, FTRUNCATE, FALLOCATE, MMAP, FCNTL, PTHREAD_CREATE, GETADDRINFO,
    OPEN, CALLS
};

/* Memory that a rank shares with the driver, by a file that outlives the rank. */
struct report {
    uint32_t phase;
    /* Number of times that the fault has happened. */
    uint32_t fired;
    /* First and last time, in nanoseconds of CLOCK_MONOTONIC; the last time is the end of a delay. */
    int64_t first, last;
    /* Calls of the library by phase. */
    uint32_t seen[PHASES][CALLS];
};

/* The shim defines these; without it they are NULL. */
extern void faults_phase(int phase) __attribute__((weak));
extern void faults_point(void) __attribute__((weak));

#endif
