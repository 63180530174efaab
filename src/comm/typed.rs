//! Collectives on slices of Rust types.

use super::{Call, Communicator, Report};
use crate::error::{Error, Result};
use crate::mem::{UserBuffers, bytes_of, bytes_of_mut};
use crate::types::{Collective, Element, ReduceOp};

impl Communicator {
    /// Reduces the inputs of all ranks, of equal length, into the `output` of every rank.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn all_reduce<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<Report> {
        let call = Call {
            op,
            ..Call::new(Collective::AllReduce, T::DTYPE, input.len())
        };
        self.call(
            &call,
            UserBuffers::new(bytes_of(input), bytes_of_mut(output)),
        )
    }

    /// Runs [`Communicator::all_reduce`] in place.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn all_reduce_in_place<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<Report> {
        let call = Call {
            op,
            ..Call::new(Collective::AllReduce, T::DTYPE, data.len())
        };
        let bytes = size_of_val(data);
        self.call(&call, UserBuffers::in_place(bytes_of_mut(data), 0, bytes)?)
    }

    /// Gathers the inputs of all ranks, in rank order, into the `output` of every rank, which is `nranks` times
    /// as long.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Report> {
        let call = Call::new(Collective::AllGather, T::DTYPE, input.len());
        self.call(
            &call,
            UserBuffers::new(bytes_of(input), bytes_of_mut(output)),
        )
    }

    /// Reduces the inputs of all ranks, and writes block r of the result to the `output` of rank r. `input` is
    /// `nranks` times as long as `output`.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<Report> {
        let call = Call {
            op,
            ..Call::new(Collective::ReduceScatter, T::DTYPE, output.len())
        };
        self.call(
            &call,
            UserBuffers::new(bytes_of(input), bytes_of_mut(output)),
        )
    }

    /// Copies `data` of the root to every rank.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<Report> {
        let call = Call {
            root,
            ..Call::new(Collective::Broadcast, T::DTYPE, data.len())
        };
        let bytes = if root == self.rank() {
            size_of_val(data)
        } else {
            0
        };
        self.call(&call, UserBuffers::in_place(bytes_of_mut(data), 0, bytes)?)
    }

    /// Reduces the inputs of all ranks into the root's `output`; other ranks pass an empty `output`.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn reduce<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<Report> {
        let call = Call {
            op,
            root,
            ..Call::new(Collective::Reduce, T::DTYPE, input.len())
        };
        self.call(
            &call,
            UserBuffers::new(bytes_of(input), bytes_of_mut(output)),
        )
    }

    /// Gathers the inputs of all ranks, in rank order, into the root's `output`; other ranks pass an empty
    /// `output`.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<Report> {
        let call = Call {
            root,
            ..Call::new(Collective::Gather, T::DTYPE, input.len())
        };
        self.call(
            &call,
            UserBuffers::new(bytes_of(input), bytes_of_mut(output)),
        )
    }

    /// Writes block r of the root's `input` to the `output` of rank r; other ranks pass an empty `input`.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        root: usize,
    ) -> Result<Report> {
        let call = Call {
            root,
            ..Call::new(Collective::Scatter, T::DTYPE, output.len())
        };
        self.call(
            &call,
            UserBuffers::new(bytes_of(input), bytes_of_mut(output)),
        )
    }

    /// Writes block r of every rank's `input`, in rank order, to the `output` of rank r.
    ///
    /// # Errors
    /// As [`Communicator::call`]; invalid argument if the length is not a multiple of the number of
    /// ranks.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<Report> {
        if !input.len().is_multiple_of(self.nranks()) {
            return Err(Error::invalid_argument(format!(
                "all_to_all of {} elements does not divide among {} ranks",
                input.len(),
                self.nranks()
            )));
        }
        let count = input.len() / self.nranks();
        let call = Call::new(Collective::AllToAll, T::DTYPE, count);
        self.call(
            &call,
            UserBuffers::new(bytes_of(input), bytes_of_mut(output)),
        )
    }

    /// Sends `input` to `peer`, which must receive the same number of elements.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn send<T: Element>(&self, input: &[T], peer: usize) -> Result<Report> {
        let call = Call {
            root: self.rank(),
            peer,
            ..Call::new(Collective::SendRecv, T::DTYPE, input.len())
        };
        self.call(&call, UserBuffers::new(bytes_of(input), &mut []))
    }

    /// Receives `output` from `peer`, which must send the same number of elements.
    ///
    /// # Errors
    /// As [`Communicator::call`].
    pub fn recv<T: Element>(&self, output: &mut [T], peer: usize) -> Result<Report> {
        let call = Call {
            root: peer,
            peer: self.rank(),
            ..Call::new(Collective::SendRecv, T::DTYPE, output.len())
        };
        self.call(&call, UserBuffers::new(&[], bytes_of_mut(output)))
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::testing::local_world;
    use crate::types::{Element, ReduceOp};
    use half::{bf16, f16};

    /// Sums 1, 2 and 3 of three ranks, which both types hold exactly.
    fn sum<T: Element + PartialEq + std::fmt::Debug>(of: fn(f32) -> T) {
        local_world(3, &Config::default(), |comm| {
            let input = [of((comm.rank() + 1) as f32); 100];
            let mut output = [of(0.0); 100];
            comm.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
            assert_eq!(output, [of(6.0); 100]);
        });
    }

    #[test]
    fn sum_of_16_bit_floats_is_exact() {
        sum(f16::from_f32);
        sum(bf16::from_f32);
    }
}
