//! Checks and converts single arguments that C passes.

use crate::bootstrap::UniqueId;
use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::reduce;
use crate::types::{DType, Scalar};
use std::ffi::{c_char, c_int, c_void};

/// Color of a rank that joins none of the communicators of a split, in both APIs.
pub const NO_COLOR: c_int = -1;

/// Writes `value` to the out-parameter `name`.
///
/// # Errors
/// Invalid argument if `target` is NULL.
///
/// # Safety
/// `target` is NULL or writable.
pub unsafe fn store<T>(name: &str, target: *mut T, value: T) -> Result<()> {
    check_out(name, target)?;
    // SAFETY: the caller passes `target` as NULL or writable, and it is not NULL; C may place it at
    // any alignment.
    unsafe { target.write_unaligned(value) };
    Ok(())
}

/// Checks that the out-parameter `name` is not NULL. Functions call this before they have any
/// effect.
///
/// # Errors
/// Invalid argument if it is.
pub fn check_out<T>(name: &str, target: *mut T) -> Result<()> {
    if target.is_null() {
        return Err(Error::invalid_argument(format!(
            "{name}, where the result goes, is NULL"
        )));
    }
    Ok(())
}

/// Copies bytes to `buffer`, which may be NULL. `name` is their plural noun, for error sentences.
///
/// # Errors
/// Invalid argument if `capacity` is too small.
///
/// # Safety
/// `buffer` is NULL or writable for `capacity` bytes.
pub unsafe fn copy_out(
    name: &str,
    from: &[u8],
    buffer: *mut c_void,
    capacity: usize,
) -> Result<()> {
    if buffer.is_null() {
        return Ok(());
    }
    if capacity < from.len() {
        return Err(Error::invalid_argument(format!(
            "the {name} have {} bytes, the buffer {capacity}; ask with a NULL buffer first",
            from.len()
        )));
    }
    // SAFETY: the caller passes `buffer` as writable for `capacity` bytes, which are enough.
    unsafe {
        std::ptr::copy_nonoverlapping(from.as_ptr(), buffer.cast::<u8>(), from.len());
    }
    Ok(())
}

/// Returns a rank, root or peer as an unsigned number; `comm` checks the upper bound.
///
/// # Errors
/// Invalid argument if it is negative.
pub fn rank_of(name: &str, rank: c_int) -> Result<usize> {
    usize::try_from(rank).map_err(|_| Error::invalid_argument(format!("{name} {rank} is negative")))
}

/// Returns the `count` ranks in the list `name`. NULL with a count of 0 is an empty list.
///
/// # Errors
/// Invalid argument if the count is negative, the list is NULL without being empty, or a rank is
/// negative.
///
/// # Safety
/// `list` is NULL, or has `count` numbers.
pub unsafe fn rank_list(name: &str, list: *const c_int, count: c_int) -> Result<Vec<usize>> {
    if count < 0 || (count > 0 && list.is_null()) {
        return Err(Error::invalid_argument(format!(
            "{name} has {count} ranks at {list:?}: a list has 0 or more ranks at an address"
        )));
    }
    (0..count as usize)
        // SAFETY: the caller passes a list of `count` numbers, and `at` is less.
        .map(|at| rank_of(name, unsafe { list.add(at).read_unaligned() }))
        .collect()
}

/// Returns `number` as a C int.
///
/// # Errors
/// Internal if it does not fit.
pub fn as_int(number: usize) -> Result<c_int> {
    c_int::try_from(number)
        .map_err(|_| Error::internal(format!("{number} does not fit an int of C")))
}

/// Returns the color of a split; `None` for [`NO_COLOR`], whose constant in C is `no_color`.
///
/// # Errors
/// Invalid argument for other negative numbers.
pub fn split_color(color: c_int, no_color: &str) -> Result<Option<u32>> {
    if color == NO_COLOR {
        return Ok(None);
    }
    u32::try_from(color).map(Some).map_err(|_| {
        Error::invalid_argument(format!(
            "color {color} is negative and not {no_color} ({NO_COLOR})"
        ))
    })
}

/// Returns the unique id in the bytes that a C program holds.
///
/// # Errors
/// Invalid argument if no cinch made it.
pub fn unique_id(bytes: &[c_char; 128]) -> Result<UniqueId> {
    UniqueId::from_bytes(&bytes.map(|byte| byte as u8))
}

/// Returns `id` as the bytes that a C program holds.
pub fn unique_id_bytes(id: &UniqueId) -> [c_char; 128] {
    id.as_bytes().map(|byte| byte as c_char)
}

/// Reads one element of `dtype` from host memory of any alignment.
///
/// # Safety
/// `scalar` is readable for one element.
pub unsafe fn read_scalar(scalar: *const u8, dtype: DType) -> Scalar {
    // SAFETY: the caller keeps one element readable.
    let bytes = unsafe { std::slice::from_raw_parts(scalar, dtype.size()) };
    if dtype.accumulator() == DType::F32 {
        let mut wide = [0.0];
        reduce::widen(dtype, Isa::Scalar, bytes, &mut wide);
        return Scalar::Float(wide[0].into());
    }
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    let word = u64::from_le_bytes(word);
    if dtype == DType::F64 {
        return Scalar::Float(f64::from_bits(word));
    }
    // Shifts the element's sign bit to the top and back, which extends it to 64 bits.
    let unused = 64 - 8 * dtype.size();
    Scalar::Int(if dtype.is_signed() {
        ((word << unused) as i64 >> unused).into()
    } else {
        word.into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(dtype: DType, bytes: &[u8]) -> f64 {
        assert_eq!(bytes.len(), dtype.size());
        // SAFETY: `bytes` has as many bytes as the type.
        match unsafe { read_scalar(bytes.as_ptr(), dtype) } {
            Scalar::Float(value) => value,
            Scalar::Int(value) => value as f64,
            Scalar::Device(_) => panic!("a scalar in host memory has a value"),
        }
    }

    #[test]
    fn scalar_of_16_bits_is_read_exactly() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_ne_bytes();
            let pairs = [
                (
                    value(DType::F16, &bytes),
                    half::f16::from_bits(bits).to_f64(),
                ),
                (
                    value(DType::BF16, &bytes),
                    half::bf16::from_bits(bits).to_f64(),
                ),
            ];
            for (ours, theirs) in pairs {
                let same = ours.to_bits() == theirs.to_bits();
                assert!(same || ours.is_nan() && theirs.is_nan(), "{bits:#x}");
            }
        }
    }

    #[test]
    fn scalar_of_8_bits_follows_ocp_table() {
        for (dtype, bits, expected) in [
            (DType::F8E4M3, 0x7e, 448.0),
            (DType::F8E4M3, 0x38, 1.0),
            (DType::F8E4M3, 0x01, 2f64.powi(-9)),
            (DType::F8E4M3, 0x88, -(2f64.powi(-6))),
            (DType::F8E5M2, 0x7b, 57344.0),
            (DType::F8E5M2, 0xfc, f64::NEG_INFINITY),
            (DType::F8E5M2, 0x01, 2f64.powi(-16)),
        ] {
            assert_eq!(value(dtype, &[bits]), expected, "{dtype} {bits:#x}");
        }
        assert!(value(DType::F8E4M3, &[0x7f]).is_nan());
        assert!(value(DType::F8E5M2, &[0x7d]).is_nan());
    }

    #[test]
    fn scalar_of_integer_keeps_sign_and_width() {
        assert_eq!(value(DType::I8, &[0xff]), -1.0);
        assert_eq!(value(DType::U8, &[0xff]), 255.0);
        assert_eq!(value(DType::I64, &i64::MIN.to_ne_bytes()), i64::MIN as f64);
        assert_eq!(value(DType::U64, &u64::MAX.to_ne_bytes()), u64::MAX as f64);
        assert_eq!(value(DType::U32, &u32::MAX.to_ne_bytes()), 4294967295.0);
        assert_eq!(value(DType::F64, &0.1f64.to_ne_bytes()), 0.1);
    }
}
