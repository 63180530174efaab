//! The caller's input and output on a GPU. Only kernels access them.

use std::marker::PhantomData;

/// Input and output of one call, as device addresses, and the stream on which it runs.
#[derive(Clone, Copy, Debug)]
pub struct DeviceBuffers<'a> {
    input: (u64, usize),
    output: (u64, usize),
    stream: usize,
    statistics: u64,
    verdict_only: bool,
    borrow: PhantomData<&'a mut [u8]>,
}

impl<'a> DeviceBuffers<'a> {
    /// Makes buffers from address and bytes of input and output (0 and 0 for none) and a stream.
    /// The stream is a `CUstream` or `cudaStream_t`; 0 is the legacy default stream.
    ///
    /// # Safety
    /// The stream stays valid until the call that gets the buffers returns. While the call runs in the stream,
    /// the input is readable and the output writable on the communicator's GPU, and no other code writes
    /// either. For a captured call this holds whenever the graph runs. Input and output may overlap.
    pub unsafe fn new(
        input: (u64, usize),
        output: (u64, usize),
        stream: usize,
    ) -> DeviceBuffers<'a> {
        DeviceBuffers {
            input,
            output,
            stream,
            statistics: 0,
            verdict_only: false,
            borrow: PhantomData,
        }
    }

    /// Makes the call write its statistics, a [`CallStatistics`](crate::CallStatistics), to `address`: in memory of
    /// the communicator's GPU, or in pinned host memory, aligned to 8 bytes. They are complete when the call has
    /// ended in its stream. A graph writes them again at each launch.
    ///
    /// # Safety
    /// As for the output in [`DeviceBuffers::new`].
    pub unsafe fn with_statistics(self, address: u64) -> DeviceBuffers<'a> {
        DeviceBuffers {
            statistics: address,
            ..self
        }
    }

    /// Makes the call write statistics as [`DeviceBuffers::with_statistics`] does, but take the verdict of its output
    /// alone, which costs large calls next to nothing.
    ///
    /// # Safety
    /// As for the output in [`DeviceBuffers::new`].
    pub unsafe fn with_verdict(self, address: u64) -> DeviceBuffers<'a> {
        DeviceBuffers {
            statistics: address,
            verdict_only: true,
            ..self
        }
    }

    /// Combines the input of one call with the output of another, for a rank's message to itself.
    pub(crate) fn joined(input: DeviceBuffers<'a>, output: DeviceBuffers<'a>) -> DeviceBuffers<'a> {
        DeviceBuffers {
            output: output.output,
            ..input
        }
    }

    /// Returns empty buffers on the same stream.
    pub(crate) fn emptied(self) -> DeviceBuffers<'a> {
        DeviceBuffers {
            input: (0, 0),
            output: (0, 0),
            ..self
        }
    }

    /// Returns address and bytes of the input.
    pub fn input(&self) -> (u64, usize) {
        self.input
    }

    /// Returns address and bytes of the output.
    pub fn output(&self) -> (u64, usize) {
        self.output
    }

    /// Returns the address of the call's statistics, if it takes any.
    pub fn statistics(&self) -> Option<u64> {
        (self.statistics != 0).then_some(self.statistics)
    }

    /// Returns whether the call takes statistics of its input.
    pub fn takes_input_statistics(&self) -> bool {
        self.statistics != 0 && !self.verdict_only
    }

    /// Returns the driver's handle of the stream.
    pub fn stream(&self) -> usize {
        self.stream
    }
}
