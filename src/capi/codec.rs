//! Functions that encode, decode and copy whole arrays with a codec, without a communicator.

use super::core::arguments::{check_out, store};
use super::device;
use super::error::cinch_result_t;
use super::text;
use super::types::{ARGUMENT_NAMES, dtype_number};
use crate::arrays;
use crate::arrays::{Layout, StandAlone};
use crate::config::Config;
use crate::cpu::{Isa, Tile};
use crate::error::{Error, ErrorKind, Result};
use crate::reduce::Reducer;
use crate::types::{CodecSpec, DType, ReduceOp};
use std::ffi::{c_char, c_void};

/// Layout of an encoded array.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_layout_t {
    /// Layout of a chunk in a collective: codes, zeros up to a multiple of 16 bytes, then the scales of
    /// the blocks, all little endian.
    CINCH_LAYOUT_CHUNK = 0,
    /// Layout that the format's authors published: `minmax1/2/4/8` as CompLL's messages with a header
    /// of 10 bytes, `trunc8/16/24` as ADT's packed bytes without a header. ADT cuts all numbers alike:
    /// `trunc8` decodes infinity and NaN to 2^127, `trunc16/24` may decode a NaN to infinity.
    CINCH_LAYOUT_PUBLISHED = 1,
}

pub(super) type layout_number = u32;

/// Stores the bytes of `count` elements encoded with `codec` in `*bytes`. The size does not depend on
/// the element type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_wire_bytes(
    codec: *const c_char,
    layout: layout_number,
    count: usize,
    bytes: *mut usize,
) -> cinch_result_t {
    guard!("cinch_wire_bytes", {
        // SAFETY: cinch.h requires of the program that `codec` is NULL or text that ends with NUL.
        let codec = unsafe { build(codec, layout) }?;
        check_count(count)?;
        // SAFETY: cinch.h requires of the program that `bytes` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("bytes", bytes, codec.bytes(count)) }
    })
}

/// Stores in `*count` the number of elements of an array that is encoded in `CINCH_LAYOUT_PUBLISHED`.
///
/// The array is all of the `wire_bytes` bytes at `wire`, in host memory. The chunk layout does not
/// contain its number of elements, so it is an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_wire_count(
    codec: *const c_char,
    layout: layout_number,
    wire: *const c_void,
    wire_bytes: usize,
    count: *mut usize,
) -> cinch_result_t {
    guard!("cinch_wire_count", {
        // SAFETY: cinch.h requires of the program that `codec` is NULL or text that ends with NUL.
        let codec = unsafe { build(codec, layout) }?;
        check_out("count", count)?;
        check_extent("wire", wire, wire_bytes)?;
        device::refuse("wire", wire.addr(), "copy its header to the host")?;
        // SAFETY: cinch.h requires of the program that `wire` is readable for `wire_bytes` bytes.
        let wire = unsafe { input("wire", wire, wire_bytes) }?;
        let held = codec.count(wire)?;
        // SAFETY: cinch.h requires of the program that `count` is NULL or writable; `store` refuses
        // NULL.
        unsafe { store("count", count, held) }
    })
}

/// Encodes `count` elements of type f32, f16 or bf16 at `src` into `wire`.
///
/// `wire_bytes` is the size of `wire`; `cinch_wire_bytes` returns how many bytes are written. `src` and
/// `wire` must not overlap. Codecs with random rounding (`minmax4:seed=1`) draw the same numbers for
/// equal seed and `draw`: increment `draw` from call to call.
///
/// Arrays in host memory: `stream` is NULL, and large arrays are encoded by `CINCH_THREADS` threads.
///
/// Arrays in memory of one GPU: the work is queued on `stream`, a `cudaStream_t` or `CUstream` of that
/// GPU, which may be capturing; NULL is its default stream. The result is bit-identical. Elements must
/// be aligned to their size, chunks to 16 bytes. The first such call of a process loads the kernels.
/// Codecs with a scale per tensor (`tensor=K`) work on host memory only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_encode(
    codec: *const c_char,
    layout: layout_number,
    src: *const c_void,
    count: usize,
    dtype: dtype_number,
    draw: u64,
    wire: *mut c_void,
    wire_bytes: usize,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_encode", {
        // SAFETY: cinch.h requires of the program that `codec` is NULL or text that ends with NUL.
        let spec = unsafe { spec_of(codec) }?;
        let layout = layout_of(layout)?;
        let elements = HostElements::new(count, dtype)?;
        check_extent("src", src, elements.bytes)?;
        check_extent("wire", wire, wire_bytes)?;
        let both = [
            ("src", src.addr(), elements.bytes),
            ("wire", wire.addr(), wire_bytes),
        ];
        if let Some(gpu) = device::gpu_of(&both, stream)? {
            let at = (wire.addr() as u64, wire_bytes);
            let elements = elements.on_device(src.addr());
            // SAFETY: cinch.h requires of the program that the arrays have these sizes and the
            // stream is of that GPU.
            return unsafe { gpu.encode(spec, layout, elements, draw, at, stream.addr()) };
        }
        let codec = StandAlone::new(spec, layout, Isa::detect())?.for_elements(elements.dtype);
        let codec = on_threads(codec, count)?;
        // SAFETY: readable for `count` elements, and writable for `wire_bytes`, by the
        // documented contract.
        let (src, wire) = unsafe {
            let src = input("src", src, elements.bytes)?;
            disjoint(src.as_ptr(), src.len(), wire.cast(), wire_bytes)?;
            (src, output("wire", wire, wire_bytes)?)
        };
        elements
            .with_f32(src, |x| codec.encode(x, draw, wire))
            .map(drop)
    })
}

/// Decodes the first `count` elements of the `wire_bytes` bytes at `wire` into `dst`, as type f32, f16
/// or bf16.
///
/// Data in `CINCH_LAYOUT_PUBLISHED` must hold exactly `count` elements, and `wire_bytes` must be their
/// size: bytes behind them are an error. `wire` and `dst` must not
/// overlap. Both are in host memory or in memory of one GPU; see `cinch_encode`. `dst` is written on
/// success only. In GPU memory, a CompLL header with another number of elements is no error: all
/// decoded elements are then NaN.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_decode(
    codec: *const c_char,
    layout: layout_number,
    wire: *const c_void,
    wire_bytes: usize,
    dst: *mut c_void,
    count: usize,
    dtype: dtype_number,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_decode", {
        // SAFETY: cinch.h requires of the program that `codec` is NULL or text that ends with NUL.
        let spec = unsafe { spec_of(codec) }?;
        let layout = layout_of(layout)?;
        let elements = HostElements::new(count, dtype)?;
        check_extent("wire", wire, wire_bytes)?;
        check_extent("dst", dst, elements.bytes)?;
        let both = [
            ("wire", wire.addr(), wire_bytes),
            ("dst", dst.addr(), elements.bytes),
        ];
        if let Some(gpu) = device::gpu_of(&both, stream)? {
            let at = (wire.addr() as u64, wire_bytes);
            let elements = elements.on_device(dst.addr());
            // SAFETY: cinch.h requires of the program that the arrays have these sizes and the
            // stream is of that GPU.
            return unsafe { gpu.decode(spec, layout, at, elements, stream.addr()) };
        }
        let codec = StandAlone::new(spec, layout, Isa::detect())?;
        let codec = on_threads(codec, count)?;
        // SAFETY: readable for `wire_bytes`, and writable for `count` elements, by the
        // documented contract.
        let (wire, dst) = unsafe {
            let wire = input("wire", wire, wire_bytes)?;
            disjoint(wire.as_ptr(), wire_bytes, dst.cast(), elements.bytes)?;
            (wire, output("dst", dst, elements.bytes)?)
        };
        elements.with_f32_mut(dst, |y| codec.decode(wire, y))
    })
}

/// Copies `count` elements of type f32, f16 or bf16 between host memory and a GPU, encoded by `codec` on
/// the way.
///
/// The destination receives decoded elements. With `trunc16`, half of the bytes of f32 cross the bus.
/// Exactly one of `src` and `dst` must be GPU memory; host memory may be pinned or pageable. Up to 16
/// threads of the library encode or decode on the host. See `cinch_encode` for `draw`.
///
/// The copy starts after earlier work of `stream`, a stream of that GPU, and before later work. The
/// call returns when the host array may be reused. To the GPU, that is when the array has been read, as
/// with `cudaMemcpyAsync` from pageable memory. To the host, that is when the copy is complete.
/// After an error the contents of `dst` are undefined.
///
/// In a capture nothing is copied yet. Each replay of the graph copies the elements that `src` has then, with the same
/// `draw`; both arrays must stay as long as there are replays. The graph keeps pinned memory for two pieces of 512 Ki
/// elements a thread, and as much on the GPU; the driver may allocate it only when running kernels have ended. Replays of one
/// captured copy must not run at the same time. An internal error in a replay ends the process, since nothing could report it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_copy(
    codec: *const c_char,
    src: *const c_void,
    dst: *mut c_void,
    count: usize,
    dtype: dtype_number,
    draw: u64,
    stream: *mut c_void,
) -> cinch_result_t {
    guard!("cinch_copy", {
        // SAFETY: cinch.h requires of the program that `codec` is NULL or text that ends with NUL.
        let spec = unsafe { spec_of(codec) }?;
        let elements = HostElements::new(count, dtype)?;
        let bytes = elements.bytes;
        check_extent("src", src, bytes)?;
        check_extent("dst", dst, bytes)?;
        // SAFETY: cinch.h requires of the program that the arrays have `bytes` bytes and the stream
        // exists.
        unsafe { device::copy(spec, elements.dtype, draw, src, dst, bytes, stream) }
    })
}

/// Copies `count` elements of type f32, f16 or bf16 at `src` in host memory to `ndsts` arrays in the memory of
/// one or several GPUs, encoded by `codec` on the way.
///
/// The elements are encoded once, and their encoding crosses the bus once for each GPU, however many arrays are
/// on it. `dsts` and `streams` have `ndsts` entries: `dsts[i]` is GPU memory, which no other array overlaps, and
/// `streams[i]` is a stream of its GPU. Otherwise the call is as `cinch_copy`: it returns when `src` has been
/// read, and each array is complete in the order of its stream. With several GPUs it returns when all have read
/// the encoding, so the slowest of the streams delays the others. In a capture all `streams` are one stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_copy_to_gpus(
    codec: *const c_char,
    src: *const c_void,
    dsts: *const *mut c_void,
    streams: *const *mut c_void,
    ndsts: usize,
    count: usize,
    dtype: dtype_number,
    draw: u64,
) -> cinch_result_t {
    guard!("cinch_copy_to_gpus", {
        // SAFETY: cinch.h requires of the program that `codec` is NULL or text that ends with NUL.
        let spec = unsafe { spec_of(codec) }?;
        let elements = HostElements::new(count, dtype)?;
        let bytes = elements.bytes;
        check_extent("src", src, bytes)?;
        let list = |name: &str, list: *const *mut c_void| {
            if ndsts == 0 || list.is_null() || !list.is_aligned() {
                return Err(Error::invalid_argument(format!(
                    "{name} at {list:p} has no {ndsts} addresses"
                )));
            }
            check_extent(
                name,
                list.cast(),
                ndsts.saturating_mul(size_of::<*mut c_void>()),
            )?;
            // SAFETY: cinch.h requires of the program that the list has `ndsts` entries.
            Ok(unsafe { std::slice::from_raw_parts(list, ndsts) })
        };
        let (dsts, streams) = (list("dsts", dsts)?, list("streams", streams)?);
        for (at, &dst) in dsts.iter().enumerate() {
            check_extent(&format!("dsts[{at}]"), dst, bytes)?;
        }
        // SAFETY: cinch.h requires of the program that the arrays have `bytes` bytes and the streams
        // exist.
        unsafe { device::copy_to_gpus(spec, elements.dtype, draw, src, bytes, (dsts, streams)) }
    })
}

/// Returns the codec with this name and layout.
///
/// # Safety
/// `codec` is NULL or readable up to its NUL.
unsafe fn build(codec: *const c_char, layout: layout_number) -> Result<StandAlone> {
    // SAFETY: the caller passes `codec` as NULL or text that ends with NUL.
    let spec = unsafe { spec_of(codec) }?;
    StandAlone::new(spec, layout_of(layout)?, Isa::detect())
}

/// Parses the name of a codec.
///
/// # Safety
/// `codec` is NULL or readable up to its NUL.
unsafe fn spec_of(codec: *const c_char) -> Result<CodecSpec> {
    // SAFETY: the caller passes `codec` as NULL or text that ends with NUL.
    let text = unsafe { text::read(codec, "codec") }?;
    let text = text.ok_or_else(|| Error::invalid_argument("codec is NULL"))?;
    text.parse()
}

fn layout_of(layout: layout_number) -> Result<Layout> {
    match layout {
        0 => Ok(Layout::Chunk),
        1 => Ok(Layout::Published),
        _ => Err(Error::invalid_argument(format!(
            "layout {layout} is unknown; valid: 0 (CINCH_LAYOUT_CHUNK) and 1 (CINCH_LAYOUT_PUBLISHED)"
        ))),
    }
}

/// Returns the codec, for a large array with the number of threads of the settings. For small
/// arrays, reading the settings would take longer than encoding.
fn on_threads(codec: StandAlone, count: usize) -> Result<StandAlone> {
    if count < StandAlone::SPLITS_FROM {
        return Ok(codec);
    }
    Ok(codec.with_threads(Config::from_env()?.threads))
}

/// Checks that `count` elements, encoded with scales, are within the limit of a slice.
///
/// # Errors
/// Invalid argument if it may not be.
fn check_count(count: usize) -> Result<()> {
    if count > isize::MAX as usize / 16 {
        return Err(Error::invalid_argument(format!(
            "{count} elements are more than any memory holds"
        )));
    }
    Ok(())
}

/// Number and type of the elements in an array that lossy codecs can encode. The array's memory may
/// have any alignment.
struct HostElements {
    count: usize,
    dtype: DType,
    bytes: usize,
}

impl HostElements {
    fn new(count: usize, dtype: dtype_number) -> Result<HostElements> {
        check_count(count)?;
        let dtype = ARGUMENT_NAMES.dtype(dtype.into())?;
        if !dtype.has_codecs() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("codecs encode f32, f16 and bf16, not {dtype}"),
            ));
        }
        Ok(HostElements {
            count,
            dtype,
            bytes: count * dtype.size(),
        })
    }

    fn on_device(&self, address: usize) -> arrays::Elements {
        arrays::Elements {
            address: address as u64,
            count: self.count,
            dtype: self.dtype,
        }
    }

    /// Calls `read` with the elements as fp32: in place if `src` is aligned fp32, else widened in a
    /// copy.
    fn with_f32<T>(&self, src: &[u8], read: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
        if self.dtype == DType::F32 {
            // SAFETY: any bytes are valid fp32 numbers.
            let (before, all, _) = unsafe { src.align_to::<f32>() };
            if before.is_empty() {
                return read(all);
            }
        }
        let mut tile = Tile::new(self.count);
        self.converter()?.load(src, &mut tile);
        read(tile.f32(self.count))
    }

    /// Calls `write` to produce fp32 numbers, and stores them rounded to the element type if it
    /// succeeds.
    fn with_f32_mut(
        &self,
        dst: &mut [u8],
        write: impl FnOnce(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        if self.dtype == DType::F32 {
            // SAFETY: any bytes are valid fp32 numbers, and any fp32 numbers are valid bytes.
            let (before, all, _) = unsafe { dst.align_to_mut::<f32>() };
            if before.is_empty() {
                return write(all);
            }
        }
        let mut tile = Tile::new(self.count);
        write(tile.f32_mut(self.count))?;
        self.converter()?.store(&tile, dst);
        Ok(())
    }

    fn converter(&self) -> Result<Reducer> {
        Reducer::new(self.dtype, ReduceOp::Sum, Isa::detect())
    }
}

/// Returns an input array as a slice; NULL is allowed for 0 bytes.
///
/// # Errors
/// See [`check_extent`].
///
/// # Safety
/// `at` is readable for `bytes` bytes for as long as the result is used.
unsafe fn input<'a>(name: &str, at: *const c_void, bytes: usize) -> Result<&'a [u8]> {
    check_extent(name, at, bytes)?;
    if bytes == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller keeps `at` readable for `bytes` bytes; `check_extent` excluded NULL and
    // wrap-around.
    Ok(unsafe { std::slice::from_raw_parts(at.cast(), bytes) })
}

/// Returns an output array as a slice; NULL is allowed for 0 bytes.
///
/// # Errors
/// See [`check_extent`].
///
/// # Safety
/// `at` is writable for `bytes` bytes, and nothing else uses it, for as long as the result is used.
unsafe fn output<'a>(name: &str, at: *mut c_void, bytes: usize) -> Result<&'a mut [u8]> {
    check_extent(name, at, bytes)?;
    if bytes == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller keeps `at` writable and unshared for `bytes` bytes; `check_extent`
    // excluded NULL and wrap-around.
    Ok(unsafe { std::slice::from_raw_parts_mut(at.cast(), bytes) })
}

/// Checks that `at` is not NULL, and that `bytes` bytes from there lie within the address space.
///
/// # Errors
/// Invalid argument, with the name of the array.
fn check_extent(name: &str, at: *const c_void, bytes: usize) -> Result<()> {
    if at.is_null() && bytes > 0 {
        return Err(Error::invalid_argument(format!(
            "{name} is NULL, but has {bytes} bytes"
        )));
    }
    if bytes > isize::MAX as usize || at.addr().checked_add(bytes).is_none() {
        return Err(Error::invalid_argument(format!(
            "{name} of {bytes} bytes at {at:p} leaves the address space"
        )));
    }
    Ok(())
}

/// Checks that the arrays `a` and `b` do not overlap.
///
/// # Errors
/// Invalid argument if they do.
fn disjoint(a: *const u8, a_bytes: usize, b: *const u8, b_bytes: usize) -> Result<()> {
    let (from, to) = (a.addr(), b.addr());
    let apart = from.saturating_add(a_bytes) <= to || to.saturating_add(b_bytes) <= from;
    if a_bytes > 0 && b_bytes > 0 && !apart {
        return Err(Error::invalid_argument(format!(
            "input ({a_bytes} bytes at {a:p}) and output ({b_bytes} bytes at {b:p}) overlap"
        )));
    }
    Ok(())
}
