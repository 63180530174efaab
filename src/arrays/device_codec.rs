//! Whole arrays in device memory, encoded and decoded on a stream, without a communicator.
//!
//! A call is one launch. CompLL's layout takes three launches, because its array is one block. Calls may be
//! captured. Encoded bytes equal those of [`StandAlone`] on the host, so each side decodes the other side's
//! encodings.

use crate::arrays::{Layout, StandAlone};
use crate::codec::{KERNEL_CODECS, RoundingRandom, array_family, kernel_params};
use crate::cpu::Isa;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::{Context, Function, Module, Stream, kernels};
use crate::types::{CodecSpec, DType, ScaleRule};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Threads of a thread block.
const THREADS: u32 = 256;
/// Number of elements that a thread block processes at once.
const BLOCK_ELEMENTS: usize = 16 * THREADS as usize;
/// Largest number of parts into which the array is cut to find its minimum and maximum. One thread block
/// searches each part.
const SHARES: usize = 1024;

/// An array of elements in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elements {
    /// Address of the first element, aligned to the type.
    pub address: u64,
    /// Number of elements.
    pub count: usize,
    /// Element type: f32, f16 or bf16.
    pub dtype: DType,
}

impl Elements {
    fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }
}

/// The kernels that encode and decode, loaded on one GPU.
#[derive(Debug)]
pub struct CodecKernels {
    context: Arc<Context>,
    chunks: Arc<Module>,
    published: Arc<Module>,
    /// Kernels used so far, by name. Each comes with the number of its thread blocks that can be resident
    /// together.
    found: Mutex<HashMap<String, (Function, u32)>>,
}

impl CodecKernels {
    /// Loads the kernels. The driver may wait until running kernels have ended.
    ///
    /// # Errors
    /// Unsupported if the build has no kernels for this GPU; the driver's errors.
    pub fn new(context: &Arc<Context>) -> Result<CodecKernels> {
        Ok(CodecKernels {
            context: context.clone(),
            chunks: kernels::load(context, "codec")?,
            published: kernels::load(context, "published")?,
            found: Mutex::default(),
        })
    }

    /// Returns the GPU's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn find(&self, module: &Arc<Module>, name: String) -> Result<(Function, u32)> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = found.get(&name) {
            return Ok(known.clone());
        }
        let function = module.function(&name)?;
        let each = function.blocks_per_multiprocessor(THREADS, 0)?.max(1);
        let most = each * self.context.device().multiprocessors;
        found.insert(name, (function.clone(), most));
        Ok((function, most))
    }
}

/// Kernel arguments: `cinch_codec_args` of `kernels/codec/params.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct CodecArgs {
    wire: u64,
    elements: u64,
    n: u64,
    params: [u32; 8],
    first: u32,
    unused: u32,
}

const _: () = assert!(size_of::<CodecArgs>() == 64);

/// A codec for whole arrays on one GPU.
#[derive(Clone, Debug)]
pub struct DeviceCodec {
    spec: CodecSpec,
    layout: Layout,
    sizes: StandAlone,
    kernels: Arc<CodecKernels>,
}

impl DeviceCodec {
    /// Creates the codec of `spec` in `layout`.
    ///
    /// # Errors
    /// See [`StandAlone::new`]; unsupported where the codec has no kernels, or under a tensor scale.
    pub fn new(
        kernels: &Arc<CodecKernels>,
        spec: CodecSpec,
        layout: Layout,
    ) -> Result<DeviceCodec> {
        let sizes = StandAlone::new(spec, layout, Isa::Scalar)?;
        let refuse = |why: &str| {
            let text = format!("codec {spec} on device memory: {why}");
            Err(Error::new(ErrorKind::Unsupported, text))
        };
        if !KERNEL_CODECS.contains(&spec.kind) {
            return refuse("it has no kernels and works on host memory only");
        }
        let tensor = spec.kind.has_scale() && matches!(spec.scale, ScaleRule::Tensor { .. });
        if tensor {
            return refuse("a scale of the whole array is taken on host memory only; take block=B");
        }
        Ok(DeviceCodec {
            spec,
            layout,
            sizes,
            kernels: kernels.clone(),
        })
    }

    /// Returns the size of `n` encoded elements in bytes.
    pub fn bytes(&self, n: usize) -> usize {
        self.sizes.bytes(n)
    }

    /// Queues the encoding of `elements` into the first [`DeviceCodec::bytes`] bytes of `wire`, given by its
    /// address and its size. [`Layout::Chunk`] needs an alignment of 16 bytes; [`Layout::Published`] needs
    /// none. See [`StandAlone::encode`] for `draw`.
    ///
    /// # Errors
    /// Invalid argument if `wire` is too small, an address is misaligned, or the ranges overlap; unsupported
    /// for other types; the driver's errors. After an error nothing is queued.
    ///
    /// # Safety
    /// Both ranges are memory of the stream's GPU. No other code frees or uses them while the call runs in
    /// the stream, or in any replay if it is captured.
    pub unsafe fn encode(
        &self,
        elements: Elements,
        draw: u64,
        wire: (u64, usize),
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract of `encode`, which the callee shares.
        unsafe { self.encode_from(elements, draw, 0, wire, stream) }
    }

    /// Queues the encoding of a part of a message; `first` is the index of the part's first element
    /// in the message.
    ///
    /// # Errors
    /// See [`DeviceCodec::encode`].
    ///
    /// # Safety
    /// See [`DeviceCodec::encode`].
    pub(super) unsafe fn encode_from(
        &self,
        elements: Elements,
        draw: u64,
        first: usize,
        wire: (u64, usize),
        stream: &Stream,
    ) -> Result<()> {
        self.check(&elements, wire, false)?;
        let random = RoundingRandom::new(self.spec.seed.into(), draw, 0);
        let args = self.args(&elements, wire.0, random, first);
        if self.is_message() {
            // SAFETY: the caller keeps the contract of `encode`, which the callee shares.
            return unsafe { self.message(&elements, args, stream) };
        }
        let (module, name) = match self.layout {
            Layout::Chunk => (&self.kernels.chunks, self.name("encode", elements.dtype)),
            Layout::Published => (
                &self.kernels.published,
                format!("cinch_pack_{}", elements.dtype),
            ),
        };
        // SAFETY: the caller keeps the contract of `encode`, which the callee shares.
        unsafe { self.launch(module, name, args, stream) }
    }

    /// Queues the decoding of `elements` from the first [`DeviceCodec::bytes`] bytes of `wire`, in
    /// [`Layout::Published`] from exactly as many. The call does
    /// not wait to check the header of a CompLL message ([`Layout::Published`]). If the header has another
    /// count or width, all elements become NaN.
    ///
    /// # Errors
    /// See [`DeviceCodec::encode`].
    ///
    /// # Safety
    /// See [`DeviceCodec::encode`].
    pub unsafe fn decode(
        &self,
        wire: (u64, usize),
        elements: Elements,
        stream: &Stream,
    ) -> Result<()> {
        self.check(&elements, wire, self.layout == Layout::Published)?;
        let args = self.args(&elements, wire.0, RoundingRandom::NONE, 0);
        let (module, name) = match self.layout {
            Layout::Chunk => (&self.kernels.chunks, self.name("decode", elements.dtype)),
            Layout::Published if self.is_message() => (
                &self.kernels.published,
                format!("cinch_unmessage_{}", elements.dtype),
            ),
            Layout::Published => (
                &self.kernels.published,
                format!("cinch_unpack_{}", elements.dtype),
            ),
        };
        // SAFETY: the caller keeps the contract of `encode`, which the callee shares.
        unsafe { self.launch(module, name, args, stream) }
    }

    /// Returns whether the layout has a header and stores the whole array as one block.
    fn is_message(&self) -> bool {
        self.layout == Layout::Published && self.spec.kind.has_scale()
    }

    fn name(&self, what: &str, dtype: DType) -> String {
        let family = array_family(self.spec.kind);
        format!("cinch_{what}_{family}_{dtype}")
    }

    fn args(
        &self,
        elements: &Elements,
        wire: u64,
        random: RoundingRandom,
        first: usize,
    ) -> CodecArgs {
        let limit = self.sizes.element_limit(elements.dtype).unwrap_or(0.0);
        CodecArgs {
            wire,
            elements: elements.address,
            n: elements.count as u64,
            params: kernel_params(self.spec, limit, [random; 2]),
            // Only the low 32 bits of an index select its random number, so indices 2^32 apart
            // share one.
            first: first as u32,
            unused: 0,
        }
    }

    /// Checks addresses and sizes. With `exact`, the array has no bytes behind the elements.
    fn check(&self, elements: &Elements, (wire, room): (u64, usize), exact: bool) -> Result<()> {
        let Elements {
            address,
            count,
            dtype,
        } = *elements;
        if !dtype.has_codecs() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("codecs encode f32, f16 and bf16, not {dtype}"),
            ));
        }
        let (need, bytes) = (self.bytes(count), elements.bytes());
        let wrong = |text: String| Err(Error::invalid_argument(text));
        if room < need || exact && room > need {
            return wrong(format!(
                "{count} elements are {need} bytes when encoded with {}, but there are {room}",
                self.spec
            ));
        }
        if !address.is_multiple_of(dtype.size() as u64) {
            return wrong(format!(
                "elements of {dtype} at {address:#x} are not aligned to {} bytes",
                dtype.size()
            ));
        }
        if self.layout == Layout::Chunk && !wire.is_multiple_of(16) {
            return wrong(format!(
                "a chunk in device memory is aligned to 16 bytes, which {wire:#x} is not"
            ));
        }
        let apart = address + bytes as u64 <= wire || wire + need as u64 <= address;
        if bytes > 0 && need > 0 && !apart {
            return wrong(format!(
                "elements ({bytes} bytes at {address:#x}) and wire ({need} bytes at {wire:#x}) \
                 overlap"
            ));
        }
        Ok(())
    }

    /// Queues three kernels, which write the minimum and maximum of the array, the header, and the
    /// codes.
    unsafe fn message(&self, elements: &Elements, args: CodecArgs, stream: &Stream) -> Result<()> {
        let published = &self.kernels.published;
        // The wire memory temporarily holds two words per share, its minimum and maximum, from the
        // first multiple of 4 on.
        let room = self.bytes(elements.count).saturating_sub(3) / 8;
        let (extent, most) = self
            .kernels
            .find(published, format!("cinch_extent_{}", elements.dtype))?;
        let shares = blocks(elements.count, most.min(SHARES as u32))
            .min(u32::try_from(room).unwrap_or(u32::MAX));
        let shares = if elements.count == 0 { 0 } else { shares };
        let (header, _) = self.kernels.find(published, "cinch_header".into())?;
        let mut told = args;
        told.params[0] = shares;
        // SAFETY: the caller keeps the contract of `encode`. The minima and maxima lie within the wire bytes,
        // which the codes overwrite later.
        unsafe {
            if shares > 0 {
                extent.launch(shares, THREADS, 0, stream, &args)?;
            }
            header.launch(1, THREADS, 0, stream, &told)?;
            let name = format!("cinch_message_{}", elements.dtype);
            self.launch(published, name, args, stream)
        }
    }

    unsafe fn launch(
        &self,
        module: &Arc<Module>,
        name: String,
        args: CodecArgs,
        stream: &Stream,
    ) -> Result<()> {
        if args.n == 0 {
            return Ok(());
        }
        let (function, most) = self.kernels.find(module, name)?;
        // SAFETY: the kernel takes `cinch_codec_args`, and the caller keeps the contract of `encode`.
        unsafe { function.launch(blocks(args.n as usize, most), THREADS, 0, stream, &args) }
    }
}

/// Returns the number of thread blocks to launch: as many as have work, but at most `most`, the
/// number that can be resident together.
fn blocks(n: usize, most: u32) -> u32 {
    n.div_ceil(BLOCK_ELEMENTS).clamp(1, most.max(1) as usize) as u32
}
