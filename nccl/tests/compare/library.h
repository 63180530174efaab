// A libnccl, opened by its path. A process may open several such libraries.
#pragma once

#include <dlfcn.h>
#include <nccl.h>

#include <string>

#include "cuda.h"

namespace compare {

// Every function that the checks use, by its name without the prefix `nccl`.
#define COMPARE_FUNCTIONS(with)                                                               \
    with(GetVersion) with(GetUniqueId) with(GetErrorString) with(GetLastError)                \
    with(CommInitRank) with(CommInitAll) with(CommFinalize) with(CommDestroy) with(CommAbort) \
    with(CommGetAsyncError) with(AllReduce) with(AllGather) with(ReduceScatter)               \
    with(Broadcast) with(Bcast) with(Reduce) with(Send) with(Recv) with(GroupStart)           \
    with(GroupEnd) with(RedOpCreatePreMulSum) with(RedOpDestroy)

// Functions that NCCL has since 2.28; the checks skip functions that a library lacks.
#define COMPARE_NEWER_FUNCTIONS(with) with(AlltoAll) with(Gather) with(Scatter)

class Library {
  public:
    Library(std::string path, bool is_ours) : path_(std::move(path)), is_ours_(is_ours) {
        // RTLD_LOCAL keeps the symbols of two libraries apart.
        handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!handle_) throw Failure(path_ + ": " + dlerror());
#define COMPARE_FIND(name)                                                            \
    name = reinterpret_cast<decltype(&::nccl##name)>(dlsym(handle_, "nccl" #name));   \
    if (!name) throw Failure(path_ + " has no nccl" #name);
        COMPARE_FUNCTIONS(COMPARE_FIND)
#undef COMPARE_FIND
#define COMPARE_FIND(name) \
    name = reinterpret_cast<decltype(&::nccl##name)>(dlsym(handle_, "nccl" #name));
        COMPARE_NEWER_FUNCTIONS(COMPARE_FIND)
#undef COMPARE_FIND
    }

    const std::string &path() const { return path_; }
    bool is_ours() const { return is_ours_; }

    int version() const {
        int version = 0;
        check("ncclGetVersion", GetVersion(&version), nullptr);
        return version;
    }

    void check(const char *call, ncclResult_t result, ncclComm_t comm) const {
        if (result == ncclSuccess) return;
        throw Failure(path_ + ": " + call + ": " + GetErrorString(result) + ": " +
                      GetLastError(comm));
    }

#define COMPARE_DECLARE(name) decltype(&::nccl##name) name = nullptr;
    COMPARE_FUNCTIONS(COMPARE_DECLARE)
    COMPARE_NEWER_FUNCTIONS(COMPARE_DECLARE)
#undef COMPARE_DECLARE

  private:
    std::string path_;
    bool is_ours_;
    void *handle_ = nullptr;
};

}  // namespace compare
