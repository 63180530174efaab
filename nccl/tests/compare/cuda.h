// The CUDA driver, opened at run time, so that building needs neither headers nor libraries of CUDA. With
// `host`, all memory is host memory, on which cinch runs with CINCH_DEVICE=host.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

namespace compare {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

using Device = int;
using DevicePtr = unsigned long long;
struct ContextHandle;
struct StreamHandle;
struct GraphHandle;
struct GraphExecHandle;
using Context = ContextHandle *;
using Stream = StreamHandle *;
using Graph = GraphHandle *;
using GraphExec = GraphExecHandle *;

constexpr int kNotReady = 600;
constexpr unsigned kNonBlocking = 1;
constexpr int kCaptureThreadLocal = 1;
constexpr int kComputeMajor = 75;

// Longest wait for a stream: far longer than any call here takes.
constexpr auto kPatience = std::chrono::seconds(60);

class Cuda {
  public:
    // With `host`, memory is host memory and streams are NULL.
    explicit Cuda(bool host) : host_(host) {}

    bool is_host() const { return host_; }

    // Opens the driver; returns false without a driver or without a GPU.
    bool open() {
        if (host_) return true;
        handle_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (!handle_) return false;
        find(init_, "cuInit");
        find(device_count_, "cuDeviceGetCount");
        find(device_get_, "cuDeviceGet");
        find(device_attribute_, "cuDeviceGetAttribute");
        find(retain_, "cuDevicePrimaryCtxRetain");
        find(set_current_, "cuCtxSetCurrent");
        find(error_name_, "cuGetErrorName");
        find(alloc_, "cuMemAlloc_v2");
        find(free_, "cuMemFree_v2");
        find(to_device_, "cuMemcpyHtoDAsync_v2");
        find(to_host_, "cuMemcpyDtoHAsync_v2");
        find(copy_, "cuMemcpyDtoDAsync_v2");
        find(fill_, "cuMemsetD8Async");
        find(stream_create_, "cuStreamCreate");
        find(stream_query_, "cuStreamQuery");
        find(begin_capture_, "cuStreamBeginCapture_v2");
        find(end_capture_, "cuStreamEndCapture");
        find(instantiate_, "cuGraphInstantiateWithFlags");
        find(launch_, "cuGraphLaunch");
        find(exec_destroy_, "cuGraphExecDestroy");
        find(graph_destroy_, "cuGraphDestroy");
        return init_(0) == 0 && gpus() > 0;
    }

    int gpus() const {
        if (host_) return 1;
        int count = 0;
        return device_count_ && device_count_(&count) == 0 ? count : 0;
    }

    // Makes the primary context of a GPU current on this thread.
    void use(int gpu) const {
        if (host_) return;
        Device device = 0;
        Context context = nullptr;
        check("cuDeviceGet", device_get_(&device, gpu));
        check("cuDevicePrimaryCtxRetain", retain_(&context, device));
        check("cuCtxSetCurrent", set_current_(context));
    }

    int compute_major(int gpu) const {
        Device device = 0;
        int major = 0;
        check("cuDeviceGet", device_get_(&device, gpu));
        check("cuDeviceGetAttribute", device_attribute_(&major, kComputeMajor, device));
        return major;
    }

    DevicePtr allocate(size_t bytes) const {
        if (host_) return reinterpret_cast<DevicePtr>(std::malloc(bytes));
        DevicePtr at = 0;
        check("cuMemAlloc", alloc_(&at, bytes));
        return at;
    }

    void release(DevicePtr at) const {
        if (host_) std::free(reinterpret_cast<void *>(at));
        else free_(at);
    }

    Stream stream() const {
        Stream stream = nullptr;
        if (!host_) check("cuStreamCreate", stream_create_(&stream, kNonBlocking));
        return stream;
    }

    void to_device(DevicePtr to, const void *from, size_t bytes, Stream stream) const {
        if (host_) std::memcpy(reinterpret_cast<void *>(to), from, bytes);
        else if (bytes) check("cuMemcpyHtoDAsync", to_device_(to, from, bytes, stream));
    }

    // Waits before it copies: a copy to pageable memory blocks this thread inside the driver, where
    // it could block the rank for which the stream waits.
    void to_host(void *to, DevicePtr from, size_t bytes, Stream stream) const {
        wait(stream);
        if (host_) std::memcpy(to, reinterpret_cast<void *>(from), bytes);
        else if (bytes) check("cuMemcpyDtoHAsync", to_host_(to, from, bytes, stream));
    }

    void copy(DevicePtr to, DevicePtr from, size_t bytes, Stream stream) const {
        if (host_) std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
        else if (bytes) check("cuMemcpyDtoDAsync", copy_(to, from, bytes, stream));
    }

    void fill(DevicePtr at, unsigned char value, size_t bytes, Stream stream) const {
        if (host_) std::memset(reinterpret_cast<void *>(at), value, bytes);
        else if (bytes) check("cuMemsetD8Async", fill_(at, value, bytes, stream));
    }

    // Waits for a stream; throws after kPatience.
    void wait(Stream stream) const {
        if (host_) return;
        const auto end = std::chrono::steady_clock::now() + kPatience;
        for (;;) {
            const int result = stream_query_(stream);
            if (result != kNotReady) return check("cuStreamQuery", result);
            if (std::chrono::steady_clock::now() > end)
                throw Failure("a stream has not ended after 60 s");
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    void begin_capture(Stream stream) const {
        check("cuStreamBeginCapture", begin_capture_(stream, kCaptureThreadLocal));
    }

    GraphExec end_capture(Stream stream) const {
        Graph graph = nullptr;
        GraphExec exec = nullptr;
        check("cuStreamEndCapture", end_capture_(stream, &graph));
        check("cuGraphInstantiate", instantiate_(&exec, graph, 0));
        graph_destroy_(graph);
        return exec;
    }

    void launch(GraphExec exec, Stream stream) const {
        check("cuGraphLaunch", launch_(exec, stream));
    }

    void release(GraphExec exec) const { exec_destroy_(exec); }

  private:
    void check(const char *call, int result) const {
        if (result == 0) return;
        const char *name = nullptr;
        error_name_(result, &name);
        throw Failure(std::string(call) + ": " + (name ? name : "unknown"));
    }

    template <typename Function>
    void find(Function &function, const char *name) {
        function = reinterpret_cast<Function>(dlsym(handle_, name));
        if (!function) throw Failure(std::string("the driver has no ") + name);
    }

    const bool host_;
    void *handle_ = nullptr;
    int (*init_)(unsigned) = nullptr;
    int (*device_count_)(int *) = nullptr;
    int (*device_get_)(Device *, int) = nullptr;
    int (*device_attribute_)(int *, int, Device) = nullptr;
    int (*retain_)(Context *, Device) = nullptr;
    int (*set_current_)(Context) = nullptr;
    int (*error_name_)(int, const char **) = nullptr;
    int (*alloc_)(DevicePtr *, size_t) = nullptr;
    int (*free_)(DevicePtr) = nullptr;
    int (*to_device_)(DevicePtr, const void *, size_t, Stream) = nullptr;
    int (*to_host_)(void *, DevicePtr, size_t, Stream) = nullptr;
    int (*copy_)(DevicePtr, DevicePtr, size_t, Stream) = nullptr;
    int (*fill_)(DevicePtr, unsigned char, size_t, Stream) = nullptr;
    int (*stream_create_)(Stream *, unsigned) = nullptr;
    int (*stream_query_)(Stream) = nullptr;
    int (*begin_capture_)(Stream, int) = nullptr;
    int (*end_capture_)(Stream, Graph *) = nullptr;
    int (*instantiate_)(GraphExec *, Graph, unsigned long long) = nullptr;
    int (*launch_)(GraphExec, Stream) = nullptr;
    int (*exec_destroy_)(GraphExec) = nullptr;
    int (*graph_destroy_)(Graph) = nullptr;
};

}  // namespace compare
