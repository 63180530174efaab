//! Compiles CUDA sources of the project to shared libraries for the host.

use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Returns whether a compiler can be started.
pub fn starts(compiler: &str) -> bool {
    let mut command = Command::new(compiler);
    command.arg("--version").stdout(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A shared library that stays open until the process exits.
pub struct Library(*mut c_void);

impl Library {
    /// Compiles `tests/cuda_host/NAME.cpp` with `options`. Headers in `folders` take precedence over
    /// those of `kernels/`.
    pub fn compile(compiler: &str, name: &str, options: &[&str], folders: &[&str]) -> Library {
        // A source may be compiled several times, with different options, even by several threads.
        static BUILT: AtomicUsize = AtomicUsize::new(0);
        let number = BUILT.fetch_add(1, Ordering::Relaxed);
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!(
            "cuda-{name}-{compiler}-{}-{number}.so",
            std::process::id()
        ));
        let mut command = Command::new(compiler);
        command.args(["-std=c++17", "-fPIC", "-shared", "-ffp-contract=off"]);
        if compiler == "g++" {
            // Without this option, unique symbols of the first library would replace those of later
            // libraries.
            command.arg("-fno-gnu-unique");
        }
        command.args(["-Wall", "-Wextra", "-Werror"]).args(options);
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("fma") {
            command.arg("-mfma");
        }
        for folder in folders.iter().chain(&["kernels"]) {
            command.arg("-I").arg(root.join(folder));
        }
        command.arg(root.join(format!("tests/cuda_host/{name}.cpp")));
        let output = command.arg("-o").arg(&library).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{compiler}: {text}");
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: `path` is a C string. The library's constructors do nothing, and it is never
        // closed.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "dlopen {}", library.display());
        std::fs::remove_file(&library).unwrap();
        Library(handle)
    }

    /// Returns the address of the function `name`; panics if the library has none.
    pub fn find(&self, name: &str) -> *mut c_void {
        self.look_up(name)
            .unwrap_or_else(|| panic!("{name} is missing"))
    }

    /// Returns the address of the function `name`, if the library has it.
    pub fn look_up(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).unwrap();
        // SAFETY: `Library` never closes its handle, and `name` is a C string.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}
