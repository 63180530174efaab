//! Whole arrays encoded outside a collective: to be sent, filed or read by others.
//!
//! Two layouts. [`Layout::Chunk`] is what a collective has on the wire for one chunk. The other
//! is what the source of a format published, so that other systems' messages can be read and
//! written: for `minmax*` CompLL's message, for `trunc*` ADT's raw Bitpack bytes.

mod bitpack;
mod compll;
mod threads;

use super::simd::Available;
use super::{Codec, EncodeStats, Random, Span, abs_max, build};
use crate::cpu::{FloatEnvironment, Isa};
use crate::error::{Error, ErrorKind, Result};
use crate::types::{CodecKind, CodecSpec, ScaleRule};
use bitpack::Bitpack;
use compll::CompLl;
use std::fmt::Debug;
use std::sync::Arc;

/// How an encoded array is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// As a chunk of a collective: codes, padding to 16 bytes, numbers of the blocks.
    Chunk,
    /// As the source of the format published it.
    Published,
}

/// A published layout of whole arrays.
trait Published: Debug + Send + Sync {
    fn bytes(&self, n: usize) -> usize;
    /// Elements of an encoded array, from its own bytes.
    fn count(&self, bytes: &[u8]) -> Result<usize>;
    /// Encodes into exactly [`Published::bytes`].
    fn encode(&self, x: &[f32], random: Random, to: &mut [u8], stats: &mut EncodeStats);
    /// Decodes an array that has as many elements as `y`.
    fn decode(&self, from: &[u8], y: &mut [f32]);
    /// Bytes of each element, where an encoded array is nothing but its elements, one after the
    /// other and each by itself.
    fn packed_bytes(&self) -> Option<usize> {
        None
    }
}

/// A codec for whole arrays.
#[derive(Clone, Debug)]
pub struct StandAlone {
    spec: CodecSpec,
    isa: Isa,
    form: Form,
    threads: usize,
}

#[derive(Clone, Debug)]
enum Form {
    Chunk(Arc<dyn Codec>),
    Published(Arc<dyn Published>),
}

impl StandAlone {
    /// # Errors
    /// Invalid argument for bad parameters and for raw, which is the elements as they are;
    /// unsupported if the machine lacks `isa`, or if the codec's source published no layout.
    pub fn new(spec: CodecSpec, layout: Layout, isa: Isa) -> Result<StandAlone> {
        let _environment = FloatEnvironment::standard();
        let Some(codec) = build(spec, isa)? else {
            return Err(Error::invalid_argument(
                "codec raw is the elements as they are; copy them",
            ));
        };
        let form = match layout {
            Layout::Chunk => Form::Chunk(codec),
            Layout::Published => Form::Published(published(spec, Available::new(isa)?)?),
        };
        Ok(StandAlone {
            spec,
            isa,
            form,
            threads: 1,
        })
    }

    /// Bytes of `n` encoded elements.
    pub fn bytes(&self, n: usize) -> usize {
        match &self.form {
            Form::Chunk(codec) => codec.wire_bytes(n),
            Form::Published(layout) => layout.bytes(n),
        }
    }

    /// Elements of an array in a published layout, which these bytes are all of.
    ///
    /// # Errors
    /// Invalid argument if they are no such array; unsupported in the layout of chunks, which
    /// does not say.
    pub fn count(&self, bytes: &[u8]) -> Result<usize> {
        match &self.form {
            Form::Chunk(_) => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the chunk layout of {} does not say how many elements it holds; keep the \
                     count, or take the published layout",
                    self.spec
                ),
            )),
            Form::Published(layout) => layout.count(bytes),
        }
    }

    /// Encodes `x` into the first [`StandAlone::bytes`] of `to` and returns what it learnt about
    /// `x`: all of it, but for packed bytes nothing. Tensor scales are taken from `x`. A spec with a seed rounds at random: arrays with
    /// the same `draw` draw the same numbers.
    ///
    /// # Errors
    /// Invalid argument if `to` is too short; nothing is written.
    pub fn encode(&self, x: &[f32], draw: u64, to: &mut [u8]) -> Result<EncodeStats> {
        let _environment = FloatEnvironment::standard();
        let bytes = self.bytes(x.len());
        let to = self
            .room(to.len(), bytes, x.len())
            .map(|()| &mut to[..bytes])?;
        let random = Random::new(self.spec.seed.into(), draw, 0);
        if let Some(stats) = self.encode_split(x, random, to) {
            return Ok(stats);
        }
        let mut stats = EncodeStats::default();
        match &self.form {
            Form::Chunk(codec) => self.chunk(&**codec, x, random, to, Some(&mut stats)),
            Form::Published(layout) => layout.encode(x, random, to, &mut stats),
        }
        Ok(stats)
    }

    /// The same of a part of an array that draws these numbers, without a look at what it holds.
    ///
    /// # Errors
    /// As [`StandAlone::encode`].
    pub fn encode_drawing(&self, x: &[f32], random: Random, to: &mut [u8]) -> Result<()> {
        let _environment = FloatEnvironment::standard();
        let bytes = self.bytes(x.len());
        let to = self
            .room(to.len(), bytes, x.len())
            .map(|()| &mut to[..bytes])?;
        match &self.form {
            Form::Chunk(codec) => self.chunk(&**codec, x, random, to, None),
            Form::Published(layout) => layout.encode(x, random, to, &mut EncodeStats::default()),
        }
        Ok(())
    }

    fn chunk(
        &self,
        codec: &dyn Codec,
        x: &[f32],
        random: Random,
        to: &mut [u8],
        stats: Option<&mut EncodeStats>,
    ) {
        let kept = self.spec.kind.has_tensor_scale()
            && matches!(self.spec.scale, ScaleRule::Tensor { .. });
        let scale = kept.then(|| abs_max(self.isa, x).0);
        codec.encode(Span::whole(x.len()).drawing(random), x, scale, to, stats);
    }

    /// Decodes `y.len()` elements from the first [`StandAlone::bytes`] of `from`.
    ///
    /// # Errors
    /// Invalid argument if `from` is too short, or in a published layout holds another number of
    /// elements; nothing is written.
    pub fn decode(&self, from: &[u8], y: &mut [f32]) -> Result<()> {
        let _environment = FloatEnvironment::standard();
        let bytes = self.bytes(y.len());
        let from = self
            .room(from.len(), bytes, y.len())
            .map(|()| &from[..bytes])?;
        match &self.form {
            Form::Chunk(codec) if !self.decode_split(from, y) => {
                codec.decode(Span::whole(y.len()), from, y);
            }
            Form::Chunk(_) => {}
            Form::Published(layout) => {
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

/// The table of published layouts.
fn published(spec: CodecSpec, isa: Available) -> Result<Arc<dyn Published>> {
    Ok(match spec.kind {
        CodecKind::MinMax1 => Arc::new(CompLl::<1>::new(spec.seed, isa)),
        CodecKind::MinMax2 => Arc::new(CompLl::<2>::new(spec.seed, isa)),
        CodecKind::MinMax4 => Arc::new(CompLl::<4>::new(spec.seed, isa)),
        CodecKind::MinMax8 => Arc::new(CompLl::<8>::new(spec.seed, isa)),
        CodecKind::Trunc8 => Arc::new(Bitpack::<8>::new(isa)),
        CodecKind::Trunc16 => Arc::new(Bitpack::<16>::new(isa)),
        CodecKind::Trunc24 => Arc::new(Bitpack::<24>::new(isa)),
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
