//! Tuning tables: which way of a call was measured to be the fastest, by size, for one model of GPU,
//! one number of ranks and one kind of link. Made by `cinch tune`; where none fits, the model of costs
//! decides.
//!
//! A table is text, see [`Table::parse`]. Those in `src/plan/tuned` are part of the library, through
//! the one list in `embedded.rs`.

mod embedded;
mod text;

use super::Request;
use crate::error::{Error, Result};
use crate::types::{Algorithm, CodecKind, Collective, KernelProtocol};
use sha2::{Digest, Sha256};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// One way of kernels to run a call: everything that is chosen. Strands of a ring follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelVariant {
    /// The schedule.
    pub algorithm: Algorithm,
    /// The kernel, and how its messages travel.
    pub kernel: KernelProtocol,
    /// Most blocks.
    pub channels: usize,
    /// Most bytes of a chunk's elements; 0: as many as fit a slot.
    pub chunk: usize,
}

impl fmt::Display for KernelVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} {} {}",
            self.algorithm, self.kernel, self.channels, self.chunk
        )
    }
}

/// What counts of a call's elements: their codec, and their bytes before it. Parameters of a codec and
/// the element type do not: they change a few instructions of each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WireClass {
    /// The codec.
    pub codec: CodecKind,
    /// Bytes of an element.
    pub element_bytes: usize,
}

impl WireClass {
    /// That of a request.
    pub fn of(request: &Request) -> WireClass {
        WireClass {
            codec: request.codec.kind,
            element_bytes: request.dtype.size(),
        }
    }
}

/// `raw/4`: the codec and the bytes of an element.
impl fmt::Display for WireClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.codec.name(), self.element_bytes)
    }
}

/// One line of a table: the way of calls of these sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// The collective.
    pub collective: Collective,
    /// What its messages hold.
    pub wire: WireClass,
    /// First size, in bytes of the larger buffer.
    pub from: usize,
    /// First size that is not its own.
    pub to: usize,
    /// How such calls run.
    pub way: KernelVariant,
    /// Seconds measured, or interpolated between measurements, at `from` and at `to`.
    pub seconds: [f64; 2],
}

impl Entry {
    /// Seconds at `size`, on the straight line between the two ends in the logarithms of both. A smaller
    /// size takes as long as the first; of a larger one each byte takes as long as at the last, or it
    /// would seem cheaper than what the model says of the same call with another codec.
    fn at(&self, size: usize) -> f64 {
        if size > self.to {
            return self.seconds[1] * (size as f64 / self.to as f64);
        }
        let [low, high] = [self.from, self.to].map(|size| (size.max(1) as f64).ln());
        let at = (size.max(1) as f64).ln().clamp(low, high);
        let [first, last] = self.seconds.map(f64::ln);
        (first + (last - first) * (at - low) / (high - low)).exp()
    }
}

/// Sizes of calls that are left to the model, although those beside them are not.
#[derive(Clone, Debug, PartialEq)]
struct Left {
    collective: Collective,
    wire: WireClass,
    /// In bytes of the larger buffer.
    sizes: Range<usize>,
}

/// What a table was measured on, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Model of the GPUs, in the driver's words.
    pub gpu: String,
    /// Ranks, each on a GPU of its own.
    pub ranks: usize,
    /// What lies between them: see [`links`].
    pub links: String,
    /// Day of the measurements.
    pub date: String,
    /// Version of cinch that was measured.
    pub cinch: String,
    /// The command that did it.
    pub command: String,
}

/// Measured choices for one model of GPU, number of ranks and kind of link.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// File, or name in the library.
    pub name: String,
    /// What it was measured on.
    pub header: Header,
    /// The choices, each with its line in the file.
    entries: Vec<(usize, Entry)>,
    /// What is beside some of them and not theirs.
    left: Vec<Left>,
    /// Of the text.
    fingerprint: String,
}

/// How many times smaller or larger than what was measured a message may be that a table serves.
const BEYOND: usize = 16;

/// How a call runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// How it runs.
    pub way: KernelVariant,
    /// The line of a table that says so; none of a way that is being measured.
    pub line: Option<Line>,
}

/// A line of a table, for one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Counted from 1.
    pub number: usize,
    /// Seconds measured; beyond the last size that was, as many for each byte as there.
    pub seconds: f64,
}

impl Table {
    /// The choice for calls of `collective` with a larger buffer of `bytes`. Sizes a little beyond both
    /// ends of what was measured take the nearer end's way, those far beyond none, and none those that a line
    /// leaves to the model. Where raw elements of this size were not measured, those of another size count:
    /// wire and waits take the time, and the sums little of it.
    pub fn choice(&self, collective: Collective, wire: WireClass, bytes: usize) -> Option<Choice> {
        let of = |wire: WireClass| {
            let lines = self.entries.iter();
            lines.filter(move |(_, entry)| entry.collective == collective && entry.wire == wire)
        };
        let is_raw = wire.codec == CodecKind::Raw;
        let sizes = [wire.element_bytes, 4, 2, 1, 8];
        let known = sizes[..if is_raw { sizes.len() } else { 1 }]
            .iter()
            .map(|&element_bytes| WireClass {
                element_bytes,
                ..wire
            })
            .find(|&wire| of(wire).next().is_some())?;
        let is_left = |left: &Left| {
            (left.collective, left.wire) == (collective, known) && left.sizes.contains(&bytes)
        };
        if self.left.iter().any(is_left) {
            return None;
        }
        let mut nearest = None;
        for (number, entry) in of(known) {
            if entry.from <= bytes || nearest.is_none() {
                nearest = Some((*number, entry));
            }
        }
        let near = |entry: &&Entry| {
            let (low, high) = (entry.from / BEYOND, entry.to.saturating_mul(BEYOND));
            (low..=high).contains(&bytes)
        };
        let nearest = nearest.filter(|(_, entry)| near(entry));
        nearest.map(|(number, entry)| Choice {
            way: entry.way,
            line: Some(Line {
                number,
                seconds: entry.at(bytes),
            }),
        })
    }

    /// Its choices, in the order of the file.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().map(|(_, entry)| entry)
    }

    /// What all ranks' tables must have in common.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Places where a larger message takes less time than a smaller one, by more than 5 %: sentences.
    pub fn cliffs(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut slowest: Option<(&Entry, f64, usize)> = None;
        for entry in self.entries() {
            if slowest.is_some_and(|(last, ..)| {
                (last.collective, last.wire) != (entry.collective, entry.wire)
            }) {
                slowest = None;
            }
            for (size, seconds) in [(entry.from, entry.seconds[0]), (entry.to, entry.seconds[1])] {
                match slowest {
                    Some((_, most, at)) if seconds < 0.95 * most => found.push(format!(
                        "{} {}: {:.2} us at {at} bytes, {:.2} us at {size}",
                        entry.collective,
                        entry.wire,
                        most * 1e6,
                        seconds * 1e6
                    )),
                    Some((_, most, _)) if seconds <= most => {}
                    _ => slowest = Some((entry, seconds, size)),
                }
            }
            slowest = slowest.map(|(_, most, at)| (entry, most, at));
        }
        found
    }

    fn new(
        name: &str,
        header: Header,
        (entries, left): (Vec<(usize, Entry)>, Vec<Left>),
        text: &str,
    ) -> Table {
        let digest = Sha256::digest(text.as_bytes());
        Table {
            name: name.into(),
            header,
            entries,
            left,
            fingerprint: digest[..8]
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        }
    }
}

/// What the GPUs of a communicator are: equal on all ranks, or nothing fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The model.
    pub gpu: String,
    /// Ranks.
    pub ranks: usize,
    /// What lies between them: see [`links`].
    pub links: String,
}

/// The kinds of link between one rank and all others, as tables call them.
pub fn links<'a>(classes: impl Iterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = classes.collect();
    names.sort_unstable();
    names.dedup();
    names.join(" + ")
}

/// Where choices come from that are not the model's.
#[derive(Clone, Debug, PartialEq)]
pub enum Tuning {
    /// A table.
    Table(Arc<Table>),
    /// Nowhere, and why, as a phrase.
    Model(String),
    /// All calls that can go this way do: something is being measured.
    Always(KernelVariant),
}

impl Tuning {
    /// The library's table for GPUs of ranks that each said theirs; or the model, if they differ or
    /// no table was measured on such.
    ///
    /// # Errors
    /// Internal if a table of the library is none.
    pub fn of_library(said: &[Site]) -> Result<Tuning> {
        Tuning::among(&embedded::tables()?, said)
    }

    fn among(tables: &[Arc<Table>], said: &[Site]) -> Result<Tuning> {
        let first = said
            .first()
            .ok_or_else(|| Error::internal("a communicator without ranks"))?;
        if let Some(other) = said.iter().find(|site| *site != first) {
            return Ok(Tuning::Model(format!(
                "GPUs or links differ ({} over {}, {} over {})",
                first.gpu, first.links, other.gpu, other.links
            )));
        }
        let fits = |table: &&Arc<Table>| table.fits(first);
        Ok(match tables.iter().find(fits) {
            Some(table) => Tuning::Table(table.clone()),
            None => Tuning::Model(format!(
                "no table for {} x {} over {}",
                first.gpu, first.ranks, first.links
            )),
        })
    }

    /// `table`, which was asked for, for GPUs of ranks that each said theirs; the model, if it was
    /// measured on others: one setting holds for communicators of all sizes.
    pub fn of_file(table: Arc<Table>, said: &[Site]) -> Tuning {
        let Some(rank) = said.iter().position(|site| !table.fits(site)) else {
            return Tuning::Table(table);
        };
        let (header, site) = (&table.header, &said[rank]);
        Tuning::Model(format!(
            "CINCH_TUNING={} is for {} x {} over {}, but rank {rank} has {} x {} over {}",
            table.name, header.gpu, header.ranks, header.links, site.gpu, site.ranks, site.links
        ))
    }

    /// The way of a request whose larger buffer has `bytes`.
    pub(super) fn choice(&self, request: &Request, bytes: usize) -> Option<Choice> {
        match self {
            Tuning::Model(_) => None,
            Tuning::Always(way) => Some(Choice {
                way: *way,
                line: None,
            }),
            Tuning::Table(table) => table.choice(request.collective, WireClass::of(request), bytes),
        }
    }
}

impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tuning::Table(table) => write!(f, "tuning table {}", table.name),
            Tuning::Model(why) => write!(f, "the cost model: {why}"),
            Tuning::Always(way) => write!(f, "one way: {way}"),
        }
    }
}

impl Table {
    fn fits(&self, site: &Site) -> bool {
        let header = &self.header;
        (&header.gpu, header.ranks, &header.links) == (&site.gpu, site.ranks, &site.links)
    }
}

#[cfg(test)]
mod tests;
