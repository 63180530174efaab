//! Functions that create and destroy reduction operators.

use super::core::arguments::{check_out, read_scalar, store};
use super::core::created_ops::{Factor, OpNumbers};
use super::error::cinch_result_t;
use super::handle::{self, cinch_comm_t};
use super::types::{ARGUMENT_NAMES, cinch_op_t, dtype_number, op_number};
use crate::error::Error;
use std::ffi::c_void;

static NUMBERS: OpNumbers = OpNumbers::new(
    cinch_op_t::CINCH_OP_FIRST_CREATED as i64,
    op_number::MAX as i64,
);

/// Creates an operator that multiplies this rank's contribution by `*scalar` before the sum.
///
/// The call reads `scalar`, one element of `dtype` in host memory, before it returns. The operator
/// serves calls of `dtype` on `comm`. Its number is valid on this rank only: every rank passes an
/// operator that it created itself.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_op_create_premulsum(
    comm: *mut cinch_comm_t,
    scalar: *const c_void,
    dtype: dtype_number,
    op: *mut op_number,
) -> cinch_result_t {
    guard!("cinch_op_create_premulsum", {
        let entry = handle::lookup(comm)?;
        let dtype = ARGUMENT_NAMES.dtype(dtype.into())?;
        check_out("op", op)?;
        if scalar.is_null() {
            return Err(Error::invalid_argument("scalar is NULL"));
        }
        // SAFETY: cinch.h requires of the program that `scalar`, which is not NULL, is an element
        // of `dtype`.
        let factor = Factor::Value(unsafe { read_scalar(scalar.cast(), dtype) });
        let number = entry.ops.create(&NUMBERS, dtype, factor)?;
        // SAFETY: cinch.h requires of the program that `op` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("op", op, number as op_number) }
    })
}

/// Destroys an operator that `cinch_op_create_premulsum` created. Calls that were made with it keep
/// it until they have run.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_op_destroy(
    comm: *mut cinch_comm_t,
    op: op_number,
) -> cinch_result_t {
    guard!("cinch_op_destroy", {
        handle::lookup(comm)?.ops.destroy(op.into())
    })
}
