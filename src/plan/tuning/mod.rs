//! Defines tuning tables: by message size, the kernel variant that was measured to be the fastest. A table is
//! for one GPU model, one number of ranks and one class of links. `cinch tune` writes tables; where no table
//! fits, the cost model selects.
//!
//! [`TuningTable::parse`] describes the text. Tables in `src/plan/tuned` are embedded in the library through
//! the list in `embedded.rs`.

mod embedded;
mod text;

use super::Request;
use crate::error::{Error, Result};

use crate::types::{Algorithm, CodecKind, Collective, KernelProtocol, short_digest};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// The kernel, and the limits on blocks and chunk size, that run a call: all that the planner selects. The
/// rings per channel follow from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelVariant {
    /// Algorithm that the kernel executes.
    pub algorithm: Algorithm,
    /// Kind of kernel, and the protocol of its messages.
    pub kernel: KernelProtocol,
    /// Largest number of thread blocks.
    pub channels: usize,
    /// Largest number of bytes of a chunk's elements; 0 for as many as fit a slot.
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

/// The codec and element size for which a line of a table was measured. Codec parameters and the
/// element type change only a few instructions per element, so a line serves all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WireClass {
    /// Codec of the messages; [`CodecKind::Raw`] if they are not encoded.
    pub codec: CodecKind,
    /// Size of an element in bytes.
    pub element_bytes: usize,
}

impl WireClass {
    /// Returns the codec and element size of a request.
    pub fn of(request: &Request) -> WireClass {
        WireClass {
            codec: request.codec.inter.kind,
            element_bytes: request.dtype.size(),
        }
    }
}

/// Prints the codec and the element size in bytes: `raw/4`.
impl fmt::Display for WireClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.codec.name(), self.element_bytes)
    }
}

/// A line of a table: the kernel variant for calls whose size lies in a range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TableEntry {
    /// Collective for which the line was measured.
    pub collective: Collective,
    /// Codec and element size for which the line was measured.
    pub wire: WireClass,
    /// Smallest size for which the line applies, in bytes of the larger buffer.
    pub from: usize,
    /// End of the range of sizes, exclusive, in bytes of the larger buffer.
    pub to: usize,
    /// The kernel variant for calls in this range.
    pub variant: KernelVariant,
    /// Seconds that a call takes at size `from` and at size `to`, measured or interpolated between
    /// measurements.
    pub seconds: [f64; 2],
}

impl TableEntry {
    /// Returns the seconds at `size`, interpolated linearly between the logarithms of size and
    /// time. Smaller sizes take as long as `from`. Beyond `to` the time grows with the bytes. With
    /// a constant time, a larger call would seem cheaper than the model predicts for another codec.
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

/// Sizes for which the cost model selects, although the table has lines for larger or smaller
/// sizes.
#[derive(Clone, Debug, PartialEq)]
struct ModelSizes {
    collective: Collective,
    wire: WireClass,
    /// Range of sizes, in bytes of the larger buffer.
    sizes: Range<usize>,
}

/// The GPUs on which a table was measured, and the command that measured it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableHeader {
    /// GPU model, as the driver names it.
    pub gpu: String,
    /// Number of ranks, each on its own GPU.
    pub ranks: usize,
    /// Classes of links between the GPUs: see [`links`].
    pub links: String,
    /// Date of the measurements.
    pub date: String,
    /// Version of cinch that was measured.
    pub cinch: String,
    /// The command that measured the table.
    pub command: String,
}

/// Measured variants for one GPU model, number of ranks and class of links.
#[derive(Clone, Debug, PartialEq)]
pub struct TuningTable {
    /// File name of the table, or its name among the embedded tables.
    pub name: String,
    /// The GPUs on which the table was measured, and the command.
    pub header: TableHeader,
    /// Lines of the table, each with its number in the file.
    entries: Vec<(usize, TableEntry)>,
    /// Sizes for which the cost model selects.
    left: Vec<ModelSizes>,
    /// First eight bytes of the SHA-256 of the text, in hexadecimal.
    fingerprint: String,
}

/// A table applies to messages up to this many times smaller or larger than its measured sizes.
const BEYOND: usize = 16;

/// The kernel variant for a call, and the line of the table that it comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Kernel variant that the planner uses for the call.
    pub variant: KernelVariant,
    /// Line of the table that selected the variant; `None` while `cinch tune` measures the variant.
    pub line: Option<AppliedEntry>,
}

/// A line of a table, applied to one call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AppliedEntry {
    /// Line number in the file, from 1.
    pub number: usize,
    /// Measured seconds. Beyond the last measured size they grow with the bytes.
    pub seconds: f64,
}

impl TuningTable {
    /// Returns the variant for calls of `collective` whose larger buffer has `bytes`. A size up to
    /// `BEYOND` times smaller or larger than all measured sizes takes the nearest line. Sizes
    /// further out, and sizes left to the cost model, get `None`. Raw calls of an element size that
    /// was not measured take the lines of another element size. Their time is mostly transfer and
    /// latency, which depend on bytes only.
    pub fn choice(&self, collective: Collective, wire: WireClass, bytes: usize) -> Option<Choice> {
        let of = |wire: WireClass| {
            let lines = self.entries.iter();
            lines.filter(move |(_, entry)| entry.collective == collective && entry.wire == wire)
        };
        let is_raw = wire.codec.is_raw();
        let sizes = [wire.element_bytes, 4, 2, 1, 8];
        let known = sizes[..if is_raw { sizes.len() } else { 1 }]
            .iter()
            .map(|&element_bytes| WireClass {
                element_bytes,
                ..wire
            })
            .find(|&wire| of(wire).next().is_some())?;
        let is_left = |left: &ModelSizes| {
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
        let near = |entry: &&TableEntry| {
            let (low, high) = (entry.from / BEYOND, entry.to.saturating_mul(BEYOND));
            (low..=high).contains(&bytes)
        };
        let nearest = nearest.filter(|(_, entry)| near(entry));
        nearest.map(|(number, entry)| Choice {
            variant: entry.variant,
            line: Some(AppliedEntry {
                number,
                seconds: entry.at(bytes),
            }),
        })
    }

    /// Iterates over the lines in the order of the file.
    pub fn entries(&self) -> impl Iterator<Item = &TableEntry> {
        self.entries.iter().map(|(_, entry)| entry)
    }

    /// Returns a hash of the table's text, which must be equal on all ranks.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Returns a sentence for each size at which a larger message takes over 5 % less time than a
    /// smaller message.
    pub fn cliffs(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut slowest: Option<(&TableEntry, f64, usize)> = None;
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
        header: TableHeader,
        (entries, left): (Vec<(usize, TableEntry)>, Vec<ModelSizes>),
        text: &str,
    ) -> TuningTable {
        TuningTable {
            name: name.into(),
            header,
            entries,
            left,
            fingerprint: short_digest(text),
        }
    }
}

/// The GPU model, number of ranks and links of a communicator, as one rank reports them. A table
/// applies only if all ranks report equal ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// GPU model of the rank, as the driver names it.
    pub gpu: String,
    /// Number of ranks of the communicator.
    pub ranks: usize,
    /// Classes of links between the GPUs: see [`links`].
    pub links: String,
}

/// Joins the classes of links between one rank and all others, as tables name them.
pub fn links<'a>(classes: impl Iterator<Item = &'a str>) -> String {
    let mut names: Vec<&str> = classes.collect();
    names.sort_unstable();
    names.dedup();
    names.join(" + ")
}

/// Selects kernel variants, with precedence over the cost model.
#[derive(Clone, Debug, PartialEq)]
pub enum Tuning {
    /// This table selects the kernel variant of calls that it covers.
    Table(Arc<TuningTable>),
    /// No table applies, for this reason (a phrase); the cost model selects.
    Model(String),
    /// Every call that supports the variant uses it; for `cinch tune`, which measures variants.
    Always(KernelVariant),
}

impl Tuning {
    /// Selects the embedded table for the GPUs that the ranks reported. Selects the cost model if
    /// the reports differ or no table fits.
    ///
    /// # Errors
    /// Internal if an embedded table cannot be parsed.
    pub fn of_library(said: &[Site]) -> Result<Tuning> {
        Tuning::among(&embedded::tables()?, said)
    }

    fn among(tables: &[Arc<TuningTable>], said: &[Site]) -> Result<Tuning> {
        let first = said
            .first()
            .ok_or_else(|| Error::internal("a communicator without ranks"))?;
        if let Some(other) = said.iter().find(|site| *site != first) {
            return Ok(Tuning::Model(format!(
                "GPUs or links differ ({} over {}, {} over {})",
                first.gpu, first.links, other.gpu, other.links
            )));
        }
        let fits = |table: &&Arc<TuningTable>| table.fits(first);
        Ok(match tables.iter().find(fits) {
            Some(table) => Tuning::Table(table.clone()),
            None => Tuning::Model(format!(
                "no table for {} x {} over {}",
                first.gpu, first.ranks, first.links
            )),
        })
    }

    /// Selects `table`, which the settings name, if it fits the GPUs that the ranks reported;
    /// otherwise the cost model. So one setting can serve communicators of all sizes.
    pub fn of_file(table: Arc<TuningTable>, said: &[Site]) -> Tuning {
        let Some(rank) = said.iter().position(|site| !table.fits(site)) else {
            return Tuning::Table(table);
        };
        let (header, site) = (&table.header, &said[rank]);
        Tuning::Model(format!(
            "CINCH_TUNING={} is for {} x {} over {}, but rank {rank} has {} x {} over {}",
            table.name, header.gpu, header.ranks, header.links, site.gpu, site.ranks, site.links
        ))
    }

    /// Returns the variant for a request whose larger buffer has `bytes`; `None` if the cost model
    /// selects.
    pub(super) fn choice(&self, request: &Request, bytes: usize) -> Option<Choice> {
        match self {
            Tuning::Model(_) => None,
            Tuning::Always(variant) => Some(Choice {
                variant: *variant,
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
            Tuning::Always(variant) => write!(f, "one way: {variant}"),
        }
    }
}

impl TuningTable {
    fn fits(&self, site: &Site) -> bool {
        let header = &self.header;
        (&header.gpu, header.ranks, &header.links) == (&site.gpu, site.ranks, &site.links)
    }
}

#[cfg(test)]
mod tests;
