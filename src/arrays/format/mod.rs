//! Whole arrays that are encoded outside a collective, to be sent, stored in files or read by other programs.
//!
//! [`Layout::Chunk`] has the bytes that a collective puts on the wire for one chunk. [`Layout::Published`]
//! has the bytes of the system that introduced the format, so that messages of that system can be read and
//! written: CompLL's message for `minmax*`, and ADT's raw Bitpack bytes for `trunc*`.

mod bitpack;
mod compll;
mod threads;

use crate::codec::{Codec, EncodeStats, RoundingRandom, Span, abs_max, build};
use crate::cpu::{FloatEnvironment, Isa};
use crate::error::{Error, ErrorKind, Result};
use crate::types::{CodecKind, CodecSpec, DType, ScaleRule};
use bitpack::Bitpack;
use compll::CompLl;
use std::fmt::Debug;
use std::sync::Arc;

/// Layout of an encoded array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The layout of a chunk in a collective: all codes, padding to 16 bytes, and the numbers that
    /// each block adds, such as its scale.
    Chunk,
    /// The layout of the system that introduced the format: CompLL's message or ADT's Bitpack bytes.
    Published,
}

/// Encodes and decodes whole arrays in the layout of the system that introduced the format
/// ([`Layout::Published`]).
trait PublishedLayout: Debug + Send + Sync {
    /// Returns the size of `n` encoded elements in bytes.
    fn bytes(&self, n: usize) -> usize;
    /// Returns the number of elements in an encoded array.
    fn count(&self, bytes: &[u8]) -> Result<usize>;
    /// Encodes `x` into `to`, which has exactly [`PublishedLayout::bytes`] bytes.
    fn encode(&self, x: &[f32], random: RoundingRandom, to: &mut [u8], stats: &mut EncodeStats);
    /// Decodes an array that has as many elements as `y`.
    fn decode(&self, from: &[u8], y: &mut [f32]);
    /// Returns the bytes of one encoded element if elements are encoded independently and stored one after
    /// the other. Returns `None` for any other layout.
    fn packed_bytes(&self) -> Option<usize> {
        None
    }
}

/// A codec for whole arrays, optionally on several threads.
#[derive(Clone, Debug)]
pub struct StandAlone {
    spec: CodecSpec,
    isa: Isa,
    form: ArrayForm,
    threads: usize,
}

#[derive(Clone, Debug)]
enum ArrayForm {
    Chunk(Arc<dyn Codec>),
    Published(Arc<dyn PublishedLayout>),
}

impl StandAlone {
    /// Creates the codec of `spec`, running on `isa`.
    ///
    /// # Errors
    /// Invalid argument for bad parameters and for raw, which needs no encoding; unsupported if the machine
    /// lacks `isa`, or if `layout` is [`Layout::Published`] and the codec has no such layout.
    pub fn new(spec: CodecSpec, layout: Layout, isa: Isa) -> Result<StandAlone> {
        let _environment = FloatEnvironment::standard();
        let Some(codec) = build(spec, isa)? else {
            return Err(Error::invalid_argument(
                "codec raw is the elements as they are; copy them",
            ));
        };
        let form = match layout {
            Layout::Chunk => ArrayForm::Chunk(codec),
            Layout::Published => ArrayForm::Published(published(spec, isa)?),
        };
        Ok(StandAlone {
            spec,
            isa,
            form,
            threads: 1,
        })
    }

    /// Returns the codec for arrays of elements of `dtype`; see `Codec::for_elements`.
    pub fn for_elements(mut self, dtype: DType) -> StandAlone {
        if let ArrayForm::Chunk(codec) = &self.form
            && let Some(limited) = codec.for_elements(dtype)
        {
            self.form = ArrayForm::Chunk(limited);
        }
        self
    }

    /// Returns the limit of the codec for elements of `dtype`; see `Codec::element_limit`.
    pub fn element_limit(&self, dtype: DType) -> Option<f32> {
        match &self.form {
            ArrayForm::Chunk(codec) => codec.for_elements(dtype)?.element_limit(),
            ArrayForm::Published(_) => None,
        }
    }

    /// Returns the size of `n` encoded elements in bytes.
    pub fn bytes(&self, n: usize) -> usize {
        match &self.form {
            ArrayForm::Chunk(codec) => codec.wire_bytes(n),
            ArrayForm::Published(layout) => layout.bytes(n),
        }
    }

    /// Returns whether an encoded array has numbers of its blocks behind the codes, such as scales.
    pub(crate) fn has_block_numbers(&self) -> bool {
        match &self.form {
            ArrayForm::Chunk(codec) => codec.description().block_numbers > 0,
            ArrayForm::Published(_) => true,
        }
    }

    /// Returns the number of elements of a whole array in [`Layout::Published`].
    ///
    /// # Errors
    /// Invalid argument if `bytes` are not such an array; unsupported in the chunk layout, which does not
    /// store its element count.
    pub fn count(&self, bytes: &[u8]) -> Result<usize> {
        match &self.form {
            ArrayForm::Chunk(_) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the chunk layout of {} does not say how many elements it holds; keep the \
                     count, or take the published layout",
                    self.spec
                ),
            )),
            ArrayForm::Published(layout) => layout.count(bytes),
        }
    }

    /// Encodes `x` into the first [`StandAlone::bytes`] bytes of `to`, and returns statistics of `x`. For
    /// `trunc*` in [`Layout::Published`] all statistics are zero. Tensor scales are computed from `x`. With a
    /// seed, rounding is stochastic, and arrays with equal `draw` use equal random numbers.
    ///
    /// # Errors
    /// Invalid argument if `to` is too short; nothing is written.
    pub fn encode(&self, x: &[f32], draw: u64, to: &mut [u8]) -> Result<EncodeStats> {
        let _environment = FloatEnvironment::standard();
        let bytes = self.bytes(x.len());
        let to = self
            .room(to.len(), bytes, x.len())
            .map(|()| &mut to[..bytes])?;
        let random = RoundingRandom::new(self.spec.seed.into(), draw, 0);
        if let Some(stats) = self.encode_split(x, random, to) {
            return Ok(stats);
        }
        let mut stats = EncodeStats::default();
        match &self.form {
            ArrayForm::Chunk(codec) => self.encode_chunk(&**codec, x, random, to, Some(&mut stats)),
            ArrayForm::Published(layout) => layout.encode(x, random, to, &mut stats),
        }
        Ok(stats)
    }

    /// Encodes a part of an array with random numbers from `random`, on one thread and without
    /// statistics.
    ///
    /// # Errors
    /// See [`StandAlone::encode`].
    pub(crate) fn encode_drawing(
        &self,
        x: &[f32],
        random: RoundingRandom,
        to: &mut [u8],
    ) -> Result<()> {
        let _environment = FloatEnvironment::standard();
        let bytes = self.bytes(x.len());
        let to = self
            .room(to.len(), bytes, x.len())
            .map(|()| &mut to[..bytes])?;
        match &self.form {
            ArrayForm::Chunk(codec) => self.encode_chunk(&**codec, x, random, to, None),
            ArrayForm::Published(layout) => {
                layout.encode(x, random, to, &mut EncodeStats::default())
            }
        }
        Ok(())
    }

    fn encode_chunk(
        &self,
        codec: &dyn Codec,
        x: &[f32],
        random: RoundingRandom,
        to: &mut [u8],
        stats: Option<&mut EncodeStats>,
    ) {
        let has_tensor_scale = self.spec.kind.has_tensor_scale()
            && matches!(self.spec.scale, ScaleRule::Tensor { .. });
        let scale = has_tensor_scale.then(|| abs_max(self.isa, x).0);
        codec.encode(Span::whole(x.len()).drawing(random), x, scale, to, stats);
    }

    /// Decodes `y.len()` elements from the first [`StandAlone::bytes`] bytes of `from`. In
    /// [`Layout::Published`] these must be all bytes of `from`.
    ///
    /// # Errors
    /// Invalid argument if `from` is too short, or if an array in [`Layout::Published`] has another number of
    /// bytes or elements; nothing is written.
    pub fn decode(&self, from: &[u8], y: &mut [f32]) -> Result<()> {
        let _environment = FloatEnvironment::standard();
        let (have, bytes) = (from.len(), self.bytes(y.len()));
        let from = self
            .room(from.len(), bytes, y.len())
            .map(|()| &from[..bytes])?;
        match &self.form {
            ArrayForm::Chunk(codec) if !self.decode_split(from, y) => {
                codec.decode(Span::whole(y.len()), from, y);
            }
            ArrayForm::Chunk(_) => {}
            ArrayForm::Published(layout) => {
                if have > bytes {
                    return Err(Error::invalid_argument(format!(
                        "{} elements are {bytes} bytes when encoded with {}, but the array has {have}",
                        y.len(),
                        self.spec
                    )));
                }
                let held = layout.count(from)?;
                if held != y.len() {
                    return Err(Error::invalid_argument(format!(
                        "{} elements were asked for, but the array encoded with {} holds {held}",
                        y.len(),
                        self.spec
                    )));
                }
                if !self.decode_split(from, y) {
                    layout.decode(from, y);
                }
            }
        }
        Ok(())
    }

    /// Checks that a buffer of `have` bytes holds `n` encoded elements.
    fn room(&self, have: usize, need: usize, n: usize) -> Result<()> {
        if have < need {
            return Err(Error::invalid_argument(format!(
                "{n} elements are {need} bytes when encoded with {}, but there are {have}",
                self.spec
            )));
        }
        Ok(())
    }
}

/// Returns the implementation of [`Layout::Published`] for a codec.
fn published(spec: CodecSpec, isa: Isa) -> Result<Arc<dyn PublishedLayout>> {
    let draws = spec.seed != 0;
    Ok(match spec.kind {
        CodecKind::MinMax1 => Arc::new(CompLl::<1> { draws, isa }),
        CodecKind::MinMax2 => Arc::new(CompLl::<2> { draws, isa }),
        CodecKind::MinMax4 => Arc::new(CompLl::<4> { draws, isa }),
        CodecKind::MinMax8 => Arc::new(CompLl::<8> { draws, isa }),
        CodecKind::Trunc8 => Arc::new(Bitpack::<8> { isa }),
        CodecKind::Trunc16 => Arc::new(Bitpack::<16> { isa }),
        CodecKind::Trunc24 => Arc::new(Bitpack::<24> { isa }),
        other => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "there is no published layout of {}; minmax1/2/4/8 and trunc8/16/24 have one",
                    other.name()
                ),
            ));
        }
    })
}

#[cfg(test)]
mod tests;
