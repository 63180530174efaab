//! The caller's input and output on a GPU. The library never looks into them: kernels do.

use std::marker::PhantomData;

/// Input and output of one call, as device addresses, and the stream on which it runs.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBuffers<'a> {
    input: (u64, usize),
    output: (u64, usize),
    stream: usize,
    borrow: PhantomData<&'a mut [u8]>,
}

impl<'a> DeviceBuffers<'a> {
    /// Addresses and bytes of input and output, 0 and 0 where there is none, and a `CUstream` (or
    /// `cudaStream_t`); 0 is the legacy default stream.
    ///
    /// # Safety
    /// The stream is live until the call that gets the buffers returns. The input is readable and
    /// the output writable on the communicator's GPU, and nobody else writes either, from where
    /// the call stands in the stream until the stream is past it; of a call that is captured,
    /// whenever the graph runs. They may overlap.
    pub unsafe fn new(
        input: (u64, usize),
        output: (u64, usize),
        stream: usize,
    ) -> DeviceBuffers<'a> {
        DeviceBuffers {
            input,
            output,
            stream,
            borrow: PhantomData,
        }
    }

    /// The input of one pair of buffers with the output of another: a rank's message to itself.
    pub fn joined(input: DeviceBuffers<'a>, output: DeviceBuffers<'a>) -> DeviceBuffers<'a> {
        DeviceBuffers {
            output: output.output,
            ..input
        }
    }

    /// Nothing, on the same stream.
    pub fn emptied(self) -> DeviceBuffers<'a> {
        DeviceBuffers {
            input: (0, 0),
            output: (0, 0),
            ..self
        }
    }

    /// Address and bytes of the input.
    pub fn input(&self) -> (u64, usize) {
        self.input
    }

    /// Address and bytes of the output.
    pub fn output(&self) -> (u64, usize) {
        self.output
    }

    /// The stream, as the driver knows it.
    pub fn stream(&self) -> usize {
        self.stream
    }
}
