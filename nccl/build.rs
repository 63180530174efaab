//! Gives the shared library NCCL's soname, and hides what is not NCCL's interface.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Cargo puts that of libcinch.so.0 behind it, which soname/build.rs mends.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    // The compiler exports what the crates below export, too. Their archives are hidden, so that
    // libcinch.so.0 may be in the same process, and so that what nobody calls is left out.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
}
