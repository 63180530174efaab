// Kernels that probe the machine: whether a peer's writes arrive intact, the latency of a word to a
// peer and back, and the copy rate of multiprocessors. `src/gpu/probe.rs` launches them.
//
// Each takes one struct by value, which `src/gpu/probe.rs` mirrors; both sides check the sizes.

#include <cstdint>

#include "ptx/grid.cuh"

struct ProbeFill {
    uint64_t* target;
    uint64_t words;
    uint64_t seed;
};
static_assert(sizeof(ProbeFill) == 24, "mirrored in src/gpu/probe.rs");

struct ProbeCheck {
    const uint64_t* source;
    uint64_t words;
    uint64_t seed;
    uint32_t* wrong;
};
static_assert(sizeof(ProbeCheck) == 32, "mirrored in src/gpu/probe.rs");

struct ProbePingpong {
    uint64_t* mine;        // this side polls it, the other side writes it
    uint64_t* theirs;      // this side writes it, the other side polls it
    uint64_t base;         // both words hold at most this at the start
    uint64_t rounds;
    uint64_t budget;       // clock cycles that one wait may take
    uint32_t serves;       // 1: sends first
    uint32_t padding;
    uint64_t* done;        // completed rounds
};
static_assert(sizeof(ProbePingpong) == 56, "mirrored in src/gpu/probe.rs");

struct ProbeCopy {
    uint4* target;
    const uint4* source;
    uint64_t vectors;      // of 16 bytes
};
static_assert(sizeof(ProbeCopy) == 24, "mirrored in src/gpu/probe.rs");

struct ProbeLate {
    uint64_t* target;
    uint64_t words;
    uint64_t seed;
    uint64_t delay;        // nanoseconds
};
static_assert(sizeof(ProbeLate) == 32, "mirrored in src/gpu/probe.rs");

// Returns word `index` of the pattern of `seed`: a bijective mix (SplitMix64), so that neither
// shifted nor stale data look right. `src/gpu/probe.rs` has the same function.
__device__ inline uint64_t probe_word(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ inline uint64_t first_index() {
    return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ inline uint64_t stride() { return static_cast<uint64_t>(gridDim.x) * blockDim.x; }

// Fills `target` with the pattern. The launch may have any one-dimensional grid; the words become
// visible when the kernel ends.
extern "C" __global__ void cinch_probe_fill(ProbeFill args) {
    for (uint64_t i = first_index(); i < args.words; i += stride()) {
        args.target[i] = probe_word(args.seed, i);
    }
}

// Lets the next kernel of the stream launch at once, and fills `target` only after `delay`. A next
// kernel that fails to wait for the end of this kernel reads old data.
extern "C" __global__ void cinch_probe_late(ProbeLate args) {
    cinch::launch_dependents();
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < args.delay);
    for (uint64_t i = first_index(); i < args.words; i += stride()) {
        args.target[i] = probe_word(args.seed, i);
    }
}

// Adds the number of words that differ from the pattern to `*wrong`. The launch may have any
// one-dimensional grid.
extern "C" __global__ void cinch_probe_check(ProbeCheck args) {
    uint32_t wrong = 0;
    for (uint64_t i = first_index(); i < args.words; i += stride()) {
        // __ldcv bypasses this multiprocessor's cache, because a peer wrote the word.
        wrong += __ldcv(args.source + i) != probe_word(args.seed, i);
    }
    if (wrong != 0) {
        atomicAdd(args.wrong, wrong);
    }
}

// Sends a counter back and forth `rounds` times between one thread on each of two GPUs, or on two
// streams of one GPU. Both threads return when a wait exceeds its budget; `*done` is then less than
// `rounds`.
extern "C" __global__ void cinch_probe_pingpong(ProbePingpong args) {
    volatile uint64_t* mine = args.mine;
    volatile uint64_t* theirs = args.theirs;
    uint64_t round = 0;
    for (; round < args.rounds; round++) {
        const uint64_t value = args.base + round + 1;
        if (args.serves != 0) {
            *theirs = value;
        }
        const long long begin = clock64();
        bool came = *mine >= value;
        while (!came && static_cast<uint64_t>(clock64() - begin) < args.budget) {
            came = *mine >= value;
        }
        if (!came) {
            break;
        }
        if (args.serves == 0) {
            *theirs = value;
        }
    }
    *args.done = round;
}

// Copies 16-byte vectors; a thread loads four before it stores the first. The launch may have any
// one-dimensional grid.
extern "C" __global__ void cinch_probe_copy(ProbeCopy args) {
    const uint64_t step = stride();
    uint64_t i = first_index();
    for (; i + 3 * step < args.vectors; i += 4 * step) {
        const uint4 a = args.source[i];
        const uint4 b = args.source[i + step];
        const uint4 c = args.source[i + 2 * step];
        const uint4 d = args.source[i + 3 * step];
        args.target[i] = a;
        args.target[i + step] = b;
        args.target[i + 2 * step] = c;
        args.target[i + 3 * step] = d;
    }
    for (; i < args.vectors; i += step) {
        args.target[i] = args.source[i];
    }
}
