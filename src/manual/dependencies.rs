//! # Dependencies
//!
//! | crate | what for | why this one |
//! | --- | --- | --- |
//! | `libc` | raw system calls and constants | the base of all others |
//! | `nix` | sockets, memfd, poll, file descriptor passing, with errors as values | covers all of these; owned descriptors |
//! | `hmac`, `sha2`, `hkdf` | authentication of connections | small, audited, no C |
//! | `getrandom` | secrets and nonces | the operating system's generator, nothing more |
//! | `clap` (tool) | command line | help and suggestions that users expect |
//! | `serde`, `serde_json` (tool) | JSON results | the standard |
//! | `criterion` (tests) | micro benchmarks | statistics, baselines |
//! | `bindgen` (tests) | sizes, offsets and values of `<infiniband/verbs.h>`, against which ours are checked | an independent reading of the header; users need neither it nor libclang |
//! | `cbindgen` (tests) | `include/cinch.h` from `src/ffi`, and its drift check | the standard; a library, so nothing to install |
//! | `half` (tests) | oracle for f16 and bf16 conversions | independent of ours |
//! | `proptest` (tests) | property tests | shrinking |
//! | `loom` (tests) | exhaustive interleavings of the slot FIFO | models weak memory |
