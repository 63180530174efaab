//! Structs of C that grow at their end. Their first fields are size, magic and version.

use std::mem::offset_of;

/// First fields of every versioned struct.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct StructHeader {
    /// Size of the struct in the header that the program was compiled with, in bytes.
    pub size: usize,
    /// Constant by which the library detects an uninitialised struct.
    pub magic: u32,
    /// Version of the header that the program was compiled with.
    pub version: u32,
}

const _: () = assert!(offset_of!(StructHeader, magic) == size_of::<usize>());

/// A struct of C that begins with a [`StructHeader`].
///
/// # Safety
/// `repr(C)` of integers, floats and pointers, so that any bytes are a valid value; the first three
/// fields are those of [`StructHeader`].
pub unsafe trait VersionedStruct: Copy {
    /// Name of the struct in C.
    const NAME: &'static str;
    /// Value of the field `magic` in an initialised struct.
    const MAGIC: u32;
}

/// Reads the header of `source`, which C may have placed at any alignment.
///
/// # Safety
/// `source` is readable for a header.
pub unsafe fn read_header<T: VersionedStruct>(source: *const T) -> StructHeader {
    // SAFETY: the caller passes a `source` that is readable for a header.
    unsafe { source.cast::<StructHeader>().read_unaligned() }
}

/// Copies the first `size` bytes of `source` over those of `own`; bytes beyond the end of `own` are
/// left out.
///
/// # Safety
/// `source` is readable for `size` bytes.
pub unsafe fn copy_known<T: VersionedStruct>(source: *const T, size: usize, own: &mut T) {
    // SAFETY: both structs have the smaller of the two sizes; any bytes are valid (`VersionedStruct`).
    unsafe {
        std::ptr::copy_nonoverlapping(
            source.cast::<u8>(),
            std::ptr::from_mut(own).cast::<u8>(),
            size.min(size_of::<T>()),
        );
    }
}
