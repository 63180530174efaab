//! Structs that grow: size, magic and version first, new fields at the end, zero means unset.
//!
//! A program and the library may have been built with different releases of the header. A smaller
//! struct is one of an older release: the fields that it lacks are unset. A larger one is of a
//! newer release, and is accepted if what this library does not know is zero. The version changes
//! only if fields that exist change their meaning, so that a newer one cannot be accepted.

use crate::error::{Error, Result};
use std::mem::offset_of;

/// No release will have a larger struct; a larger size is garbage, and is not read.
const MAX_BYTES: usize = 4096;

/// The first fields of every such struct.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Header {
    pub(super) size: usize,
    pub(super) magic: u32,
    pub(super) version: u32,
}

/// A struct that starts like [`Header`].
///
/// # Safety
/// `repr(C)` without padding, the first three fields are those of [`Header`], and any bytes,
/// zeros first of all, are a valid value.
pub(super) unsafe trait Versioned: Copy {
    /// Name in C.
    const NAME: &'static str;
    /// Tells the struct from others and from garbage.
    const MAGIC: u32;
    /// Meaning of the fields.
    const VERSION: u32 = super::types::CINCH_API_VERSION;
    /// Bytes of the struct in the first release of the header: no program has a smaller one.
    const FIRST_BYTES: usize;
}

/// Makes `*target` a struct with nothing set; `size` bytes and `version` are the caller's header's.
///
/// # Safety
/// `target` is NULL or writable for `size` bytes.
pub(super) unsafe fn initialise<T: Versioned>(
    target: *mut T,
    size: usize,
    version: u32,
) -> Result<()> {
    if target.is_null() {
        return Err(null::<T>());
    }
    check_size::<T>(size)?;
    check_version::<T>(version)?;
    let header = Header {
        size,
        magic: T::MAGIC,
        version,
    };
    // SAFETY: `size` bytes are writable, and a header is less than `FIRST_BYTES`, so less.
    unsafe {
        target.cast::<u8>().write_bytes(0, size);
        target.cast::<Header>().write_unaligned(header);
    }
    Ok(())
}

/// The struct at `source`, as this release knows it.
///
/// # Safety
/// `source` is NULL or readable for as many bytes as its size field says.
pub(super) unsafe fn read<T: Versioned>(source: *const T) -> Result<T> {
    // SAFETY: as ours.
    let size = unsafe { check::<T>(source) }?;
    let known = size_of::<T>();
    // SAFETY: in bounds of `size`, for which the caller vouches.
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
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: both are good for the smaller of the two sizes; zeros and the caller's bytes are
    // valid values (`Versioned`).
    unsafe {
        std::ptr::copy_nonoverlapping(
            source.cast::<u8>(),
            value.as_mut_ptr().cast::<u8>(),
            known.min(size),
        );
        Ok(value.assume_init())
    }
}

/// Whether `source` is an initialised `T` of a release that this one understands; its size.
///
/// # Safety
/// `source` is NULL or readable for a header.
pub(super) unsafe fn check<T: Versioned>(source: *const T) -> Result<usize> {
    if source.is_null() {
        return Err(null::<T>());
    }
    // SAFETY: readable for a header; C may have placed it anywhere.
    let header = unsafe { source.cast::<Header>().read_unaligned() };
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

/// Copies the fields behind the header to `target`, as far as the caller's struct has them.
///
/// # Safety
/// [`check`] passed for `target`, which is still writable for its size.
pub(super) unsafe fn fill<T: Versioned>(target: *mut T, value: &T) {
    let skip = size_of::<Header>();
    // SAFETY: as ours.
    unsafe {
        let size = target.cast::<Header>().read_unaligned().size;
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>().add(skip),
            target.cast::<u8>().add(skip),
            size.min(size_of::<T>()) - skip,
        );
    }
}

const _: () = assert!(offset_of!(Header, magic) == size_of::<usize>());

fn check_size<T: Versioned>(size: usize) -> Result<()> {
    if (T::FIRST_BYTES..=MAX_BYTES).contains(&size) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{} has size {size}, but it takes {} to {MAX_BYTES} bytes: initialise it with its sizeof",
        T::NAME,
        T::FIRST_BYTES
    )))
}

fn check_version<T: Versioned>(version: u32) -> Result<()> {
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

fn null<T: Versioned>() -> Error {
    Error::invalid_argument(format!("the {} is NULL", T::NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The second release of a struct that had one field in the first.
    #[derive(Clone, Copy, Debug, PartialEq)]
    #[repr(C)]
    struct Now {
        size: usize,
        magic: u32,
        version: u32,
        old: u64,
        new: u64,
    }

    // SAFETY: integers only, no padding.
    unsafe impl Versioned for Now {
        const NAME: &'static str = "now_t";
        const MAGIC: u32 = 0x1234;
        const VERSION: u32 = 2;
        const FIRST_BYTES: usize = 24;
    }

    /// Room for a larger struct of the future, as words.
    fn struct_of(size: usize, version: u32, fields: &[u64]) -> [u64; 8] {
        let mut words = [0u64; 8];
        words[0] = size as u64;
        words[1] = 0x1234 | u64::from(version) << 32;
        words[2..2 + fields.len()].copy_from_slice(fields);
        words
    }

    fn read_words(words: &[u64; 8]) -> Result<Now> {
        // SAFETY: sizes in these tests are at most 64 where the size is accepted.
        unsafe { read(words.as_ptr().cast::<Now>()) }
    }

    #[test]
    fn older_and_newer_programs_are_understood() {
        // What lies behind the caller's struct is not the caller's struct.
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
    fn garbage_is_refused_with_its_numbers() {
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
        // SAFETY: NULL is an error.
        let error = unsafe { read(std::ptr::null::<Now>()) }.unwrap_err();
        assert!(error.message().contains("now_t is NULL"), "{error}");
    }

    #[test]
    fn initialise_and_fill_stay_within_the_callers_struct() {
        let mut words = [u64::MAX; 8];
        // SAFETY: 24 of 64 bytes.
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
        // SAFETY: initialised above.
        unsafe { fill(words.as_mut_ptr().cast::<Now>(), &value) };
        assert_eq!(words[..4], [24, 0x1234 | 1 << 32, 5, u64::MAX]);
        // SAFETY: refused before anything is written.
        unsafe {
            assert!(initialise(words.as_mut_ptr().cast::<Now>(), 8, 1).is_err());
            assert!(initialise(words.as_mut_ptr().cast::<Now>(), 24, 3).is_err());
        }
        assert_eq!(words[2], 5);
    }
}
