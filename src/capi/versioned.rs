//! Structs of cinch.h that grow: size, magic and version first, new fields at the end, zero is unset.
//!
//! A program and the library may have been built with different releases of the header. Fields that
//! an older and smaller struct lacks are unset. A newer and larger struct is accepted if the fields
//! that this library does not know are zero. The version changes only if existing fields change their
//! meaning, so a newer version is refused.

use super::core::versioned_struct::{StructHeader, VersionedStruct, copy_known, read_header};
use crate::error::{Error, Result};

/// Upper bound of a struct's size in all releases. A larger size field is garbage, so the struct is
/// not read.
const MAX_BYTES: usize = 4096;

/// A versioned struct of cinch.h, in which zeros mean unset.
pub(super) trait CinchStruct: VersionedStruct {
    /// Newest version of the struct's fields that this release understands.
    const VERSION: u32 = super::types::CINCH_API_VERSION;
    /// Size in bytes of the struct in the first release of the header; no program has a smaller
    /// struct.
    const FIRST_BYTES: usize;
}

/// Declares that `$name` is a versioned struct of cinch.h.
///
/// The struct must be `repr(C)` of integers, floats and pointers without padding, and begin with
/// size, magic and version. Its size is `$bytes` on 64-bit machines.
macro_rules! cinch_struct {
    ($name:ident, magic $magic:literal, first $first:literal, now $bytes:literal) => {
        // SAFETY: users of the macro pass a `repr(C)` struct of integers, floats and pointers.
        unsafe impl $crate::capi::core::versioned_struct::VersionedStruct for $name {
            const NAME: &'static str = stringify!($name);
            const MAGIC: u32 = $magic;
        }
        impl $crate::capi::versioned::CinchStruct for $name {
            const FIRST_BYTES: usize = $first;
        }
        #[cfg(target_pointer_width = "64")]
        const _: () = assert!(size_of::<$name>() == $bytes);
    };
}

/// Initialises `*target` with nothing set; `size` and `version` are those of the caller's header.
///
/// # Safety
/// `target` is NULL or writable for `size` bytes.
pub(super) unsafe fn initialise<T: CinchStruct>(
    target: *mut T,
    size: usize,
    version: u32,
) -> Result<()> {
    if target.is_null() {
        return Err(null::<T>());
    }
    check_size::<T>(size)?;
    check_version::<T>(version)?;
    let header = StructHeader {
        size,
        magic: T::MAGIC,
        version,
    };
    // SAFETY: the caller passes `target` as writable for `size` bytes. `size` is at least
    // `FIRST_BYTES`, which exceeds a header.
    unsafe {
        target.cast::<u8>().write_bytes(0, size);
        target.cast::<StructHeader>().write_unaligned(header);
    }
    Ok(())
}

/// Returns the struct at `source` with the fields of this release.
///
/// # Safety
/// `source` is NULL or readable for as many bytes as its size field gives.
pub(super) unsafe fn read<T: CinchStruct>(source: *const T) -> Result<T> {
    // SAFETY: the caller passes `source` as NULL or readable for the size that it gives.
    let size = unsafe { check::<T>(source) }?;
    let known = size_of::<T>();
    // SAFETY: the caller passes a `source` that is readable for `size` bytes.
    let tail = unsafe {
        std::slice::from_raw_parts(
            source.cast::<u8>().wrapping_add(known.min(size)),
            size.saturating_sub(known),
        )
    };
    if let Some(at) = tail.iter().position(|&byte| byte != 0) {
        return Err(Error::invalid_argument(format!(
            "{} has {size} bytes and sets a field at byte {}, but cinch {} knows {known} bytes of \
             it; use the header of this release, or leave the field unset",
            T::NAME,
            known + at,
            crate::VERSION
        )));
    }
    // SAFETY: zeros are a valid value (`VersionedStruct`), and `source` has `size` bytes.
    unsafe {
        let mut value = std::mem::MaybeUninit::<T>::zeroed().assume_init();
        copy_known(source, size, &mut value);
        Ok(value)
    }
}

/// Checks that `source` is an initialised struct that this release understands; returns its size.
///
/// # Safety
/// `source` is NULL or readable for a header.
pub(super) unsafe fn check<T: CinchStruct>(source: *const T) -> Result<usize> {
    if source.is_null() {
        return Err(null::<T>());
    }
    // SAFETY: the caller passes `source` as NULL or readable for a header, and it is not NULL.
    let header = unsafe { read_header(source) };
    if header.magic != T::MAGIC {
        return Err(Error::invalid_argument(format!(
            "{} has magic {:#x}, not {:#x}: initialise it first",
            T::NAME,
            header.magic,
            T::MAGIC
        )));
    }
    check_version::<T>(header.version)?;
    check_size::<T>(header.size)?;
    Ok(header.size)
}

/// Copies the fields behind the header to `target`, as far as the caller's struct has these fields.
///
/// # Safety
/// [`check`] passed for `target`, which is still writable for its size.
pub(super) unsafe fn fill<T: CinchStruct>(target: *mut T, value: &T) {
    let skip = size_of::<StructHeader>();
    // SAFETY: the caller keeps `target` writable for its size, which `check` found large enough for
    // a header.
    unsafe {
        let size = read_header(target).size;
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>().add(skip),
            target.cast::<u8>().add(skip),
            size.min(size_of::<T>()) - skip,
        );
    }
}

fn check_size<T: CinchStruct>(size: usize) -> Result<()> {
    if (T::FIRST_BYTES..=MAX_BYTES).contains(&size) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{} has size {size}, but it takes {} to {MAX_BYTES} bytes: initialise it with its sizeof",
        T::NAME,
        T::FIRST_BYTES
    )))
}

fn check_version<T: CinchStruct>(version: u32) -> Result<()> {
    if (1..=T::VERSION).contains(&version) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{} has version {version}, but cinch {} knows 1 to {}: update the library",
        T::NAME,
        crate::VERSION,
        T::VERSION
    )))
}

fn null<T: CinchStruct>() -> Error {
    Error::invalid_argument(format!("the {} is NULL", T::NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A struct in its second release; in the first it had one field less.
    #[derive(Clone, Copy, Debug, PartialEq)]
    #[repr(C)]
    struct Now {
        size: usize,
        magic: u32,
        version: u32,
        old: u64,
        new: u64,
    }

    // SAFETY: `Now` is `repr(C)` with integers only, and its first fields are those of the header.
    unsafe impl VersionedStruct for Now {
        const NAME: &'static str = "now_t";
        const MAGIC: u32 = 0x1234;
    }

    impl CinchStruct for Now {
        const VERSION: u32 = 2;
        const FIRST_BYTES: usize = 24;
    }

    /// Returns the words of a struct, with space for a larger struct of a later release.
    fn struct_of(size: usize, version: u32, fields: &[u64]) -> [u64; 8] {
        let mut words = [0u64; 8];
        words[0] = size as u64;
        words[1] = 0x1234 | u64::from(version) << 32;
        words[2..2 + fields.len()].copy_from_slice(fields);
        words
    }

    fn read_words(words: &[u64; 8]) -> Result<Now> {
        // SAFETY: the sizes that these tests pass and `check` accepts are at most 64 bytes.
        unsafe { read(words.as_ptr().cast::<Now>()) }
    }

    #[test]
    fn struct_of_other_release_is_read() {
        // The bytes behind the caller's struct are not read: the missing field is unset.
        let old = read_words(&struct_of(24, 1, &[7, 99])).unwrap();
        assert_eq!((old.old, old.new), (7, 0));
        let same = read_words(&struct_of(32, 2, &[7, 8])).unwrap();
        assert_eq!((same.old, same.new), (7, 8));
        let newer = read_words(&struct_of(64, 2, &[7, 8, 0, 0])).unwrap();
        assert_eq!((newer.old, newer.new), (7, 8));
        let error = read_words(&struct_of(64, 2, &[7, 8, 0, 1])).unwrap_err();
        assert!(error.message().contains("byte 40"), "{error}");
    }

    #[test]
    fn garbage_struct_is_refused_with_its_numbers() {
        for (words, said) in [
            (struct_of(0, 1, &[]), "size 0"),
            (struct_of(23, 1, &[]), "size 23"),
            (struct_of(usize::MAX, 1, &[]), "size 18446744073709551615"),
            (struct_of(32, 3, &[]), "version 3"),
            (struct_of(32, 0, &[]), "version 0"),
            ([0; 8], "magic 0x0"),
        ] {
            let error = read_words(&words).unwrap_err();
            assert!(error.message().contains(said), "{error}");
        }
        // SAFETY: `read` refuses NULL before it reads.
        let error = unsafe { read(std::ptr::null::<Now>()) }.unwrap_err();
        assert!(error.message().contains("now_t is NULL"), "{error}");
    }

    #[test]
    fn initialise_and_fill_write_only_the_callers_bytes() {
        let mut words = [u64::MAX; 8];
        // SAFETY: `words` has 64 bytes, of which 24 are written.
        unsafe { initialise(words.as_mut_ptr().cast::<Now>(), 24, 1) }.unwrap();
        assert_eq!(words[..3], struct_of(24, 1, &[])[..3]);
        assert_eq!(words[3..], [u64::MAX; 5]);
        let value = Now {
            size: 0,
            magic: 0,
            version: 0,
            old: 5,
            new: 6,
        };
        // SAFETY: `initialise` made `words` a struct of 24 bytes.
        unsafe { fill(words.as_mut_ptr().cast::<Now>(), &value) };
        assert_eq!(words[..4], [24, 0x1234 | 1 << 32, 5, u64::MAX]);
        // SAFETY: `initialise` refuses both arguments before it writes.
        unsafe {
            assert!(initialise(words.as_mut_ptr().cast::<Now>(), 8, 1).is_err());
            assert!(initialise(words.as_mut_ptr().cast::<Now>(), 24, 3).is_err());
        }
        assert_eq!(words[2], 5);
    }
}
