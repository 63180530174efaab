// Runs every collective at every size, type and operation, in and out of place.
#pragma once

#include <cstdio>
#include <map>
#include <memory>

#include "numbers.h"
#include "world.h"

namespace compare {

// Numbers of elements in a message. In collectives with a block for each rank, numbers of elements
// in a block, as far as all blocks fit.
constexpr size_t kSizes[] = {
    0,     1,     2,     3,     4,     5,     7,      8,      9,      15,     16,     17,     31,  33,
    63,    64,    65,    100,   127,   128,   129,    255,    257,    511,    513,    1000,   1023, 1025,
    2047,  4095,  4097,  8193,  16383, 32769, 50021,  65536,  65537,  100003, 131073, 262147};
static_assert(sizeof kSizes / sizeof *kSizes == 40, "the promise is 40 sizes");
constexpr size_t kLargest = 262147;

enum class Kind {
    AllReduce, ReduceScatter, Reduce, AllGather, Broadcast, Bcast, AlltoAll, Gather, Scatter
};
constexpr Kind kKinds[] = {Kind::AllReduce, Kind::ReduceScatter, Kind::Reduce,
                           Kind::AllGather, Kind::Broadcast,     Kind::Bcast,
                           Kind::AlltoAll,  Kind::Gather,        Kind::Scatter};

inline const char *name(Kind kind) {
    constexpr const char *names[] = {"AllReduce", "ReduceScatter", "Reduce", "AllGather", "Broadcast",
                                     "Bcast",     "AlltoAll",      "Gather", "Scatter"};
    return names[static_cast<int>(kind)];
}

inline bool reduces(Kind kind) {
    return kind == Kind::AllReduce || kind == Kind::ReduceScatter || kind == Kind::Reduce;
}

struct Case {
    Kind kind;
    const Type *type;
    Op op;
    size_t count;
    bool in_place;
    int root;
    // Number of elements by which both buffers are shifted from their alignment.
    size_t shift;
};

// Numbers of elements in a rank's input and output. For in-place calls also the index in the output
// at which the input begins, or in the input at which the output begins.
struct Shape {
    size_t input, output, input_in_output, output_in_input;
};

inline Shape shape(const Case &c, int rank, int ranks) {
    const size_t n = static_cast<size_t>(ranks), r = static_cast<size_t>(rank), k = c.count;
    const bool root = rank == c.root;
    switch (c.kind) {
        case Kind::AllReduce: return {k, k, 0, 0};
        case Kind::ReduceScatter: return {n * k, k, 0, r * k};
        case Kind::Reduce: return {k, root ? k : 0, 0, 0};
        case Kind::AllGather: return {k, n * k, r * k, 0};
        case Kind::Broadcast:
        case Kind::Bcast: return {root ? k : 0, k, 0, 0};
        case Kind::AlltoAll: return {n * k, n * k, 0, 0};
        case Kind::Gather: return {k, root ? n * k : 0, r * k, 0};
        case Kind::Scatter: return {root ? n * k : 0, k, 0, r * k};
    }
    return {};
}

// Returns the rank and index of the input element that becomes element `at` of a rank's output, for
// collectives without reduction.
inline std::pair<int, size_t> origin(const Case &c, int rank, size_t at) {
    const size_t k = c.count, r = static_cast<size_t>(rank);
    switch (c.kind) {
        case Kind::AllGather:
        case Kind::Gather: return {static_cast<int>(at / k), at % k};
        case Kind::AlltoAll: return {static_cast<int>(at / k), r * k + at % k};
        case Kind::Scatter: return {c.root, r * k + at};
        default: return {c.root, at};
    }
}

class Checker {
  public:
    Checker(World &world, uint64_t seed) : world_(world), seed_(seed) {}

    // Fills the input data of every rank for calls of this type and operation.
    void prepare(const Type &type, Op op) {
        type_ = &type;
        op_ = op;
        expected_.reset();
        world_.run([&](int rank) {
            std::vector<unsigned char> bytes(kLargest * static_cast<size_t>(type.bytes));
            for (size_t at = 0; at < kLargest; at++) {
                const uint64_t bits = element(type, op, rank, at, seed_);
                std::memcpy(&bytes[at * static_cast<size_t>(type.bytes)], &bits,
                            static_cast<size_t>(type.bytes));
            }
            Rank &mine = world_[rank];
            world_.cuda().to_device(mine.source, bytes.data(), bytes.size(), mine.stream);
            world_.cuda().wait(mine.stream);
        });
    }

    // Runs a case on all ranks and returns their outputs in rank order. Throws a sentence if an
    // output is wrong.
    std::vector<std::vector<unsigned char>> run(const Case &c) {
        if (reduces(c.kind) && !expected_)
            expected_ = std::make_unique<Expected>(*type_, op_, world_.size(), kLargest, seed_);
        std::vector<std::vector<unsigned char>> outputs(static_cast<size_t>(world_.size()));
        world_.run([&](int rank) { outputs[static_cast<size_t>(rank)] = one(c, rank); });
        return outputs;
    }

  private:
    std::vector<unsigned char> one(const Case &c, int rank) {
        const Cuda &cuda = world_.cuda();
        Rank &mine = world_[rank];
        const size_t size = static_cast<size_t>(c.type->bytes);
        const Shape s = shape(c, rank, world_.size());
        // In place, the smaller buffer lies inside the larger buffer.
        const bool nested = c.in_place;
        DevicePtr input = mine.input + c.shift * size, output = mine.output + c.shift * size;
        if (nested && s.input > s.output) output = input + s.output_in_input * size;
        else if (nested) input = output + s.input_in_output * size;
        const DevicePtr end = output + s.output * size;
        if (!nested || s.output >= s.input)
            cuda.fill(mine.output, kPoison, (c.shift + s.output) * size + kGuard, mine.stream);
        cuda.copy(input, mine.source, s.input * size, mine.stream);
        call(c, rank, input, output);
        std::vector<unsigned char> found(s.output * size), guard(kGuard);
        cuda.to_host(found.data(), output, found.size(), mine.stream);
        const bool guarded = !nested || s.output >= s.input;
        if (guarded) cuda.to_host(guard.data(), end, guard.size(), mine.stream);
        cuda.wait(mine.stream);
        if (guarded)
            for (size_t at = 0; at < guard.size(); at++)
                if (guard[at] != kPoison)
                    throw Failure("byte " + std::to_string(at) + " behind the output was written");
        for (size_t at = 0; at < s.output; at++) judge(c, rank, at, load(*c.type, &found[at * size]));
        judge_all(c, rank, found);
        return found;
    }

    // Checks the mean error of an output, unless it has so few elements that the mean is not
    // significant.
    void judge_all(const Case &c, int rank, const std::vector<unsigned char> &found) const {
        const size_t size = static_cast<size_t>(c.type->bytes), elements = found.size() / size;
        if (!reduces(c.kind) || elements < 256 || std::isinf(expected_->most_off())) return;
        long double errors = 0, values = 0;
        for (size_t at = 0; at < elements; at++) {
            const long double exact = expected_->value(place(c, rank, at));
            const long double error = decode(*c.type, load(*c.type, &found[at * size])) - exact;
            errors += error * error;
            values += exact * exact;
        }
        const long double off = std::sqrt(errors / values);
        if (off <= expected_->most_off()) return;  // False for NaN.
        char text[96];
        std::snprintf(text, sizeof text, "all elements together are off by %.3Lf of their size", off);
        throw Failure(text);
    }

    // Returns the index, in the result of all ranks together, of element `at` of the output of
    // `rank`.
    static size_t place(const Case &c, int rank, size_t at) {
        return c.kind == Kind::ReduceScatter ? static_cast<size_t>(rank) * c.count + at : at;
    }

    void judge(const Case &c, int rank, size_t at, uint64_t found) const {
        if (reduces(c.kind)) {
            if (expected_->admits(place(c, rank, at), found)) return;
        } else {
            const auto from = origin(c, rank, at);
            if (found == element(*c.type, op_, from.first, from.second, seed_)) return;
        }
        char text[64];
        std::snprintf(text, sizeof text, "element %zu is %#llx", at,
                      static_cast<unsigned long long>(found));
        throw Failure(text);
    }

    void call(const Case &c, int rank, DevicePtr input, DevicePtr output) {
        const Library &nccl = world_.library();
        Rank &mine = world_[rank];
        ncclRedOp_t op = ncclSum;
        bool made = false;
        if (reduces(c.kind)) {
            switch (c.op) {
                case Op::Sum: op = ncclSum; break;
                case Op::Prod: op = ncclProd; break;
                case Op::Max: op = ncclMax; break;
                case Op::Min: op = ncclMin; break;
                case Op::Avg: op = ncclAvg; break;
                case Op::PreMulHost:
                case Op::PreMulDevice: {
                    uint64_t bits = scalar(*c.type, rank);
                    const bool host = c.op == Op::PreMulHost;
                    void *at = &bits;
                    if (!host) {
                        world_.cuda().to_device(mine.scalar, &bits, sizeof bits, mine.stream);
                        world_.cuda().wait(mine.stream);
                        at = reinterpret_cast<void *>(mine.scalar);
                    }
                    nccl.check("ncclRedOpCreatePreMulSum",
                               nccl.RedOpCreatePreMulSum(
                                   &op, at, c.type->number,
                                   host ? ncclScalarHostImmediate : ncclScalarDevice, mine.comm),
                               mine.comm);
                    made = true;
                    break;
                }
            }
        }
        const void *from = reinterpret_cast<const void *>(input);
        void *to = reinterpret_cast<void *>(output);
        const ncclDataType_t type = c.type->number;
        const auto stream = reinterpret_cast<cudaStream_t>(mine.stream);
        ncclResult_t result = ncclSuccess;
        switch (c.kind) {
            case Kind::AllReduce: result = nccl.AllReduce(from, to, c.count, type, op, mine.comm, stream); break;
            case Kind::ReduceScatter: result = nccl.ReduceScatter(from, to, c.count, type, op, mine.comm, stream); break;
            case Kind::Reduce: result = nccl.Reduce(from, to, c.count, type, op, c.root, mine.comm, stream); break;
            case Kind::AllGather: result = nccl.AllGather(from, to, c.count, type, mine.comm, stream); break;
            case Kind::Broadcast: result = nccl.Broadcast(from, to, c.count, type, c.root, mine.comm, stream); break;
            case Kind::Bcast:
                // ncclBcast is always in place, so the root's data must lie in the common buffer.
                if (rank == c.root && !c.in_place)
                    world_.cuda().copy(output, input, c.count * static_cast<size_t>(c.type->bytes), mine.stream);
                result = nccl.Bcast(to, c.count, type, c.root, mine.comm, stream);
                break;
            case Kind::AlltoAll: result = nccl.AlltoAll(from, to, c.count, type, mine.comm, stream); break;
            case Kind::Gather: result = nccl.Gather(from, to, c.count, type, c.root, mine.comm, stream); break;
            case Kind::Scatter: result = nccl.Scatter(from, to, c.count, type, c.root, mine.comm, stream); break;
        }
        nccl.check(name(c.kind), result, mine.comm);
        if (made)
            nccl.check("ncclRedOpDestroy", nccl.RedOpDestroy(op, mine.comm), mine.comm);
    }

    World &world_;
    uint64_t seed_;
    const Type *type_ = nullptr;
    Op op_ = Op::Sum;
    std::unique_ptr<Expected> expected_;
};

}  // namespace compare
