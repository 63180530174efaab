//! What the loader of shared libraries says.

use std::ffi::CStr;

/// Why the last `dlopen` or `dlsym` of this thread failed.
pub(super) fn last_error() -> String {
    // SAFETY: `dlerror` returns NULL or a C string that lasts until this thread's next call of
    // its kind.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader does not say why".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}
