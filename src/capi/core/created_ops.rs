//! Reduction operators that a program creates: sums of contributions, each multiplied by a factor
//! of its rank.

use super::arguments::read_scalar;
use crate::error::{Error, Result};
use crate::types::{DType, ReduceOp, Scalar};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Factor by which a created operator multiplies this rank's contribution.
#[derive(Clone, Copy, Debug)]
pub enum Factor {
    /// The value of the factor.
    Value(Scalar),
    /// Address of the factor, which each call reads when it runs.
    Address(usize),
}

/// Numbers for created operators. They are unique in the process, so that passing an operator of
/// another communicator is an error.
#[derive(Debug)]
pub struct OpNumbers {
    first: i64,
    /// End of the range of numbers, which the C type of an operator must hold.
    end: i64,
    next: AtomicI64,
}

impl OpNumbers {
    /// Creates the range of numbers from `first` up to but not including `end`.
    pub const fn new(first: i64, end: i64) -> OpNumbers {
        OpNumbers {
            first,
            end,
            next: AtomicI64::new(first),
        }
    }

    fn take(&self) -> Result<i64> {
        let next = |next: i64| (next < self.end).then_some(next + 1);
        self.next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
            .map_err(|_| {
                Error::invalid_usage(format!(
                    "{} operators were created; none is left",
                    self.end - self.first
                ))
            })
    }
}

type OpsByNumber = BTreeMap<i64, (DType, Factor)>;

/// The created operators of one communicator.
///
/// Its lock may stay locked forever in a forked child, so callers first check that this process
/// created the communicator.
#[derive(Debug, Default)]
pub struct CreatedOps(Mutex<OpsByNumber>);

impl CreatedOps {
    /// Creates an operator for elements of `dtype` and returns its number.
    ///
    /// # Errors
    /// Invalid usage if `numbers` are used up.
    pub fn create(&self, numbers: &OpNumbers, dtype: DType, factor: Factor) -> Result<i64> {
        let number = numbers.take()?;
        self.lock().insert(number, (dtype, factor));
        Ok(number)
    }

    /// Destroys the operator `number`. Calls that were made with it keep it.
    ///
    /// # Errors
    /// Invalid argument if it is built in or unknown.
    pub fn destroy(&self, number: i64) -> Result<()> {
        let destroyed = self.lock().remove(&number);
        destroyed.map(drop).ok_or_else(|| unknown(number))
    }

    /// Returns the built-in or created operator `number` for a call on elements of `dtype`.
    ///
    /// # Errors
    /// Invalid argument if it is unknown or was created for another type.
    ///
    /// # Safety
    /// If the operator has [`Factor::Address`]: with `on_gpu` the GPU of the call can read an element
    /// of `dtype` there until the call has run; else the host can read it now.
    pub unsafe fn find(&self, number: i64, dtype: DType, on_gpu: bool) -> Result<ReduceOp> {
        let built_in = match number {
            0 => Some(ReduceOp::Sum),
            1 => Some(ReduceOp::Prod),
            2 => Some(ReduceOp::Max),
            3 => Some(ReduceOp::Min),
            4 => Some(ReduceOp::Avg),
            _ => None,
        };
        if let Some(op) = built_in {
            return Ok(op);
        }
        let found = self.lock().get(&number).copied();
        let (created_for, factor) = found.ok_or_else(|| unknown(number))?;
        if created_for != dtype {
            return Err(Error::invalid_argument(format!(
                "op {number} was created for {created_for}, the call is of {dtype}"
            )));
        }
        Ok(ReduceOp::PreMulSum(match factor {
            Factor::Value(scalar) => scalar,
            Factor::Address(address) if on_gpu => Scalar::Device(address as u64),
            // SAFETY: the call is on host memory, so the caller passes an address that the host can
            // read now.
            Factor::Address(address) => unsafe {
                read_scalar(std::ptr::with_exposed_provenance(address), dtype)
            },
        }))
    }

    fn lock(&self) -> MutexGuard<'_, OpsByNumber> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(number: i64) -> Error {
    Error::invalid_argument(format!(
        "op {number} is neither built in (0 to 4, which cannot be destroyed) nor a created operator \
         of this communicator"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(ops: &CreatedOps, number: i64, dtype: DType) -> Result<ReduceOp> {
        // SAFETY: the tests create factors by value, or call with `on_gpu`.
        unsafe { ops.find(number, dtype, true) }
    }

    #[test]
    fn created_op_is_found_until_destroyed() {
        let numbers = OpNumbers::new(16, 18);
        let (ops, others) = (CreatedOps::default(), CreatedOps::default());
        let half = Factor::Value(Scalar::Float(0.5));
        let number = ops.create(&numbers, DType::F32, half).unwrap();
        assert_eq!(number, 16);
        let found = find(&ops, number, DType::F32).unwrap();
        assert_eq!(found, ReduceOp::PreMulSum(Scalar::Float(0.5)));
        let error = find(&ops, number, DType::F64).unwrap_err();
        assert!(error.message().contains("created for f32"), "{error}");
        assert!(find(&others, number, DType::F32).is_err());
        let at = ops.create(&numbers, DType::F32, Factor::Address(64));
        let found = find(&ops, at.unwrap(), DType::F32).unwrap();
        assert_eq!(found, ReduceOp::PreMulSum(Scalar::Device(64)));
        let error = ops.create(&numbers, DType::F32, half).unwrap_err();
        assert!(error.message().contains("2 operators"), "{error}");
        ops.destroy(number).unwrap();
        for number in [number, 4, -1] {
            assert!(ops.destroy(number).is_err());
        }
        assert!(find(&ops, number, DType::F32).is_err());
    }

    #[test]
    fn built_in_op_has_the_number_of_its_header() {
        for op in [
            ReduceOp::Sum,
            ReduceOp::Prod,
            ReduceOp::Max,
            ReduceOp::Min,
            ReduceOp::Avg,
        ] {
            let found = find(&CreatedOps::default(), op.number().into(), DType::I32);
            assert_eq!(found.unwrap(), op);
        }
    }
}
