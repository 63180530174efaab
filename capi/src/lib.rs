//! The C library of cinch, `libcinch.so` and `libcinch.a`, with the header `include/cinch.h`.
//!
//! The functions are those of `src/capi` in the package `cinch-ccl`; the compiler exports them from here.
//! They have a package of their own so that Rust users of `cinch-ccl` link no C library.

// Links the crate for the functions that it exports.
use cinch_rust as _;
