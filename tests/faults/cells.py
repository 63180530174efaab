"""The cells of scripts/test-faults: fault, phase, transport and call, and the outcomes that pass."""

import dataclasses
import os
import random
import re

RANKS = 4
# Numbers of tests/faults/shim.h.
PHASES = ["none", "id", "rendezvous", "connect", "first", "steady", "group", "split", "grow", "destroy", "after"]
CALLS = ["any", "point", "timer", "socket", "connect", "accept4", "bind", "listen", "readv", "recv", "recvmsg",
         "read", "send", "sendmsg", "write", "poll", "ppoll", "futex", "memfd_create", "ftruncate", "fallocate",
         "mmap", "fcntl", "pthread_create", "getaddrinfo", "open"]
TRANSPORTS = ["shm", "tcp"]

# Codes of cinch_result_t, and -1 of a rank that received no id.
SYSTEM, REMOTE, MISMATCH, TIMEOUT, ABORTED, NO_ID = 2, 6, 8, 9, 10, -1

ALL = range(RANKS)
# Calls that each phase makes on every run: ranks that make them, and how often at least with shm and with tcp. 0:
# never. The numbers are lower bounds: retries and heartbeats add calls.
REACHED = {
    "id": {"any": ([0], 5, 5), "point": (ALL, 1, 1), "socket": ([0], 1, 1), "bind": ([0], 1, 1),
           "listen": ([0], 1, 1), "pthread_create": ([0], 1, 1)},
    "rendezvous": {
        "any": (ALL, 40, 40), "point": (ALL, 1, 1), "timer": (ALL, 30, 30), "socket": (ALL, 2, 2),
        "connect": (ALL, 1, 1), "accept4": ([0], 2, 2), "bind": ([0], 1, 1), "listen": ([0], 1, 1),
        "readv": (ALL, 5, 5), "read": (ALL, 8, 8), "sendmsg": (ALL, 4, 4), "poll": (ALL, 3, 3),
        "pthread_create": (ALL, 1, 1), "open": (ALL, 2, 2), "getaddrinfo": (ALL, 1, 1)},
    "connect": {
        "any": (ALL, 70, 120), "timer": (ALL, 30, 30), "socket": (ALL, 1, 2), "connect": ([1, 2, 3], 1, 2),
        "accept4": ([0, 1, 2], 2, 3), "bind": (ALL, 1, 2), "listen": (ALL, 1, 2), "readv": (ALL, 8, 15),
        "recv": (ALL, 5, 5), "recvmsg": (ALL, 3, 0), "read": (ALL, 4, 40), "send": (ALL, 2, 2),
        "sendmsg": (ALL, 9, 12), "write": (ALL, 1, 1), "poll": (ALL, 7, 8),
        "memfd_create": (ALL, 1, 0), "ftruncate": (ALL, 1, 0), "mmap": (ALL, 4, 10), "fcntl": (ALL, 5, 0),
        "open": (ALL, 2, 20)},
    "first": {"any": (ALL, 0, 5), "point": (ALL, 1, 1), "readv": (ALL, 0, 4), "sendmsg": (ALL, 0, 3)},
    "steady": {"any": (ALL, 8, 150), "point": (ALL, 30, 30), "timer": (ALL, 800, 800), "readv": (ALL, 1, 100),
               "recv": (ALL, 2, 2), "sendmsg": (ALL, 1, 60), "poll": (ALL, 2, 2), "ppoll": (ALL, 0, 10)},
    "group": {"any": (ALL, 0, 20), "point": (ALL, 4, 4), "readv": (ALL, 0, 10), "sendmsg": (ALL, 0, 7)},
    "split": {
        "any": (ALL, 100, 200), "point": (ALL, 9, 9), "timer": (ALL, 80, 80), "socket": (ALL, 3, 4),
        "connect": (ALL, 1, 1), "accept4": ([0, 1], 4, 5), "bind": (ALL, 1, 2), "listen": (ALL, 1, 2),
        "readv": (ALL, 15, 25), "recv": (ALL, 10, 10), "recvmsg": (ALL, 1, 0), "read": (ALL, 10, 40),
        "send": (ALL, 5, 5), "sendmsg": (ALL, 12, 16), "write": (ALL, 1, 1), "poll": (ALL, 15, 15),
        "memfd_create": (ALL, 1, 0), "ftruncate": (ALL, 1, 0), "mmap": (ALL, 2, 4),
        "fcntl": (ALL, 3, 0), "pthread_create": (ALL, 1, 1), "open": (ALL, 4, 25)},
    "grow": {
        "any": (ALL, 120, 200), "point": (ALL, 10, 10), "socket": (ALL, 3, 5), "connect": ([1, 2, 3], 2, 3),
        "accept4": ([0, 1], 6, 8), "readv": (ALL, 20, 50), "recv": (ALL, 15, 15), "recvmsg": (ALL, 2, 0),
        "read": (ALL, 16, 40), "send": (ALL, 5, 5), "sendmsg": (ALL, 15, 28), "poll": (ALL, 17, 17),
        "memfd_create": (ALL, 1, 0), "mmap": (ALL, 3, 8), "open": (ALL, 6, 24)},
    "destroy": {"any": (ALL, 12, 12), "point": (ALL, 2, 2), "readv": (ALL, 1, 1), "recv": (ALL, 3, 3),
                "send": (ALL, 2, 2), "sendmsg": (ALL, 3, 3), "write": (ALL, 1, 1), "poll": (ALL, 1, 1)},
}

# Outcomes that pass beside right bits on all ranks, by the ending of a fault:
#   right    nothing
#   death    the victim is dead; every other error names it
#   refused  the victim's error has the system's sentence; other errors have it, or name the victim
#   cut      errors name a rank
#   lost     as cut
#   flipped  errors name a rank; bits of data may be wrong
# Per fault: its ending, and the calls that it hits; the first calls that a phase reaches form the quick matrix.
FAULTS = {
    "kill": ("death", ["any", "point", "timer"]),
    "stop": ("right", ["any", "point", "timer"]),
    "exit": ("death", ["point", "any"]),
    "abort": ("death", ["any", "point"]),
    "eintr": ("right", ["any"]),
    "short": ("right", ["any"]),
    "reset": ("cut", ["readv", "sendmsg", "connect"]),
    "epipe": ("cut", ["sendmsg"]),
    "closed": ("cut", ["sendmsg", "readv"]),
    "enomem": ("refused", ["socket", "mmap", "sendmsg", "accept4", "memfd_create", "poll", "ppoll", "recvmsg",
                           "open", "getaddrinfo", "readv"]),
    "emfile": ("refused", ["accept4", "socket", "memfd_create", "open", "getaddrinfo"]),
    "enfile": ("refused", ["socket", "memfd_create", "accept4", "open"]),
    "enospc": ("refused", ["ftruncate", "write"]),
    "mmap": ("refused", ["mmap"]),
    "thread": ("refused", ["pthread_create"]),
    "delay1": ("right", ["sendmsg", "point", "readv", "poll", "accept4", "getaddrinfo"]),
    "delay10": ("lost", ["sendmsg", "point", "readv", "poll", "getaddrinfo"]),
    "blackhole": ("lost", ["sendmsg"]),
    "stderr": ("right", ["point"]),
    "stderrkill": ("death", ["point"]),
    "flip": ("flipped", ["sendmsg"]),
}
# Faults of the phase `grow`. It has parts of `rendezvous`, `connect` and `split`, which have all of them.
GROW_FAULTS = ["kill", "stop", "exit", "enomem", "emfile", "delay1", "delay10"]
# The system's sentences.
SENTENCES = {
    "enomem": ["Cannot allocate memory", "Memory allocation failure"],
    "mmap": ["Cannot allocate memory"],
    "emfile": ["Too many open files"],
    "enfile": ["Too many open files in system"],
    "enospc": ["No space left on device"],
    "thread": ["Resource temporarily unavailable"],
}


@dataclasses.dataclass(frozen=True)
class Cell:
    fault: str
    phase: str
    transport: str
    call: str

    @property
    def name(self):
        return f"{self.fault}/{self.phase}/{self.transport}/{self.call}"

    @property
    def ending(self):
        if self.fault == "flipdata":
            return "flipped"
        return "right" if self.call == "write" else FAULTS[self.fault][0]

    def by_environment(self):
        """Returns whether ranks find each other by the launcher's variables, which names a host."""
        return self.call == "getaddrinfo"

    def draw(self, seed):
        """Returns the victim, the number of the call that is hit, and the number of calls hit from there on
        (0: all in the phase)."""
        draw = random.Random(f"{self.name} {seed}")
        ranks, *counts = REACHED[self.phase][self.call]
        most = counts[TRANSPORTS.index(self.transport)]
        if self.transport == "shm" and self.fault in ("blackhole", "flip"):
            # They hit TCP alone, which carries half of the messages.
            most = (most + 1) // 2
        victim, nth = draw.choice(list(ranks)), draw.randint(1, most)
        # A shortage may pass or stay.
        lasting = self.ending == "refused" and draw.randrange(2) == 0 and self.call not in ("poll", "ppoll")
        return victim, nth, 0 if lasting else 1


def hits(fault, phase, transport, call):
    """Returns whether the fault can happen: nothing of the phase `id` can be interrupted or short."""
    reached = REACHED[phase].get(call)
    if reached is None or reached[1 + TRANSPORTS.index(transport)] == 0:
        return False
    if phase == "grow" and fault not in GROW_FAULTS:
        return False
    # On the threads of the program, ranks make no system calls there; see EXIT in shim.c.
    if fault == "exit" and call == "any":
        return (phase, transport) != ("steady", "shm") and phase != "destroy"
    return fault not in ("eintr", "short") or phase != "id"


def all_cells():
    """Returns all cells; those of the quick matrix come first."""
    quick, rest = [], []
    for number, (fault, (_, calls)) in enumerate(FAULTS.items()):
        for at, phase in enumerate(REACHED):
            for transport in TRANSPORTS:
                reached = [call for call in calls if hits(fault, phase, transport, call)]
                for order, call in enumerate(reached):
                    # Transports take turns; where only one reaches the phase, it is in the quick matrix.
                    turn = TRANSPORTS[(number + at) % 2]
                    other = any(hits(fault, phase, turn, one) for one in calls)
                    is_quick = order == 0 and (transport == turn or not other)
                    (quick if is_quick else rest).append(Cell(fault, phase, transport, call))
    return quick, rest


def names(text, rank, pid):
    """Returns whether an error names a rank: `rank 3 (host b, pid 7)`, or `ranks 1, 3 did not come`.

    A communicator of a split numbers its ranks anew, so the process decides where the error has one. The rank that
    reports a failure is not named as its cause.
    """
    text = re.sub(r"rank \d+ \(host [^)]*\) reports: ", "", text)
    if "pid " in text:
        return f"pid {pid})" in text
    lists = re.findall(r"\branks? ((?:\d+(?:, | and )?)+)", text)
    return any(str(rank) in re.findall(r"\d+", one) for one in lists)


def names_any(text, pids):
    return any(names(text, rank, pid) for rank, pid in enumerate(pids))


# An error about a rendezvous whose server does not answer as it should. The address alone would not do: no rank is
# called by it.
OF_RENDEZVOUS = re.compile(r"the rendezvous(?: at| for|:) \S+:\d+|nobody serves the rendezvous"
                           r"|rank 0 did not open the rendezvous|looking up the rendezvous host \S+ took"
                           r"|rank 0 of \d+ did not come to the rendezvous")
# Errors that a flipped bit of a control connection causes.
OF_FLIP = re.compile(r"could not prove|seal is wrong|invalid data|damaged|does not speak cinch|version")


def is_explained(cell, victim, pids, rank, code, text):
    """Returns whether the error of a rank has the form that the fault must have; `pids` has all processes."""
    ending, phase = cell.ending, cell.phase
    if ending == "right":
        return False
    if code == NO_ID:
        # A rank makes no id for new ranks if it knows already that another one has failed. The last rank takes no part
        # in the shrink of the phase `split`, so it waits for the id while the others fail there.
        return victim == 0 or phase == "grow" or phase == "split" and rank == RANKS - 1
    # A rank whose new communicator failed aborts its parent, too.
    if code == ABORTED and phase in ("split", "grow"):
        return names_any(text, pids)
    # The victim may be rank 0 or the leader of a split, which serve the rendezvous; or it cannot join itself.
    # It may connect already while it still answers others.
    serves = victim == 0 and phase in ("id", "rendezvous", "connect", "grow") or victim < 2 and phase == "split"
    is_own = rank == victim or f"pid {pids[victim]}) reports" in text
    # A leader of a split that cannot accept closes its listener, so that nobody waits for it until the deadline.
    if code == TIMEOUT and ending == "refused" and cell.call == "accept4" and phase == "split":
        return False
    joins = is_own and phase in ("id", "rendezvous", "split", "grow") and ending != "refused"
    if code in (REMOTE, TIMEOUT) and (serves or joins) and OF_RENDEZVOUS.search(text):
        return True
    if ending == "refused":
        caused = any(sentence in text for sentence in SENTENCES[cell.fault])
        if rank == victim and (caused or phase not in ("split", "grow")):
            return caused and code in (SYSTEM, REMOTE)
        # The others may fail, and close their listeners, before the new rank has connected to them.
        if phase == "grow" and rank == RANKS - 1 and "Connection refused" in text:
            return code == REMOTE and names_any(text, pids)
        # A rank that has no connection to others yet cannot report why.
        codes = (SYSTEM, REMOTE, TIMEOUT) if phase in ("rendezvous", "split", "grow") else (SYSTEM, REMOTE)
        return code in codes and (caused or names(text, victim, pids[victim]))
    if ending == "death":
        return code in (REMOTE, TIMEOUT) and names(text, victim, pids[victim])
    if ending == "flipped" and code in (REMOTE, MISMATCH) and OF_FLIP.search(text):
        return True
    return code in (REMOTE, TIMEOUT) and names_any(text, pids)


def is_death(cell, code):
    """Returns whether the exit status of the victim is that of the fault."""
    return {"kill": code == -9, "stderrkill": code == -9, "exit": code == 0, "abort": code == -6}[cell.fault]


def processor_count():
    return len(os.sched_getaffinity(0))
