//! Encoding and decoding of whole arrays, without a communicator, on the host or where they are on a
//! GPU; and packed copies between the two.

use super::device;
use super::error::cinch_result_t;
use super::handle::{check_out, store};
use super::text;
use super::types::{self, dtype_number};
use crate::arrays;
use crate::arrays::{Layout, StandAlone};
use crate::config::Config;
use crate::cpu::{Isa, Tile};
use crate::error::{Error, ErrorKind, Result};
use crate::reduce::Reducer;
use crate::types::{CodecSpec, DType, ReduceOp};
use std::ffi::{c_char, c_void};

/// How an encoded array is laid out.
#[allow(dead_code)] // for the header and the tests
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum cinch_layout_t {
    /// As a chunk of a collective: codes, zeros up to a multiple of 16 bytes, then the numbers
    /// of the blocks, all little endian.
    CINCH_LAYOUT_CHUNK = 0,
    /// As the format's source published it: `minmax1/2/4/8` as CompLL's messages with a header
    /// of 10 bytes, `trunc8/16/24` as ADT's packed bytes without any.
    CINCH_LAYOUT_PUBLISHED = 1,
}

pub(super) type layout_number = u32;

/// Bytes of `count` elements encoded with `codec`, to `*bytes`. They do not depend on the type of
/// the elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_wire_bytes(
    codec: *const c_char,
    layout: layout_number,
    count: usize,
    bytes: *mut usize,
) -> cinch_result_t {
    guard!("cinch_wire_bytes", {
        // SAFETY: NULL or text, by the documented contract.
        let codec = unsafe { build(codec, layout) }?;
        check_count(count)?;
        // SAFETY: NULL or writable, by the documented contract.
        unsafe { store("bytes", bytes, codec.bytes(count)) }
    })
}

/// HostElements of an encoded array in a published layout, which is all of the `wire_bytes` bytes at
/// `wire`, to `*count`. The layout of chunks does not say how many it holds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cinch_wire_count(
    codec: *const c_char,
    layout: layout_number,
    wire: *const c_void,
    wire_bytes: usize,
    count: *mut usize,
) -> cinch_result_t {
    guard!("cinch_wire_count", {
        // SAFETY: NULL or text, by the documented contract.
        let codec = unsafe { build(codec, layout) }?;
        check_out("count", count)?;
        check_extent("wire", wire, wire_bytes)?;
        device::refuse("wire", wire.addr(), "copy its header to the host")?;
        // SAFETY: readable for `wire_bytes`, by the documented contract.
        let wire = unsafe { input("wire", wire, wire_bytes) }?;
        let held = codec.count(wire)?;
        // SAFETY: NULL or writable, by the documented contract.
        unsafe { store("count", count, held) }
    })
}

/// Encodes `count` elements of type f32, f16 or bf16 at `src`, large arrays on `CINCH_THREADS`
/// threads, into `wire`, which has room for
/// `wire_bytes` bytes; `cinch_wire_bytes` says how many are written. The two do not overlap.
///
/// `draw` matters to codecs that round at random (`minmax4:seed=1`): calls with the same seed and
/// the same `draw` draw the same numbers, so count it up from call to call.
///
/// Both in host memory: `stream` is NULL. Both in memory of one GPU: the work is queued on `stream`, a
/// `cudaStream_t` or `CUstream` of that GPU (NULL is its default stream), gives the same bytes, and may be
/// captured; elements are aligned as their type is, chunks to 16 bytes. The first such call in a
/// process loads kernels. Scales of whole arrays (`tensor=K`) are for host memory.
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
        // SAFETY: NULL or text, by the documented contract.
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
            // SAFETY: memory of that GPU and a live stream, by the documented contract.
            return unsafe { gpu.encode(spec, layout, elements, draw, at, stream) };
        }
        let codec = StandAlone::new(spec, layout, Isa::detect())?;
        let codec = on_threads(codec, count)?;
        // SAFETY: readable for `count` elements, and writable for `wire_bytes`, by the
        // documented contract.
        let (src, wire) = unsafe {
            let src = input("src", src, elements.bytes)?;
            disjoint(src.as_ptr(), src.len(), wire.cast(), wire_bytes)?;
            (src, output("wire", wire, wire_bytes)?)
        };
        elements
            .read(src, |x| codec.encode(x, draw, wire))
            .map(drop)
    })
}

/// Decodes the first `count` elements of the `wire_bytes` bytes at `wire` into `dst`, as type f32,
/// f16 or bf16. A published layout must hold exactly so many. The two do not overlap; `dst` is
/// written on success only.
///
/// In host memory or in that of one GPU, as `cinch_encode`. A message with a header that lies on a
/// GPU is not looked at by the call: if it is not one of so many elements, they become NaN.
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
        // SAFETY: NULL or text, by the documented contract.
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
            // SAFETY: memory of that GPU and a live stream, by the documented contract.
            return unsafe { gpu.decode(spec, layout, at, elements, stream) };
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
        elements.write(dst, |y| codec.decode(wire, y))
    })
}

/// Copies `count` elements of type f32, f16 or bf16 from host memory to that of a GPU, or back, packed
/// by `codec` on the way: what arrives is what the codec makes of them. With `trunc16` half of the
/// bytes of f32 cross the bus. Exactly one of `src` and `dst` is memory of a GPU. The host's part is
/// done by up to 16 threads of their own; any host memory will do, pinned or not.
///
/// Begins behind the work that `stream` has, a stream of that GPU, which goes on behind the copy. The
/// call returns when the host array may be used again: towards the GPU when it has been read, as a
/// `cudaMemcpyAsync` from memory that is not pinned does; towards the host when it is complete. So
/// it cannot be captured. `draw` is that of `cinch_encode`. After an error `dst` is undefined.
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
        // SAFETY: NULL or text, by the documented contract.
        let spec = unsafe { spec_of(codec) }?;
        let elements = HostElements::new(count, dtype)?;
        let bytes = elements.bytes;
        check_extent("src", src, bytes)?;
        check_extent("dst", dst, bytes)?;
        // SAFETY: memory of so many bytes, on the host or on a GPU, and a live stream, by the
        // documented contract.
        unsafe { device::copy(spec, elements.dtype, draw, src, dst, bytes, stream) }
    })
}

/// The codec with this name and layout.
///
/// # Safety
/// `codec` is NULL or readable up to its NUL.
unsafe fn build(codec: *const c_char, layout: layout_number) -> Result<StandAlone> {
    // SAFETY: as ours.
    let spec = unsafe { spec_of(codec) }?;
    StandAlone::new(spec, layout_of(layout)?, Isa::detect())
}

/// # Safety
/// `codec` is NULL or readable up to its NUL.
unsafe fn spec_of(codec: *const c_char) -> Result<CodecSpec> {
    // SAFETY: as ours.
    let text = unsafe { text::read(codec, "codec") }?;
    let text = text.ok_or_else(|| Error::invalid_argument("codec is NULL"))?;
    text.parse()
}

fn layout_of(layout: layout_number) -> Result<Layout> {
    match layout {
        0 => Ok(Layout::Chunk),
        1 => Ok(Layout::Published),
        _ => Err(Error::invalid_argument(format!(
            "layout {layout} is none; there are 0 and 1"
        ))),
    }
}

/// The codec on as many threads as the settings say. They are read for arrays alone that can be
/// split: for others that would take longer than the work.
fn on_threads(codec: StandAlone, count: usize) -> Result<StandAlone> {
    if count < StandAlone::SPLITS_FROM {
        return Ok(codec);
    }
    Ok(codec.with_threads(Config::from_env()?.threads))
}

/// Keeps sizes in bytes, scales included, within what a slice may have.
fn check_count(count: usize) -> Result<()> {
    if count > isize::MAX as usize / 16 {
        return Err(Error::invalid_argument(format!(
            "{count} elements are more than any memory holds"
        )));
    }
    Ok(())
}

/// An array of a type that lossy codecs carry. Its memory may have any alignment.
struct HostElements {
    count: usize,
    dtype: DType,
    bytes: usize,
}

impl HostElements {
    fn new(count: usize, dtype: dtype_number) -> Result<HostElements> {
        check_count(count)?;
        let dtype = types::dtype(dtype)?;
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

    /// Hands `use_them` the elements as fp32: where they are, or widened.
    fn read<T>(&self, src: &[u8], use_them: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
        if self.dtype == DType::F32 {
            // SAFETY: any bytes are fp32 numbers.
            let (before, all, _) = unsafe { src.align_to::<f32>() };
            if before.is_empty() {
                return use_them(all);
            }
        }
        let mut tile = Tile::new(self.count);
        self.converter()?.load(src, &mut tile);
        use_them(tile.f32(self.count))
    }

    /// Has `make_them` write fp32 numbers, and rounds them to the type if it succeeds.
    fn write(
        &self,
        dst: &mut [u8],
        make_them: impl FnOnce(&mut [f32]) -> Result<()>,
    ) -> Result<()> {
        if self.dtype == DType::F32 {
            // SAFETY: any bytes are fp32 numbers, and any of those are bytes.
            let (before, all, _) = unsafe { dst.align_to_mut::<f32>() };
            if before.is_empty() {
                return make_them(all);
            }
        }
        let mut tile = Tile::new(self.count);
        make_them(tile.f32_mut(self.count))?;
        self.converter()?.store(&tile, dst);
        Ok(())
    }

    fn converter(&self) -> Result<Reducer> {
        Reducer::new(self.dtype, ReduceOp::Sum, Isa::detect())
    }
}

/// Memory that is read. NULL stands for no bytes.
///
/// # Safety
/// `at` is readable for `bytes`, if there are any, for as long as the result is used.
unsafe fn input<'a>(name: &str, at: *const c_void, bytes: usize) -> Result<&'a [u8]> {
    check_extent(name, at, bytes)?;
    if bytes == 0 {
        return Ok(&[]);
    }
    // SAFETY: as ours; not NULL, and within the address space.
    Ok(unsafe { std::slice::from_raw_parts(at.cast(), bytes) })
}

/// Memory that is written.
///
/// # Safety
/// As [`input`], writable, and nothing else uses it meanwhile.
unsafe fn output<'a>(name: &str, at: *mut c_void, bytes: usize) -> Result<&'a mut [u8]> {
    check_extent(name, at, bytes)?;
    if bytes == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as ours; not NULL, and within the address space.
    Ok(unsafe { std::slice::from_raw_parts_mut(at.cast(), bytes) })
}

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
