//! Gives the shared library that depends on this package NCCL's soname.
//!
//! Cargo passes what a build script says for a cdylib on to the cdylibs above it: the soname of
//! libcinch.so.0 would be that of libnccl.so.2, too. The last one counts, and cargo puts a
//! package's own before those of its dependencies, which come in the order of their names: this
//! package's name is behind cinch-ccl's. `nccl/tests/abi.rs` looks at the result.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
}
