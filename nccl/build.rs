//! Gives the shared library the soname of NCCL's, and hides all symbols except those of NCCL's
//! functions.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    // rustc also exports the functions of cinch.h from this library. Hidden, they do not clash with
    // libcinch.so.0 in the same process, and the linker drops unused ones.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
