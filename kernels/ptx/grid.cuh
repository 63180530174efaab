// Kernels that begin while what is before them in the stream still ends (programmatic dependent
// launch). The host starts only those early that wait here first: see `Function::launch_to_begin`.
#pragma once

namespace cinch {

// Waits until the kernel before this one in its stream has ended and its writes are seen. Until then it
// may touch nothing but its parameters and shared memory. Every kernel that starts early comes through
// here on every way: what is behind it takes its end for that of all before it, too.
__device__ __forceinline__ void await_what_is_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream begin to be launched, once all blocks have said so, for each of
// which one thread is enough: so no thread of the block may wait for another rank any more. The next
// kernel takes room that a peer on this GPU may need.
__device__ __forceinline__ void let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace cinch
