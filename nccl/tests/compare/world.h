// The ranks of one communicator of one library, each with a thread, a stream and buffers.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "library.h"

namespace compare {

// Threads that run a function together, each for one rank.
class Team {
  public:
    explicit Team(int ranks) : failures_(static_cast<size_t>(ranks)) {
        for (int rank = 0; rank < ranks; rank++)
            threads_.emplace_back([this, rank] { work(rank); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            turn_++;
            job_ = nullptr;
        }
        changed_.notify_all();
        for (auto &thread : threads_) thread.join();
    }

    int ranks() const { return static_cast<int>(failures_.size()); }

    // Runs `job` on every rank, and returns when all have ended. Throws the first rank's failure.
    void run(const std::function<void(int)> &job) {
        std::unique_lock<std::mutex> lock(mutex_);
        std::fill(failures_.begin(), failures_.end(), std::string());
        job_ = &job;
        left_ = ranks();
        turn_++;
        changed_.notify_all();
        changed_.wait(lock, [this] { return left_ == 0; });
        for (int rank = 0; rank < ranks(); rank++)
            if (!failures_[static_cast<size_t>(rank)].empty())
                throw Failure("rank " + std::to_string(rank) + ": " +
                              failures_[static_cast<size_t>(rank)]);
    }

  private:
    void work(int rank) {
        unsigned long seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return turn_ != seen; });
            seen = turn_;
            const auto *job = job_;
            if (!job) return;
            lock.unlock();
            std::string failure;
            try {
                (*job)(rank);
            } catch (const std::exception &error) {
                failure = error.what();
            }
            lock.lock();
            failures_[static_cast<size_t>(rank)] = failure;
            if (--left_ == 0) changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    const std::function<void(int)> *job_ = nullptr;
    unsigned long turn_ = 0;
    int left_ = 0;
    std::vector<std::string> failures_;
    std::vector<std::thread> threads_;
};

// Number of bytes behind every output, which no call may write.
constexpr size_t kGuard = 256;
constexpr unsigned char kPoison = 0xa5;

struct Rank {
    ncclComm_t comm = nullptr;
    Stream stream = nullptr;
    DevicePtr source = 0;  // The rank's data, which no call writes.
    DevicePtr input = 0;
    DevicePtr output = 0;
    DevicePtr scalar = 0;
};

class World {
  public:
    // Creates the communicators and buffers. `bytes` is the size of the largest buffer. With
    // `one_thread`, all communicators come from ncclCommInitAll.
    World(const Cuda &cuda, const Library &library, int ranks, size_t bytes, bool one_thread)
        : cuda_(cuda), library_(library), team_(ranks), ranks_(static_cast<size_t>(ranks)) {
        ncclUniqueId id;
        std::vector<ncclComm_t> all(ranks_.size());
        if (one_thread) {
            std::vector<int> gpus;
            for (int rank = 0; rank < ranks; rank++) gpus.push_back(gpu(rank));
            cuda_.use(0);
            library_.check("ncclCommInitAll",
                           library_.CommInitAll(all.data(), ranks, gpus.data()), nullptr);
        } else {
            library_.check("ncclGetUniqueId", library_.GetUniqueId(&id), nullptr);
        }
        team_.run([&](int rank) {
            Rank &mine = (*this)[rank];
            cuda_.use(gpu(rank));
            mine.stream = cuda_.stream();
            for (DevicePtr *at : {&mine.source, &mine.input, &mine.output})
                *at = cuda_.allocate(bytes + 2 * kGuard);
            mine.scalar = cuda_.allocate(kGuard);
            if (one_thread) mine.comm = all[static_cast<size_t>(rank)];
            else
                library_.check("ncclCommInitRank",
                               library_.CommInitRank(&mine.comm, ranks, id, rank), nullptr);
        });
    }

    // Ends the communicators in rank order; throws if one of them fails.
    void finish() {
        team_.run([&](int rank) {
            Rank &mine = (*this)[rank];
            cuda_.wait(mine.stream);
            ncclResult_t found = ncclSuccess;
            library_.check("ncclCommGetAsyncError",
                           library_.CommGetAsyncError(mine.comm, &found), mine.comm);
            library_.check("the communicator", found, mine.comm);
            library_.check("ncclCommFinalize", library_.CommFinalize(mine.comm), mine.comm);
            ncclComm_t comm = mine.comm;
            mine.comm = nullptr;
            library_.check("ncclCommDestroy", library_.CommDestroy(comm), nullptr);
        });
    }

    ~World() {
        try {
            team_.run([&](int rank) {
                Rank &mine = (*this)[rank];
                if (mine.comm) library_.CommAbort(mine.comm);
                for (DevicePtr at : {mine.source, mine.input, mine.output, mine.scalar})
                    if (at) cuda_.release(at);
            });
        } catch (const std::exception &) {
            // Only the first failure is reported.
        }
    }

    World(const World &) = delete;
    World &operator=(const World &) = delete;

    int gpu(int rank) const { return rank % cuda_.gpus(); }
    int size() const { return team_.ranks(); }
    const Cuda &cuda() const { return cuda_; }
    const Library &library() const { return library_; }
    Rank &operator[](int rank) { return ranks_[static_cast<size_t>(rank)]; }
    void run(const std::function<void(int)> &job) { team_.run(job); }

  private:
    const Cuda &cuda_;
    const Library &library_;
    Team team_;
    std::vector<Rank> ranks_;
};

}  // namespace compare
