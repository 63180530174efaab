//! The buffers of a call, wherever they are.

use super::{DeviceBuffers, UserBuffers};

/// The buffers of a call: where they are is the communicator's choice.
#[derive(Debug)]
pub enum Buffers<'a> {
    /// In host memory.
    Host(UserBuffers<'a>),
    /// On a GPU.
    Gpu(DeviceBuffers<'a>),
}

impl<'a> Buffers<'a> {
    /// Bytes of the output.
    pub(crate) fn output_bytes(&self) -> usize {
        match self {
            Buffers::Host(buffers) => buffers.output_bytes(),
            Buffers::Gpu(buffers) => buffers.output().1,
        }
    }

    /// Addresses of input and output.
    pub(crate) fn places(&self) -> (usize, usize) {
        match self {
            Buffers::Host(buffers) => (buffers.input_address(), buffers.output_address()),
            Buffers::Gpu(buffers) => (buffers.input().0 as usize, buffers.output().0 as usize),
        }
    }

    /// The buffers of a message to oneself: those of its send and its receive as one, and what is
    /// left for the receive.
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
