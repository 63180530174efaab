//! Shared libraries that are opened at run time, and tables of their functions.

use std::ffi::{CStr, c_void};

/// A shared library, open for good: those that are used keep threads of their own, or register
/// things in themselves that outlive any handle.
pub(super) struct Library {
    handle: *mut c_void,
    name: String,
}

// SAFETY: the handle is only ever looked names up in, which the loader lets all threads do at once.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Opens `name`, a path or what the loader searches for. The library's names stay its own.
    ///
    /// # Errors
    /// Why it does not load, in the loader's words.
    pub fn open(name: &CStr) -> Result<Library, String> {
        // SAFETY: a C string; the library's initialisers are its maker's to vouch for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(last_error());
        }
        Ok(Library {
            handle,
            name: name.to_string_lossy().into_owned(),
        })
    }

    /// Whether somebody in this process has opened `name` already.
    pub fn is_open(name: &CStr) -> bool {
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
        // SAFETY: a C string; nothing is loaded, only counted, and given back.
        unsafe {
            let handle = libc::dlopen(name.as_ptr(), flags);
            !handle.is_null() && libc::dlclose(handle) == 0
        }
    }

    /// As it was opened.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address of `name`, the default one where it has versions; `None` if there is none.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is open and stays so; a C string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Keeps the library that this code is in loaded for good, where it is one: for threads that nobody
/// waits for.
pub(super) fn stay_loaded() {
    // SAFETY: integers and pointers, for which zeros are values.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    let own = stay_loaded as fn() as *const c_void;
    let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
    // SAFETY: writes one struct, whose name is a C string if the address was found; nothing is loaded
    // that is not there already. A program is not found by its name, and is not unloaded.
    unsafe {
        if libc::dladdr(own, &mut found) != 0 && !found.dli_fname.is_null() {
            libc::dlopen(found.dli_fname, flags);
        }
    }
}

/// Why the last `dlopen` of this thread failed.
fn last_error() -> String {
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

/// Makes a struct of C functions, and `find`, which fills it from a [`Library`]; functions that newer
/// versions have are `Option`s.
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
            /// Looks every name up; `Err` has the required ones that are missing.
            ///
            /// # Safety
            /// What `library` has under a name is the C function of that name, with its type.
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
                            // SAFETY: the address of the C function of that name and type, by the
                            // caller's word, which stays loaded for good.
                            $name: unsafe {
                                std::mem::transmute::<
                                    *mut std::ffi::c_void,
                                    unsafe extern "C" fn($($type),*) $(-> $result)?,
                                >($name)
                            },
                        )*
                        $(
                            // SAFETY: as above; a missing one is `None`.
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

/// Text of a symbol that a table names by a literal or by an identifier.
macro_rules! symbol_name {
    ($symbol:literal) => {
        $symbol
    };
    ($symbol:ident) => {
        stringify!($symbol)
    };
}

pub(super) use {function_table, symbol_name};
