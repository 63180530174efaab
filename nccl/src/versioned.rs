//! Structs of the header that grow at their end: `size`, `magic` and `version` first.
//!
//! A caller's struct may be shorter than ours, or longer. As many bytes as both have are copied;
//! then every field that is newer than the header the caller was compiled with is set back to its
//! default. The size alone would not do: a field may have taken the place of padding.

use cinch::{Error, Result};
use std::ffi::{c_char, c_int};

/// A struct of the header.
///
/// # Safety
/// `repr(C)`, of integers, floats and pointers; `size`, `magic` and `version` are its first 16
/// bytes.
pub(crate) unsafe trait Versioned: Copy {
    /// Its name.
    const NAME: &'static str;
    /// The macro that fills it.
    const INITIALIZER: &'static str;
    /// What tells it from one that was not initialised.
    const MAGIC: u32;
    /// What fields that a caller does not have hold.
    fn unset() -> Self;
    /// Sets fields that appeared after `version` back.
    fn forget_newer(&mut self, version: u32);
}

/// The first fields.
#[derive(Clone, Copy)]
#[repr(C)]
struct Header {
    size: usize,
    magic: u32,
    version: u32,
}

/// The struct at `config`; `None` for NULL.
///
/// # Safety
/// `config` is NULL, or readable for the size that it says.
pub(crate) unsafe fn read<T: Versioned>(config: *const T) -> Result<Option<T>> {
    if config.is_null() {
        return Ok(None);
    }
    // SAFETY: every version has the header.
    let header = unsafe { config.cast::<Header>().read_unaligned() };
    if header.magic != T::MAGIC || header.size < size_of::<Header>() {
        return Err(Error::invalid_argument(format!(
            "the {} was not initialised: its magic is {:#x} and its size {}; start from {}",
            T::NAME,
            header.magic,
            header.size,
            T::INITIALIZER
        )));
    }
    let mut own = T::unset();
    let bytes = header.size.min(size_of::<T>());
    // SAFETY: as many bytes as both have; any bytes are integers, floats and pointers.
    unsafe {
        std::ptr::copy_nonoverlapping(
            config.cast::<u8>(),
            std::ptr::from_mut(&mut own).cast(),
            bytes,
        );
    }
    own.forget_newer(header.version);
    Ok(Some(own))
}

/// How a field of this type says that it is not set.
pub(crate) trait Unset {
    /// That value.
    const UNSET: Self;
}
impl Unset for c_int {
    const UNSET: c_int = c_int::MIN;
}
impl Unset for *const c_char {
    const UNSET: *const c_char = std::ptr::null();
}

/// Defines a versioned struct from the list of its fields, each with the version that has it.
macro_rules! versioned {
    (
        $(#[doc = $doc:literal])*
        struct $name:ident, $initializer:literal, magic $magic:expr;
        $($field:ident: $type:ty = $unset:expr, since $since:literal;)*
    ) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct $name {
            /// `sizeof` in the program's header.
            pub size: usize,
            /// Tells it from one that was not initialised.
            pub magic: u32,
            /// Of the program's header.
            pub version: u32,
            $(
                #[doc = concat!("Since ", stringify!($since), ".")]
                pub $field: $type,
            )*
        }

        impl $name {
            /// Name, offset, and first version of every field after the first three.
            pub const FIELDS: &[(&str, usize, u32)] =
                &[$((stringify!($field), std::mem::offset_of!($name, $field), $since)),*];
        }

        // SAFETY: `repr(C)` of the types that the trait names, the header first.
        unsafe impl $crate::versioned::Versioned for $name {
            const NAME: &'static str = stringify!($name);
            const INITIALIZER: &'static str = $initializer;
            const MAGIC: u32 = $magic;
            fn unset() -> $name {
                $name {
                    size: size_of::<$name>(),
                    magic: $magic,
                    version: 0,
                    $($field: $unset,)*
                }
            }
            fn forget_newer(&mut self, version: u32) {
                $(if version < $since {
                    self.$field = $unset;
                })*
            }
        }
    };
}
