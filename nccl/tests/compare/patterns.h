// Checks sends and receives, groups, calls for all ranks from one thread, and CUDA graphs.
#pragma once

#include "collectives.h"

namespace compare {

// A message of a test pattern. Messages between one pair of ranks arrive in order.
struct Message {
    int from, to;
    size_t count;
};

inline std::vector<Message> ring(int ranks, size_t count) {
    std::vector<Message> all;
    for (int rank = 0; rank < ranks; rank++) all.push_back({rank, (rank + 1) % ranks, count});
    return all;
}

// Returns a pattern in which every rank sends to every rank, itself included. The size differs from
// pair to pair; some sizes are 0.
inline std::vector<Message> uneven(int ranks, size_t count) {
    std::vector<Message> all;
    for (int from = 0; from < ranks; from++)
        for (int to = 0; to < ranks; to++)
            all.push_back({from, to, count * static_cast<size_t>((from * 3 + to) % 4) / 3});
    return all;
}

inline std::vector<Message> one_to_all(int ranks, size_t count) {
    std::vector<Message> all;
    for (int to = 0; to < ranks; to++) all.push_back({0, to, count});
    return all;
}

inline std::vector<Message> several_in_order(int ranks, size_t count) {
    std::vector<Message> all;
    for (int turn = 0; turn < 3; turn++)
        for (const Message &one : ring(ranks, count + static_cast<size_t>(turn) * 7)) all.push_back(one);
    return all;
}

inline cudaStream_t stream_of(Rank &rank) { return reinterpret_cast<cudaStream_t>(rank.stream); }

// Runs a pattern of float32 messages in one group on each rank. Message m of a pattern holds
// element(from, m * 1000003 + at).
inline void run_messages(World &world, const std::vector<Message> &messages, uint64_t seed) {
    const Type &type = kTypes[7];
    const size_t size = static_cast<size_t>(type.bytes);
    const auto salt = [](size_t message) { return message * 1000003; };
    world.run([&](int rank) {
        Rank &mine = world[rank];
        const Library &nccl = world.library();
        std::vector<unsigned char> sent;
        std::vector<size_t> send_at(messages.size()), recv_at(messages.size());
        size_t received = 0;
        for (size_t m = 0; m < messages.size(); m++) {
            if (messages[m].from == rank) {
                send_at[m] = sent.size();
                for (size_t at = 0; at < messages[m].count; at++) {
                    const uint64_t bits = element(type, Op::Sum, rank, salt(m) + at, seed);
                    const auto *bytes = reinterpret_cast<const unsigned char *>(&bits);
                    sent.insert(sent.end(), bytes, bytes + size);
                }
            }
            if (messages[m].to == rank) {
                recv_at[m] = received;
                received += messages[m].count * size;
            }
        }
        world.cuda().to_device(mine.input, sent.data(), sent.size(), mine.stream);
        world.cuda().fill(mine.output, kPoison, received + kGuard, mine.stream);
        nccl.check("ncclGroupStart", nccl.GroupStart(), mine.comm);
        for (size_t m = 0; m < messages.size(); m++) {
            if (messages[m].from == rank)
                nccl.check("ncclSend",
                           nccl.Send(reinterpret_cast<void *>(mine.input + send_at[m]), messages[m].count,
                                     type.number, messages[m].to, mine.comm, stream_of(mine)),
                           mine.comm);
            if (messages[m].to == rank)
                nccl.check("ncclRecv",
                           nccl.Recv(reinterpret_cast<void *>(mine.output + recv_at[m]), messages[m].count,
                                     type.number, messages[m].from, mine.comm, stream_of(mine)),
                           mine.comm);
        }
        nccl.check("ncclGroupEnd", nccl.GroupEnd(), mine.comm);
        std::vector<unsigned char> found(received + kGuard);
        world.cuda().to_host(found.data(), mine.output, found.size(), mine.stream);
        world.cuda().wait(mine.stream);
        for (size_t m = 0; m < messages.size(); m++) {
            if (messages[m].to != rank) continue;
            for (size_t at = 0; at < messages[m].count; at++) {
                const uint64_t bits = load(type, &found[recv_at[m] + at * size]);
                if (bits != element(type, Op::Sum, messages[m].from, salt(m) + at, seed))
                    throw Failure("message " + std::to_string(m) + " from rank " +
                                  std::to_string(messages[m].from) + " is wrong at " + std::to_string(at));
            }
        }
        for (size_t at = received; at < found.size(); at++)
            if (found[at] != kPoison) throw Failure("something behind the last message was written");
    });
}

// Fills int32 inputs whose sums every rank can compute: rank r's element `at` is at + r * factor.
inline void fill_sum(World &world, int rank, DevicePtr at, size_t count, int factor) {
    std::vector<int32_t> data(count);
    for (size_t i = 0; i < count; i++) data[i] = static_cast<int32_t>(i) + rank * factor;
    world.cuda().to_device(at, data.data(), count * 4, world[rank].stream);
    world.cuda().wait(world[rank].stream);
}

inline void check_sum(World &world, int rank, DevicePtr at, size_t count, int factor) {
    const int n = world.size();
    std::vector<int32_t> found(count);
    world.cuda().to_host(found.data(), at, count * 4, world[rank].stream);
    world.cuda().wait(world[rank].stream);
    for (size_t i = 0; i < count; i++) {
        const int32_t expected = n * static_cast<int32_t>(i) + factor * n * (n - 1) / 2;
        if (found[i] != expected)
            throw Failure("element " + std::to_string(i) + " is " + std::to_string(found[i]) + ", not " +
                          std::to_string(expected));
    }
}

// Runs nested groups of several collectives, with a thread for each rank.
inline void run_groups(World &world) {
    constexpr size_t count = 1000, calls = 5;
    world.run([&](int rank) {
        Rank &mine = world[rank];
        const Library &nccl = world.library();
        for (size_t k = 0; k < calls; k++)
            fill_sum(world, rank, mine.input + k * count * 4, count, static_cast<int>(k) + 1);
        nccl.check("ncclGroupStart", nccl.GroupStart(), mine.comm);
        for (size_t k = 0; k < calls; k++) {
            nccl.check("ncclGroupStart", nccl.GroupStart(), mine.comm);
            nccl.check("ncclAllReduce",
                       nccl.AllReduce(reinterpret_cast<void *>(mine.input + k * count * 4),
                                      reinterpret_cast<void *>(mine.output + k * count * 4), count,
                                      ncclInt32, ncclSum, mine.comm, stream_of(mine)),
                       mine.comm);
            nccl.check("ncclGroupEnd", nccl.GroupEnd(), mine.comm);
        }
        nccl.check("ncclGroupEnd", nccl.GroupEnd(), mine.comm);
        for (size_t k = 0; k < calls; k++)
            check_sum(world, rank, mine.output + k * count * 4, count, static_cast<int>(k) + 1);
    });
}

// Makes the calls of all ranks from one thread, which must put them in a group.
inline void run_from_one_thread(World &world) {
    constexpr size_t count = 100003;
    world.run([&](int rank) { fill_sum(world, rank, world[rank].input, count, 3); });
    const Library &nccl = world.library();
    world.cuda().use(0);
    for (int turn = 0; turn < 3; turn++) {
        nccl.check("ncclGroupStart", nccl.GroupStart(), nullptr);
        for (int rank = 0; rank < world.size(); rank++) {
            Rank &one = world[rank];
            world.cuda().use(world.gpu(rank));
            nccl.check("ncclAllReduce",
                       nccl.AllReduce(reinterpret_cast<void *>(one.input), reinterpret_cast<void *>(one.output),
                                      count, ncclInt32, ncclSum, one.comm, stream_of(one)),
                       one.comm);
        }
        nccl.check("ncclGroupEnd", nccl.GroupEnd(), nullptr);
    }
    world.run([&](int rank) { check_sum(world, rank, world[rank].output, count, 3); });
}

// Replays a CUDA graph of three sums, with new data for each replay.
inline void run_graph(World &world) {
    constexpr size_t counts[] = {7, 4096, 200003};
    constexpr size_t places[] = {0, 64, 32768};
    const int n = world.size();
    std::vector<GraphExec> graphs(static_cast<size_t>(n));
    world.run([&](int rank) {
        Rank &mine = world[rank];
        const Library &nccl = world.library();
        const auto sums = [&] {
            for (int k = 0; k < 3; k++)
                nccl.check("ncclAllReduce",
                           nccl.AllReduce(reinterpret_cast<void *>(mine.input + places[k]),
                                          reinterpret_cast<void *>(mine.output + places[k]), counts[k],
                                          ncclInt32, ncclSum, mine.comm, stream_of(mine)),
                           mine.comm);
        };
        // The reference connects at its first call of each kind, which it cannot do during a
        // capture.
        sums();
        world.cuda().begin_capture(mine.stream);
        sums();
        graphs[static_cast<size_t>(rank)] = world.cuda().end_capture(mine.stream);
    });
    for (int turn = 1; turn <= 5; turn++) {
        world.run([&](int rank) {
            Rank &mine = world[rank];
            for (int k = 0; k < 3; k++)
                fill_sum(world, rank, mine.input + places[k], counts[k], turn + k);
            world.cuda().launch(graphs[static_cast<size_t>(rank)], mine.stream);
            for (int k = 0; k < 3; k++)
                check_sum(world, rank, mine.output + places[k], counts[k], turn + k);
        });
    }
    world.run([&](int rank) { world.cuda().release(graphs[static_cast<size_t>(rank)]); });
}

}  // namespace compare
