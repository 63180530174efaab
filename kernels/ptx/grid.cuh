// Programmatic dependent launch: a kernel may start while the previous kernel of its stream is
// still ending. The host launches a kernel in this way only if it calls wait_for_previous_kernel
// (`Function::launch_with`).
#pragma once

namespace cinch {

// Waits until the previous kernel of the stream has ended and its writes are visible. Before this
// call a kernel may touch only its parameters and shared memory. Every path of such a kernel makes
// the call: later kernels take this kernel's end for the end of all earlier ones.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream launch, once one thread of every block has called this. No
// thread of the block may wait for another rank afterwards: the next kernel takes multiprocessors
// that a peer on this GPU may need.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace cinch
