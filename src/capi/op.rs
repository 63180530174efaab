//! Operators that a program creates: sums of contributions times a factor of each rank.

use super::error::cinch_result_t;
use super::handle::{self, Handle, check_out, cinch_comm_t};
use super::types::{self, cinch_op_t, dtype_number, op_number};
use crate::cpu::Isa;
use crate::error::{Error, Result};
use crate::reduce;
use crate::types::{DType, ReduceOp, Scalar};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The created operators of one communicator, by number.
#[derive(Debug, Default)]
pub(super) struct CreatedOps(Mutex<Created>);

type Created = BTreeMap<op_number, (DType, Scalar)>;

/// Unique in the process, so that an operator of another communicator is an error.
static NEXT: AtomicU32 = AtomicU32::new(cinch_op_t::CINCH_OP_FIRST_CREATED as u32);

/// Makes an operator that multiplies this rank's contributions by `*scalar`, and then sums.
///
/// `scalar` is one element of `dtype` in host memory, read by this call. The operator is for calls
/// of `dtype` on `comm`. Its number is this rank's own; every rank passes one that it created.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_op_create_premulsum(
    comm: *mut cinch_comm_t,
    scalar: *const c_void,
    dtype: dtype_number,
    op: *mut op_number,
) -> cinch_result_t {
    guard!("cinch_op_create_premulsum", {
        let handle = handle::lookup(comm)?;
        let dtype = types::dtype(dtype)?;
        check_out("op", op)?;
        if scalar.is_null() {
            return Err(Error::invalid_argument("scalar is NULL"));
        }
        // SAFETY: not NULL, so an element of `dtype` by the documented contract.
        let factor = unsafe { read_scalar(scalar.cast(), dtype) };
        let number = NEXT
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                next.checked_add(1)
            })
            .map_err(|_| Error::invalid_usage("4294967279 operators were created; none is left"))?;
        let mut ops = created(&handle)?;
        ops.insert(number, (dtype, factor));
        // SAFETY: not NULL, so writable by the documented contract.
        unsafe { op.write_unaligned(number) };
        Ok(())
    })
}

/// Ends an operator that `cinch_op_create_premulsum` made. Calls already made keep it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_op_destroy(
    comm: *mut cinch_comm_t,
    op: op_number,
) -> cinch_result_t {
    guard!("cinch_op_destroy", {
        let handle = handle::lookup(comm)?;
        let mut ops = created(&handle)?;
        ops.remove(&op).map(|_| ()).ok_or_else(|| unknown(op))
    })
}

/// The operator with this number for a call of `dtype` on `handle`.
pub(super) fn find(handle: &Handle, op: op_number, dtype: DType) -> Result<ReduceOp> {
    Ok(match op {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Prod,
        2 => ReduceOp::Max,
        3 => ReduceOp::Min,
        4 => ReduceOp::Avg,
        _ => {
            let ops = created(handle)?;
            let &(made_for, factor) = ops.get(&op).ok_or_else(|| unknown(op))?;
            if made_for != dtype {
                return Err(Error::invalid_argument(format!(
                    "op {op} was created for {made_for}, the call is of {dtype}"
                )));
            }
            ReduceOp::PreMulSum(factor)
        }
    })
}

/// The operators that were created for `handle`; for no child of a fork, whose copy of the lock may
/// stay locked for ever.
fn created(handle: &Handle) -> Result<MutexGuard<'_, Created>> {
    handle.comm.check_process()?;
    Ok(handle.ops.0.lock().unwrap_or_else(PoisonError::into_inner))
}

fn unknown(op: op_number) -> Error {
    Error::invalid_argument(format!(
        "op {op} is neither built in (0 to 4, which cannot be destroyed) nor alive on this \
         communicator"
    ))
}

/// The factor that lies at `scalar`, anywhere in host memory.
///
/// # Safety
/// `scalar` is readable for one element.
pub unsafe fn read_scalar(scalar: *const u8, dtype: DType) -> Scalar {
    // SAFETY: as ours, in each arm for the bytes of the type.
    unsafe {
        match dtype {
            DType::I8 => Scalar::Int(scalar.cast::<i8>().read().into()),
            DType::U8 => Scalar::Int(scalar.read().into()),
            DType::I32 => Scalar::Int(scalar.cast::<i32>().read_unaligned().into()),
            DType::U32 => Scalar::Int(scalar.cast::<u32>().read_unaligned().into()),
            DType::I64 => Scalar::Int(scalar.cast::<i64>().read_unaligned().into()),
            DType::U64 => Scalar::Int(scalar.cast::<u64>().read_unaligned().into()),
            DType::F32 => Scalar::Float(scalar.cast::<f32>().read_unaligned().into()),
            DType::F64 => Scalar::Float(scalar.cast::<f64>().read_unaligned()),
            DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => {
                let bytes = std::slice::from_raw_parts(scalar, dtype.size());
                let mut wide = [0.0];
                reduce::widen(dtype, Isa::Scalar, bytes, &mut wide);
                Scalar::Float(wide[0].into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(dtype: DType, bytes: &[u8]) -> f64 {
        assert_eq!(bytes.len(), dtype.size());
        // SAFETY: as many bytes as the type has.
        match unsafe { read_scalar(bytes.as_ptr(), dtype) } {
            Scalar::Float(value) => value,
            Scalar::Int(value) => value as f64,
            Scalar::Device(_) => panic!("a scalar of the host has a value"),
        }
    }

    #[test]
    fn half_precision_scalars_are_exact() {
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
    fn eight_bit_scalars_follow_the_ocp_tables() {
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
    fn integer_scalars_keep_their_sign_and_width() {
        assert_eq!(value(DType::I8, &[0xff]), -1.0);
        assert_eq!(value(DType::U8, &[0xff]), 255.0);
        assert_eq!(value(DType::I64, &i64::MIN.to_ne_bytes()), i64::MIN as f64);
        assert_eq!(value(DType::U64, &u64::MAX.to_ne_bytes()), u64::MAX as f64);
        assert_eq!(value(DType::U32, &u32::MAX.to_ne_bytes()), 4294967295.0);
        assert_eq!(value(DType::F64, &0.1f64.to_ne_bytes()), 0.1);
    }
}
