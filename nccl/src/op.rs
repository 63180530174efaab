//! Reduction operators that a program creates.

use crate::boundary::CallProgress;
use crate::comm;
use crate::types::*;
use cinch::Error;
use cinch::capi::core::arguments::read_scalar;
use cinch::capi::core::created_ops::{Factor, OpNumbers};
use std::ffi::c_void;

static NUMBERS: OpNumbers = OpNumbers::new(ncclNumOps as i64, ncclMaxRedOp as i64);

export! {
    /// Creates an operator that multiplies this rank's contribution by `*scalar`, one element of
    /// `datatype`, before the sum. This call reads a host-immediate scalar; each call with the operator
    /// reads a device scalar when it runs.
    fn ncclRedOpCreatePreMulSum | pncclRedOpCreatePreMulSum(
        op: *mut ncclRedOp_t,
        scalar: *mut c_void,
        datatype: ncclDataType_t,
        residence: ncclScalarResidence_t,
        comm: ncclComm_t,
    ) {
        check_out("op", op)?;
        let comm = comm::lookup(comm)?;
        comm.ready()?;
        let dtype = ARGUMENT_NAMES.dtype(datatype.into())?;
        if scalar.is_null() {
            return Err(Error::invalid_argument("scalar is NULL"));
        }
        let factor = match residence {
            // SAFETY: nccl.h requires of the program that `scalar`, which is not NULL, is an
            // element of the type.
            ncclScalarHostImmediate => Factor::Value(unsafe { read_scalar(scalar.cast(), dtype) }),
            ncclScalarDevice => Factor::Address(scalar.expose_provenance()),
            _ => {
                return Err(Error::invalid_argument(format!(
                    "residence {residence} is unknown; valid: {ncclScalarDevice} \
                     (ncclScalarDevice) and {ncclScalarHostImmediate} (ncclScalarHostImmediate)"
                )));
            }
        };
        let number = comm.ops.create(&NUMBERS, dtype, factor)?;
        // SAFETY: nccl.h requires of the program that `op` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("op", op, number as ncclRedOp_t)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Destroys an operator that `ncclRedOpCreatePreMulSum` created. Calls that were made with it keep it.
    fn ncclRedOpDestroy | pncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) {
        let comm = comm::lookup(comm)?;
        comm.ops.destroy(op.into())?;
        Ok(CallProgress::Done)
    }
}
