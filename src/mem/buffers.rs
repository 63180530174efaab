//! The buffers of a call, in host memory or on a GPU.

use super::{DeviceBuffers, UserBuffers};

/// The buffers of a call; the communicator determines their kind.
#[derive(Debug)]
pub enum Buffers<'a> {
    /// Buffers in host memory.
    Host(UserBuffers<'a>),
    /// Device addresses, with the stream on which the call runs.
    Gpu(DeviceBuffers<'a>),
}

impl<'a> Buffers<'a> {
    /// Returns the bytes of the output.
    pub(crate) fn output_bytes(&self) -> usize {
        match self {
            Buffers::Host(buffers) => buffers.output_bytes(),
            Buffers::Gpu(buffers) => buffers.output().1,
        }
    }

    /// Returns the addresses of input and output.
    pub(crate) fn places(&self) -> (usize, usize) {
        match self {
            Buffers::Host(buffers) => (buffers.input_address(), buffers.output_address()),
            Buffers::Gpu(buffers) => (buffers.input().0 as usize, buffers.output().0 as usize),
        }
    }

    /// Combines the buffers of a send and a receive of one rank with itself; the receive is left with empty
    /// buffers. `None` if the kinds differ.
    pub(crate) fn joined(
        send: Buffers<'a>,
        recv: Buffers<'a>,
    ) -> Option<(Buffers<'a>, Buffers<'a>)> {
        match (send, recv) {
            (Buffers::Host(send), Buffers::Host(recv)) => Some((
                Buffers::Host(UserBuffers::joined(send, recv)),
                Buffers::Host(UserBuffers::new(&[], &mut [])),
            )),
            (Buffers::Gpu(send), Buffers::Gpu(recv)) => Some((
                Buffers::Gpu(DeviceBuffers::joined(send, recv)),
                Buffers::Gpu(recv.emptied()),
            )),
            _ => None,
        }
    }
}
