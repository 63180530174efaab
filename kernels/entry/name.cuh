// The names of kernels that take part in collectives.
#pragma once

// The name of a kernel, from what it does. PyTorch's profiler and the tools that read its traces
// (Holistic Trace Analysis) count a kernel as communication by this prefix. The host looks names up
// with it, too (KERNEL_PREFIX in src/engine/gpu/kernels.rs). Kernels that only convert or probe
// memory have other names.
#define CINCH_KERNEL_NAME(does) ncclDevKernel_cinch_##does
