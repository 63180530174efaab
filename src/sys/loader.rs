//! Shared libraries that are opened at run time, and tables of their functions.

use std::ffi::{CStr, c_void};

/// A shared library that is never unloaded, because such libraries start threads and register
/// callbacks that outlive any handle.
pub(super) struct Library {
    handle: *mut c_void,
    name: String,
}

// SAFETY: the handle is only passed to `dlsym`, which any number of threads may call at once.
unsafe impl Send for Library {}
// SAFETY: the handle is only passed to `dlsym`, which any number of threads may call at once.
unsafe impl Sync for Library {}

impl Library {
    /// Opens `name`, a path or a name that the loader searches for. The library's symbols stay
    /// local to it.
    ///
    /// # Errors
    /// The loader's reason.
    pub fn open(name: &CStr) -> Result<Library, String> {
        // SAFETY: `name` is a C string. The vendor of the library answers for its initialisers.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(last_error());
        }
        Ok(Library {
            handle,
            name: name.to_string_lossy().into_owned(),
        })
    }

    /// Returns the program itself with the libraries that it was linked with.
    ///
    /// # Errors
    /// The loader's reason.
    pub fn program() -> Result<Library, String> {
        // SAFETY: NULL stands for the program, which is loaded already.
        let handle = unsafe { libc::dlopen(std::ptr::null(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(last_error());
        }
        Ok(Library {
            handle,
            name: "the program".into(),
        })
    }

    /// Returns whether this process has opened `name` already.
    pub fn is_open(name: &CStr) -> bool {
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
        // SAFETY: `name` is a C string. RTLD_NOLOAD loads nothing, and `dlclose` returns the count
        // that `dlopen` took.
        unsafe {
            let handle = libc::dlopen(name.as_ptr(), flags);
            !handle.is_null() && libc::dlclose(handle) == 0
        }
    }

    /// Returns the name by which the library was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the address of the default version of the symbol `name`, or `None` if the library
    /// lacks it.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: `Library` never closes the handle, and `name` is a C string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Keeps the shared library that contains this code loaded, because detached threads run its code.
pub(super) fn stay_loaded() {
    // SAFETY: `Dl_info` consists of integers and pointers, for which zeros are valid.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    let own = stay_loaded as fn() as *const c_void;
    let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: `dladdr` writes only `found`, whose name is a C string after success. RTLD_NOLOAD
    // loads nothing. In a statically linked program `dlopen` finds no library, and nothing can be
    // unloaded.
    unsafe {
        if libc::dladdr(own, &mut found) != 0 && !found.dli_fname.is_null() {
            libc::dlopen(found.dli_fname, flags);
        }
    }
}

/// Returns why the last `dlopen` of this thread failed.
fn last_error() -> String {
    // SAFETY: `dlerror` returns NULL or a C string that is valid until this thread's next call of
    // the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader gives no reason".into();
    }
    // SAFETY: `text` is not NULL, and this thread has not called the loader since `dlerror`.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Defines a struct of C functions, and `find`, which fills it from a [`Library`]. Optional
/// functions exist in newer versions of the library only.
macro_rules! function_table {
    (
        $(#[$doc:meta])*
        $vis:vis struct $table:ident;
        required { $($name:ident = $symbol:tt: fn($($type:ty),*) $(-> $result:ty)?;)* }
        optional { $($late:ident = $late_symbol:tt: fn($($late_type:ty),*)
            $(-> $late_result:ty)?;)* }
    ) => {
        $(#[$doc])*
        #[allow(missing_docs, non_snake_case)]
        $vis struct $table {
            $($vis $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
            $($vis $late: Option<unsafe extern "C" fn($($late_type),*) $(-> $late_result)?>,)*
        }

        #[allow(non_snake_case)]
        impl $table {
            /// Looks up every name. The error holds the names of missing required functions.
            ///
            /// # Safety
            /// Each symbol of `library` is the C function of that name with the type in the table.
            pub(in crate::sys) unsafe fn find(
                library: &$crate::sys::loader::Library,
            ) -> std::result::Result<$table, Vec<&'static str>> {
                let look = |name: &'static str| {
                    let text = std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).ok()?;
                    library.symbol(text)
                };
                let mut missing = Vec::new();
                $(
                    let $name = look(concat!($crate::sys::loader::symbol_name!($symbol), "\0"));
                    if $name.is_none() {
                        missing.push($crate::sys::loader::symbol_name!($symbol));
                    }
                )*
                match ($($name,)*) {
                    ($(Some($name),)*) => Ok($table {
                        $(
                            // SAFETY: by the contract of `find` the symbol has this type; `Library`
                            // never unloads it.
                            $name: unsafe {
                                std::mem::transmute::<
                                    *mut std::ffi::c_void,
                                    unsafe extern "C" fn($($type),*) $(-> $result)?,
                                >($name)
                            },
                        )*
                        $(
                            // SAFETY: by the contract of `find` the symbol has this type; `Library`
                            // never unloads it.
                            $late: look(concat!($crate::sys::loader::symbol_name!($late_symbol), "\0")).map(|address| unsafe {
                                std::mem::transmute::<
                                    *mut std::ffi::c_void,
                                    unsafe extern "C" fn($($late_type),*) $(-> $late_result)?,
                                >(address)
                            }),
                        )*
                    }),
                    _ => Err(missing),
                }
            }
        }
    };
}

/// Expands to the symbol's name as text; a table gives the name as a literal or as an identifier.
macro_rules! symbol_name {
    ($symbol:literal) => {
        $symbol
    };
    ($symbol:ident) => {
        stringify!($symbol)
    };
}

pub(super) use {function_table, symbol_name};
