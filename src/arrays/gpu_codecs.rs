//! Codecs and packed copies on one GPU, for callers that have device addresses and a stream.

use super::device_codec::{CodecKernels, DeviceCodec, Elements};
use super::format::Layout;
use super::host_copy::{CopyTarget, HostCopier};
use crate::error::Result;
use crate::gpu::{Context, Stream, select};
use crate::types::{CodecSpec, DType, DeviceChoice};
use std::ptr::without_provenance_mut;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Time limit of a packed copy that makes no progress.
const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// The codecs' kernels and the staging memory of packed copies on one GPU. Threads may share it.
///
/// A stream is a `CUstream` or `cudaStream_t` as a number; 0 is the GPU's default stream.
#[derive(Debug)]
pub struct GpuCodecs {
    kernels: Arc<CodecKernels>,
    copier: OnceLock<HostCopier>,
}

impl GpuCodecs {
    /// Loads the kernels on the GPU that `device` names. The driver may wait until running kernels have
    /// ended.
    ///
    /// # Errors
    /// Unsupported without a driver, or if the build has no kernels for this GPU; invalid usage for
    /// [`DeviceChoice::Host`]; invalid argument if there is no such GPU; the driver's errors.
    pub fn open(device: DeviceChoice) -> Result<GpuCodecs> {
        GpuCodecs::on(&select::open(device)?)
    }

    /// Loads the kernels in `context`.
    ///
    /// # Errors
    /// See [`GpuCodecs::open`].
    pub(crate) fn on(context: &Arc<Context>) -> Result<GpuCodecs> {
        Ok(GpuCodecs {
            kernels: Arc::new(CodecKernels::new(context)?),
            copier: OnceLock::new(),
        })
    }

    /// Returns the GPU's context.
    pub(crate) fn context(&self) -> &Arc<Context> {
        self.kernels.context()
    }

    /// Queues the encoding of `elements` on `stream` into `wire`, given by its address and its size.
    /// [`StandAlone::bytes`](super::StandAlone::bytes) returns the number of bytes that are written, and
    /// [`StandAlone::encode`](super::StandAlone::encode) explains `draw`. The chunk layout needs an alignment
    /// of 16 bytes.
    ///
    /// # Errors
    /// Invalid argument if `wire` is too small, an address is misaligned, or the ranges overlap; unsupported
    /// for other types than f32, f16 and bf16, for codecs without kernels, and for a scale of the whole
    /// array; the driver's errors. After an error nothing is queued.
    ///
    /// # Safety
    /// Both ranges are memory of this GPU, and `stream` exists on it. No other code frees or uses the ranges
    /// while the call runs in the stream, or in any replay if it is captured. `self` outlives the queued work
    /// and every replay, because its drop unloads the kernels.
    pub unsafe fn encode(
        &self,
        spec: CodecSpec,
        layout: Layout,
        elements: Elements,
        draw: u64,
        wire: (u64, usize),
        stream: usize,
    ) -> Result<()> {
        let codec = DeviceCodec::new(&self.kernels, spec, layout)?;
        // SAFETY: the caller keeps the contract of `encode`, which the callees share.
        unsafe { codec.encode(elements, draw, wire, &self.stream(stream)) }
    }

    /// Queues the decoding of `elements` on `stream` from `wire`, given by its address and its size. The call
    /// does not wait to check the header of a CompLL message ([`Layout::Published`]). If the header has
    /// another count or width, all elements become NaN.
    ///
    /// # Errors
    /// See [`GpuCodecs::encode`].
    ///
    /// # Safety
    /// See [`GpuCodecs::encode`].
    pub unsafe fn decode(
        &self,
        spec: CodecSpec,
        layout: Layout,
        wire: (u64, usize),
        elements: Elements,
        stream: usize,
    ) -> Result<()> {
        let codec = DeviceCodec::new(&self.kernels, spec, layout)?;
        // SAFETY: the caller keeps the contract of `decode`, which the callees share.
        unsafe { codec.decode(wire, elements, &self.stream(stream)) }
    }

    /// Copies the elements of `src` through codec `spec` to device memory at `address`. Returns when `src` has
    /// been read. Work queued on `stream` afterwards runs behind the copy.
    ///
    /// # Errors
    /// Invalid argument for bytes that are no whole elements, and for a misaligned address; the errors of
    /// [`GpuCodecs::encode`]; timeout if the stream makes no progress. After a timeout or a driver's error the memory at
    /// `address` is undefined.
    ///
    /// In a capture nothing is read yet: each replay copies what `src` has then, with the same `draw`. An internal error in a
    /// replay ends the process.
    ///
    /// # Safety
    /// `address` is memory of this GPU, with as many bytes as `src` has, and `stream` exists on the GPU. No
    /// other code frees or uses the memory while the copy runs in the stream. If the copy is captured, `src` stays as long
    /// as the graph may be replayed, and no code writes it during a replay.
    pub unsafe fn copy_to_device(
        &self,
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        src: &[u8],
        address: u64,
        stream: usize,
    ) -> Result<()> {
        let copier = self.copier()?;
        // SAFETY: the caller keeps the contract of `copy_to_device`, which the callees share.
        unsafe { copier.to_device(spec, dtype, draw, src, address, &self.stream(stream)) }
    }

    /// Copies the elements of `src` through codec `spec` to several arrays, each given by the codecs of its GPU, its address
    /// and a stream. The elements are encoded once. Returns when `src` has been read. Work queued on an array's stream
    /// afterwards runs behind its copy.
    ///
    /// # Errors
    /// See [`GpuCodecs::copy_to_device`]; invalid argument without arrays.
    ///
    /// # Safety
    /// See [`GpuCodecs::copy_to_device`], for each array. No two arrays overlap.
    pub unsafe fn copy_to_devices(
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        src: &[u8],
        arrays: &[(&GpuCodecs, u64, usize)],
    ) -> Result<()> {
        let streams: Vec<Stream> = arrays
            .iter()
            // SAFETY: the caller keeps the streams while this function runs.
            .map(|&(gpu, _, stream)| unsafe { gpu.stream(stream) })
            .collect();
        let targets = arrays.iter().zip(&streams);
        let targets = targets.map(|(&(gpu, address, _), stream)| {
            Ok(CopyTarget {
                copier: gpu.copier()?,
                address,
                stream,
            })
        });
        let targets = targets.collect::<Result<Vec<_>>>()?;
        // SAFETY: the caller keeps the contract of `copy_to_devices`, which the callees share.
        unsafe { HostCopier::to_devices(spec, dtype, draw, src, &targets) }
    }

    /// Copies the elements at `address` through codec `spec` to `dst`. Returns when `dst` is complete; in a capture, each
    /// replay completes it.
    ///
    /// # Errors
    /// See [`GpuCodecs::copy_to_device`].
    ///
    /// # Safety
    /// `address` is memory of this GPU, with as many bytes as `dst` has, and `stream` exists on the GPU. No
    /// other code frees or writes the memory while the copy runs in the stream. If the copy is captured, `dst` stays as long
    /// as the graph may be replayed, and no other code uses it during a replay.
    pub unsafe fn copy_to_host(
        &self,
        spec: CodecSpec,
        dtype: DType,
        draw: u64,
        address: u64,
        dst: &mut [u8],
        stream: usize,
    ) -> Result<()> {
        let copier = self.copier()?;
        // SAFETY: the caller keeps the contract of `copy_to_host`, which the callees share.
        unsafe { copier.to_host(spec, dtype, draw, address, dst, &self.stream(stream)) }
    }

    /// Returns the copier, which the first call creates.
    fn copier(&self) -> Result<&HostCopier> {
        if let Some(copier) = self.copier.get() {
            return Ok(copier);
        }
        let made = HostCopier::new(self.context(), 0, COPY_TIMEOUT)?;
        // If another thread has stored its copier first, both threads use that copier.
        Ok(self.copier.get_or_init(|| made))
    }

    /// Wraps the stream that the caller passed.
    ///
    /// # Safety
    /// `stream` exists on this GPU until the caller's call returns; 0 is its default stream.
    unsafe fn stream(&self, stream: usize) -> Stream {
        // SAFETY: by this function's contract the caller keeps the stream. No method of `GpuCodecs`
        // stores the value beyond its own call.
        unsafe { Stream::borrowed(self.context(), without_provenance_mut(stream)) }
    }
}
