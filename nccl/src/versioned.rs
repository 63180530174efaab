//! Structs of nccl.h that grow at their end and begin with `size`, `magic` and `version`.
//!
//! A program's struct may be shorter or longer than the library's. [`read`] copies the bytes that both have.
//! It then resets every field that is newer than the header that the program was compiled with: such a field
//! may lie where the older struct had padding, so the size alone does not tell.

use cinch::capi::core::versioned_struct::{StructHeader, VersionedStruct, copy_known, read_header};
use cinch::{Error, Result};
use std::ffi::{c_char, c_int};

/// A versioned struct of nccl.h; each field has a value that means unset.
pub(crate) trait NcclStruct: VersionedStruct {
    /// Name of the macro in nccl.h that initialises the struct.
    const INITIALIZER: &'static str;
    /// Returns a struct with no field set.
    fn unset() -> Self;
    /// Resets the fields that appeared after `version`.
    fn forget_newer(&mut self, version: u32);
}

/// Returns the struct at `config`; `None` for NULL.
///
/// # Errors
/// Invalid argument if it was not initialised.
///
/// # Safety
/// `config` is NULL, or readable for the size that it gives.
pub(crate) unsafe fn read<T: NcclStruct>(config: *const T) -> Result<Option<T>> {
    if config.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller passes a struct that is readable for its size; each version begins with
    // the header.
    let header = unsafe { read_header(config) };
    if header.magic != T::MAGIC || header.size < size_of::<StructHeader>() {
        return Err(Error::invalid_argument(format!(
            "the {} was not initialised: its magic is {:#x} and its size {}; start from {}",
            T::NAME,
            header.magic,
            header.size,
            T::INITIALIZER
        )));
    }
    let mut own = T::unset();
    // SAFETY: the caller passes a struct that is readable for the size in its header.
    unsafe { copy_known(config, header.size, &mut own) };
    own.forget_newer(header.version);
    Ok(Some(own))
}

/// Type of a field, with a value that means unset.
pub(crate) trait Unset {
    /// Value of an unset field.
    const UNSET: Self;
}
impl Unset for c_int {
    const UNSET: c_int = c_int::MIN;
}
impl Unset for *const c_char {
    const UNSET: *const c_char = std::ptr::null();
}

/// Defines a versioned struct from its fields, each with the first version that has it.
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
            /// Size of the struct in the header that the program was compiled with.
            pub size: usize,
            /// Constant by which the library detects an uninitialised struct.
            pub magic: u32,
            /// Version of the header that the program was compiled with.
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

        // SAFETY: the macro makes a `repr(C)` struct of the header and the given fields: integers,
        // floats and pointers.
        unsafe impl cinch::capi::core::versioned_struct::VersionedStruct for $name {
            const NAME: &'static str = stringify!($name);
            const MAGIC: u32 = $magic;
        }

        impl $crate::versioned::NcclStruct for $name {
            const INITIALIZER: &'static str = $initializer;
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
