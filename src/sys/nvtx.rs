//! Ranges for profilers that read NVTX, such as Nsight Systems.
//!
//! A profiler sets `NVTX_INJECTION64_PATH` to its library. A client of NVTX opens that library and passes it a function
//! that returns tables; the library writes the addresses of its functions to places that the tables name. NVIDIA's
//! header `nvtxTypes.h` (NVTX 3) defines the tables. Without the variable a range costs one load.

use super::fork_safe::ForkSafeOnce;
use super::loader::Library;
use super::log::{self, Level};
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::os::unix::ffi::OsStringExt;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Name of the ranges' domain.
const DOMAIN: &CStr = c"cinch";
/// Version of the tables and of [`RangeAttributes`].
const NVTX_VERSION: u16 = 3;

/// Number of the table of modules, and of the table with the version.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;

/// Number of function numbers of each module, 0 included: none, core, CUDA, OpenCL, CUDA runtime, core with domains,
/// synchronisation. Profilers may write to all of them.
const FUNCTIONS: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
/// The largest of [`FUNCTIONS`].
const MOST_FUNCTIONS: usize = 16;
/// Module with the functions that take a domain, and numbers of its functions.
const WITH_DOMAIN: usize = 5;
const PUSH: usize = 4;
const POP: usize = 5;
const CREATE_DOMAIN: usize = 12;

/// Addresses of the profiler's functions, by module and number.
static ADDRESSES: [[AtomicPtr<c_void>; MOST_FUNCTIONS]; FUNCTIONS.len()] =
    [const { [const { AtomicPtr::new(null_mut()) }; MOST_FUNCTIONS] }; FUNCTIONS.len()];

/// Places of [`ADDRESSES`] as a profiler reads them.
struct Places([[*mut *mut c_void; MOST_FUNCTIONS]; FUNCTIONS.len()]);

// SAFETY: the addresses are those of atomics in a static.
unsafe impl Send for Places {}
// SAFETY: see `Send`; nothing changes the addresses.
unsafe impl Sync for Places {}

static PLACES: ForkSafeOnce<Places> = ForkSafeOnce::new();
static PROFILER: ForkSafeOnce<Option<Profiler>> = ForkSafeOnce::new();

/// Table [`CALLBACKS`].
#[repr(C)]
struct Callbacks {
    size: usize,
    functions: unsafe extern "C" fn(c_int, *mut *const *mut *mut c_void, *mut c_uint) -> c_int,
}

/// Table [`VERSION_INFO`].
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_version: unsafe extern "C" fn(u32),
}

/// Attributes of a range that a profiler shows: `nvtxEventAttributes_v2`.
#[repr(C)]
struct RangeAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}

/// Payload of [`RangeAttributes`]: an unsigned number of 64 bits.
const PAYLOAD_U64: i32 = 1;
/// Message of [`RangeAttributes`]: a C string.
const MESSAGE_TEXT: i32 = 1;

/// Functions of the profiler.
struct Profiler {
    domain: usize,
    push: unsafe extern "C" fn(*mut c_void, *const RangeAttributes) -> c_int,
    pop: unsafe extern "C" fn(*mut c_void) -> c_int,
}

/// A range of this thread, which ends when it is dropped.
#[derive(Debug)]
pub struct ProfilerRange(());

/// Opens the profiler's library at `path`, which `variable` names, if there is one. The first call of a process decides.
pub fn open(variable: &str, path: Option<OsString>) {
    PROFILER.get_or_init(|| Profiler::open(variable, path?));
}

/// Begins a range of this thread, named `name`, with a number of bytes. Returns `None` if no profiler reads ranges.
#[inline]
pub fn range(name: impl FnOnce() -> String, bytes: usize) -> Option<ProfilerRange> {
    let profiler = PROFILER.get()?.as_ref()?;
    profiler.begin(&name(), bytes)
}

impl Profiler {
    fn open(variable: &str, path: OsString) -> Option<Profiler> {
        let path = CString::new(path.into_vec()).ok()?;
        let library = Library::open(&path)
            .inspect_err(|why| {
                log::line(
                    Level::Warn,
                    format_args!("no ranges for a profiler: {variable} cannot be opened: {why}"),
                );
            })
            .ok()?;
        let initialise = library.symbol(c"InitializeInjectionNvtx2")?;
        type ExportTable = unsafe extern "C" fn(u32) -> *const c_void;
        // SAFETY: NVTX gives the symbol this type. `Library` never unloads it.
        let accepted = unsafe {
            let initialise: unsafe extern "C" fn(ExportTable) -> c_int = transmute(initialise);
            initialise(export_table)
        };
        if accepted == 0 {
            return None;
        }
        let address = |function: usize| {
            // Relaxed: this thread has run the profiler's code, which wrote the address.
            let address = ADDRESSES[WITH_DOMAIN][function].load(Ordering::Relaxed);
            (!address.is_null()).then_some(address)
        };
        let (push, pop) = (address(PUSH)?, address(POP)?);
        // SAFETY: NVTX gives the functions with these numbers these types, and their library is never unloaded.
        unsafe {
            let domain = address(CREATE_DOMAIN).map_or(null_mut(), |create| {
                let create: unsafe extern "C" fn(*const c_char) -> *mut c_void = transmute(create);
                create(DOMAIN.as_ptr())
            });
            Some(Profiler {
                domain: domain.addr(),
                push: transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut c_void, *const RangeAttributes) -> c_int,
                >(push),
                pop: transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> c_int>(pop),
            })
        }
    }

    fn domain(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.domain)
    }

    #[cold]
    fn begin(&self, name: &str, bytes: usize) -> Option<ProfilerRange> {
        let message = CString::new(name).ok()?;
        let attributes = RangeAttributes {
            version: NVTX_VERSION,
            size: size_of::<RangeAttributes>() as u16,
            category: 0,
            color_type: 0,
            color: 0,
            payload_type: PAYLOAD_U64,
            reserved: 0,
            payload: bytes as u64,
            message_type: MESSAGE_TEXT,
            message: message.as_ptr(),
        };
        // SAFETY: the function is the profiler's, for a domain that it made; it copies the message.
        unsafe { (self.push)(self.domain(), &attributes) };
        Some(ProfilerRange(()))
    }
}

impl Drop for ProfilerRange {
    fn drop(&mut self) {
        if let Some(Some(profiler)) = PROFILER.get() {
            // SAFETY: the function is the profiler's, for a domain that it made. This thread has begun a range.
            unsafe { (profiler.pop)(profiler.domain()) };
        }
    }
}

/// Returns the table with this number, or NULL.
unsafe extern "C" fn export_table(number: u32) -> *const c_void {
    static CALLBACK_TABLE: Callbacks = Callbacks {
        size: size_of::<Callbacks>(),
        functions: module_functions,
    };
    static VERSION_TABLE: VersionInfo = VersionInfo {
        size: size_of::<VersionInfo>(),
        version: NVTX_VERSION as u32,
        reserved: 0,
        set_version: ignore_version,
    };
    match number {
        CALLBACKS => (&raw const CALLBACK_TABLE).cast(),
        VERSION_INFO => (&raw const VERSION_TABLE).cast(),
        _ => null(),
    }
}

unsafe extern "C" fn ignore_version(_: u32) {}

/// Stores the places of a module's addresses and their number. Returns 1, or 0 for an unknown module.
unsafe extern "C" fn module_functions(
    module: c_int,
    table: *mut *const *mut *mut c_void,
    size: *mut c_uint,
) -> c_int {
    let module = usize::try_from(module).unwrap_or(0);
    let Some(&count @ 1..) = FUNCTIONS.get(module) else {
        return 0;
    };
    let places = PLACES.get_or_init(|| {
        Places(std::array::from_fn(|module| {
            std::array::from_fn(|function| ADDRESSES[module][function].as_ptr())
        }))
    });
    // SAFETY: NVTX requires of the profiler that both are NULL or writable.
    unsafe {
        if !table.is_null() {
            table.write(places.0[module].as_ptr());
        }
        if !size.is_null() {
            size.write(count as c_uint);
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_have_the_sizes_of_the_header() {
        assert_eq!(size_of::<RangeAttributes>(), 48);
        assert_eq!(std::mem::offset_of!(RangeAttributes, payload), 24);
        assert_eq!(std::mem::offset_of!(RangeAttributes, message), 40);
        assert_eq!(size_of::<Callbacks>(), 16);
        assert_eq!(size_of::<VersionInfo>(), 24);
        assert_eq!(FUNCTIONS.into_iter().max(), Some(MOST_FUNCTIONS));
    }

    #[test]
    fn tables_name_places_for_all_modules() {
        for (module, count) in FUNCTIONS.into_iter().enumerate() {
            let (mut table, mut size) = (null(), 0);
            // SAFETY: both places are writable.
            let found = unsafe { module_functions(module as c_int, &mut table, &mut size) };
            assert_eq!(found, c_int::from(module > 0), "module {module}");
            assert_eq!(size as usize, count);
        }
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { module_functions(7, null_mut(), null_mut()) }, 0);
        // SAFETY: the function has no preconditions.
        assert!(unsafe { export_table(2) }.is_null());
    }
}
