//! Operators that a program creates: sums of contributions times a factor of each rank.

use crate::boundary::CallProgress;
use crate::comm::{self, Comm};
use crate::types::*;
use cinch::capi::read_scalar;
use cinch::types::{ReduceOp, Scalar};
use cinch::{Communicator, DType, Error, Result};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

export! {
    /// Makes an operator that multiplies this rank's contributions by `*scalar`, one element of
    /// `datatype`, and then sums. A host-immediate scalar is read by this call, a device scalar
    /// when a call with the operator runs.
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
        let dtype = dtype(datatype)?;
        if scalar.is_null() {
            return Err(Error::invalid_argument("scalar is NULL"));
        }
        let factor = match residence {
            // SAFETY: not NULL, so an element of the type, by the header.
            ncclScalarHostImmediate => Factor::Value(unsafe { read_scalar(scalar.cast(), dtype) }),
            ncclScalarDevice => Factor::At(scalar.addr()),
            _ => {
                return Err(Error::invalid_argument(format!(
                    "residence {residence} is none; there are ncclScalarDevice \
                     ({ncclScalarDevice}) and ncclScalarHostImmediate ({ncclScalarHostImmediate})"
                )));
            }
        };
        let number = comm.ops.add(dtype, factor)?;
        // SAFETY: not NULL, so writable.
        unsafe { store("op", op, number)? };
        Ok(CallProgress::Done)
    }
}

export! {
    /// Ends an operator that `ncclRedOpCreatePreMulSum` made. Calls already made keep it.
    fn ncclRedOpDestroy | pncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) {
        let comm = comm::lookup(comm)?;
        let mut ops = comm.ops.0.lock().unwrap_or_else(PoisonError::into_inner);
        match ops.remove(&op) {
            Some(_) => Ok(CallProgress::Done),
            None => Err(unknown(op)),
        }
    }
}

/// The created operators of one communicator, by number.
#[derive(Debug, Default)]
pub(crate) struct CreatedOps(Mutex<BTreeMap<ncclRedOp_t, (DType, Factor)>>);

#[derive(Clone, Copy, Debug)]
enum Factor {
    Value(Scalar),
    /// Where it lies when the call runs.
    At(usize),
}

/// Unique in the process, so that an operator of another communicator is an error.
static NEXT: AtomicI32 = AtomicI32::new(ncclNumOps);

impl CreatedOps {
    fn add(&self, dtype: DType, factor: Factor) -> Result<ncclRedOp_t> {
        let number = NEXT
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |next| {
                next.checked_add(1)
            })
            .map_err(|_| {
                Error::invalid_usage(format!(
                    "{} operators were created; none is left",
                    ncclMaxRedOp - ncclNumOps
                ))
            })?;
        let mut ops = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ops.insert(number, (dtype, factor));
        Ok(number)
    }
}

/// The operator with this number for a call of `dtype`.
pub(crate) fn find(
    comm: &Comm,
    communicator: &Communicator,
    op: ncclRedOp_t,
    dtype: DType,
) -> Result<ReduceOp> {
    Ok(match op {
        ncclSum => ReduceOp::Sum,
        ncclProd => ReduceOp::Prod,
        ncclMax => ReduceOp::Max,
        ncclMin => ReduceOp::Min,
        // As NCCL has it: no partial sum that travels leaves the range that the average is in.
        ncclAvg if matches!(dtype, DType::F16 | DType::F8E4M3 | DType::F8E5M2) => {
            ReduceOp::PreMulSum(Scalar::Float(1.0 / communicator.nranks() as f64))
        }
        ncclAvg => ReduceOp::Avg,
        _ => {
            let ops = comm.ops.0.lock().unwrap_or_else(PoisonError::into_inner);
            let &(made_for, factor) = ops.get(&op).ok_or_else(|| unknown(op))?;
            if made_for != dtype {
                return Err(Error::invalid_argument(format!(
                    "op {op} was created for {made_for}, the call is of {dtype}"
                )));
            }
            ReduceOp::PreMulSum(match factor {
                Factor::Value(scalar) => scalar,
                Factor::At(address) if communicator.gpu().is_some() => {
                    Scalar::Device(address as u64)
                }
                // SAFETY: host memory on a communicator of host memory, whose calls run now; an
                // element of the type, alive until then by the header.
                Factor::At(address) => unsafe {
                    read_scalar(std::ptr::with_exposed_provenance(address), dtype)
                },
            })
        }
    })
}

fn unknown(op: ncclRedOp_t) -> Error {
    Error::invalid_argument(format!(
        "op {op} is neither built in (0 to 4, which cannot be destroyed) nor alive on this \
         communicator"
    ))
}
