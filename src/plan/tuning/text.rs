//! Reads and writes tuning tables as text.

use super::{KernelVariant, ModelSizes, TableEntry, TableHeader, TuningTable, WireClass};
use crate::config::MOST_GPU_CHANNELS;
use crate::error::{Error, Result};
use crate::types::{Algorithm, CodecKind, Collective, DType, Kernel, KernelProtocol, Protocol};
use std::fmt::Write;

/// First line of every table, with the version of the text format.
const FIRST: &str = "cinch tuning 2";

impl TuningTable {
    /// Reads a table:
    ///
    /// ```text
    /// cinch tuning 2
    /// gpu NVIDIA H200
    /// ranks 4
    /// links NVLink
    /// date 2026-11-22
    /// cinch 0.1.0
    /// command cinch tune --device gpu -o h200x4.tune
    /// # collective codec/element-bytes from to algorithm kernel protocol blocks chunk us us
    /// all_reduce raw/4 8 65536 oneshot fused ll 32 0 3.116 4.871
    /// ```
    ///
    /// A line is for sizes from `from` up to below `to`, in bytes of the larger buffer. Its two times, in
    /// microseconds, are for these two sizes. Lines of one collective and codec follow each other without a
    /// gap. A line `all_reduce raw/4 model 65536` after the last leaves larger sizes to the model. A line
    /// `all_reduce raw/4 model below 8` before the first leaves smaller sizes to the model. Both are for
    /// kernels that changed since the measurement. Lines that begin with `#` are remarks.
    ///
    /// # Errors
    /// Invalid argument, with name and line, if the text is not a table.
    pub fn parse(name: &str, text: &str) -> Result<TuningTable> {
        let mut parser = Parser::default();
        let mut last = 1;
        // An empty text has no line, so an empty line is read, which fails as a wrong first line.
        let lines = text.lines().chain(text.is_empty().then_some(""));
        let parsed = lines.zip(1..).try_for_each(|(line, number)| {
            last = number;
            parser.line(number, line.trim())
        });
        parsed
            .and_then(|()| parser.end(last))
            .map_err(|(line, why)| {
                Error::invalid_argument(format!("tuning table {name}, line {line}: {why}"))
            })?;
        let entries = (parser.entries, parser.left);
        Ok(TuningTable::new(name, parser.header, entries, text))
    }
}

/// A line number, and what is wrong in that line.
type Wrong = (usize, String);

/// A partly read table.
#[derive(Default)]
struct Parser {
    header: TableHeader,
    entries: Vec<(usize, TableEntry)>,
    left: Vec<ModelSizes>,
    /// A `model below` line, with its number, until the entry after it was read.
    below: Option<(usize, ModelSizes)>,
}

impl Parser {
    /// Parses line `number`, whose text is already trimmed.
    fn line(&mut self, number: usize, line: &str) -> std::result::Result<(), Wrong> {
        let here = |why| (number, why);
        if number == 1 {
            return match line == FIRST {
                true => Ok(()),
                false => Err(here(format!("a table begins with \"{FIRST}\""))),
            };
        }
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        if let Some((key, value)) = line.split_once(' ')
            && self.header.set(key, value.trim()).map_err(here)?
        {
            return Ok(());
        }
        match left(line).map_err(here)? {
            Some(left) => self.model(number, left),
            None => self.entry(number, entry(line).map_err(here)?),
        }
    }

    /// Adds a line that leaves sizes to the cost model: sizes below the next entry, or sizes from the end of
    /// the last entry on.
    fn model(&mut self, number: usize, left: ModelSizes) -> std::result::Result<(), Wrong> {
        if left.sizes.start == 0 {
            return match self.below.replace((number, left)) {
                Some((at, before)) => Err((at, not_below(&before))),
                None => Ok(()),
            };
        }
        let ends_there = |(_, last): &(usize, TableEntry)| {
            (last.collective, last.wire, last.to) == (left.collective, left.wire, left.sizes.start)
        };
        if self.below.is_some() || !self.entries.last().is_some_and(ends_there) {
            let why = format!(
                "the line before is none of {} {} up to {}",
                left.collective, left.wire, left.sizes.start
            );
            return Err((number, why));
        }
        self.left.push(left);
        Ok(())
    }

    /// Adds an entry, which must begin where the last entry ends, or begin another collective or
    /// codec.
    fn entry(&mut self, number: usize, entry: TableEntry) -> std::result::Result<(), Wrong> {
        let key = (entry.collective, entry.wire);
        if let Some((at, left)) = self.below.take() {
            if (left.collective, left.wire) != key || left.sizes.end != entry.from {
                return Err((at, not_below(&left)));
            }
            self.left.push(left);
        }
        let is_ended = |left: &&ModelSizes| {
            (left.collective, left.wire) == key && left.sizes.end == usize::MAX
        };
        if let Some(left) = self.left.iter().find(is_ended) {
            let why = format!(
                "{} {} from {} on is left to the model",
                left.collective, left.wire, left.sizes.start
            );
            return Err((number, why));
        }
        let is_same = |(_, other): &&(usize, TableEntry)| (other.collective, other.wire) == key;
        match self.entries.last() {
            Some(before) if is_same(&before) => {
                let (at, to) = (before.0, before.1.to);
                if to != entry.from {
                    let from = entry.from;
                    let why = format!("it begins at {from} bytes, but line {at} ends at {to}");
                    return Err((number, why));
                }
            }
            _ => {
                if let Some((at, _)) = self.entries.iter().find(is_same) {
                    let why =
                        format!("lines of one collective and codec, as line {at}, are together");
                    return Err((number, why));
                }
            }
        }
        self.entries.push((number, entry));
        Ok(())
    }

    /// Checks, after the last line, that the table is complete. `last` is the number of that line.
    fn end(&mut self, last: usize) -> std::result::Result<(), Wrong> {
        if let Some((at, left)) = &self.below {
            return Err((*at, not_below(left)));
        }
        if let Some(key) = self.header.missing() {
            return Err((last, format!("there is no line \"{key} ...\"")));
        }
        match self.entries.is_empty() {
            true => Err((last, "it has no choices".into())),
            false => Ok(()),
        }
    }
}

impl TableHeader {
    /// Sets a field of the header from a line. Returns whether the line belongs to the header.
    fn set(&mut self, key: &str, value: &str) -> std::result::Result<bool, String> {
        let text = match key {
            "ranks" => {
                let ranks = value.parse().ok().filter(|&ranks: &usize| ranks >= 2);
                if self.ranks != 0 {
                    return Err("\"ranks\" is there twice".into());
                }
                self.ranks =
                    ranks.ok_or_else(|| format!("{value} is no number of ranks from 2"))?;
                return Ok(true);
            }
            "gpu" => &mut self.gpu,
            "links" => &mut self.links,
            "date" => &mut self.date,
            "cinch" => &mut self.cinch,
            "command" => &mut self.command,
            _ => return Ok(false),
        };
        if !text.is_empty() {
            return Err(format!("\"{key}\" is there twice"));
        }
        *text = value.into();
        Ok(true)
    }

    fn missing(&self) -> Option<&'static str> {
        let texts = [
            ("gpu", &self.gpu),
            ("links", &self.links),
            ("date", &self.date),
            ("cinch", &self.cinch),
            ("command", &self.command),
        ];
        let missing = texts.into_iter().find(|(_, text)| text.is_empty());
        match self.ranks {
            0 => Some("ranks"),
            _ => missing.map(|(key, _)| key),
        }
    }

    /// Returns the text of a table with these entries.
    pub fn write(&self, entries: &[TableEntry]) -> String {
        let TableHeader {
            gpu,
            ranks,
            links,
            date,
            cinch,
            command,
        } = self;
        let mut text = format!(
            "{FIRST}\ngpu {gpu}\nranks {ranks}\nlinks {links}\ndate {date}\ncinch {cinch}\ncommand {command}\n\
             # collective codec/element-bytes from to algorithm kernel protocol blocks chunk us us\n"
        );
        for entry in entries {
            let [first, last] = entry.seconds.map(|seconds| seconds * 1e6);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{} {} {} {} {} {first:.3} {last:.3}",
                entry.collective, entry.wire, entry.from, entry.to, entry.variant
            );
        }
        text
    }
}

/// Parses a `model` line and returns the sizes that it leaves to the cost model; `None` if it is
/// another line.
fn left(line: &str) -> std::result::Result<Option<ModelSizes>, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (collective, wire, sizes) = match words[..] {
        [collective, wire, "model", from] => (collective, wire, number(from)?..usize::MAX),
        [collective, wire, "model", "below", to] => (collective, wire, 0..number(to)?),
        _ => return Ok(None),
    };
    Ok(Some(ModelSizes {
        collective: Collective::from_name(collective)
            .ok_or_else(|| unknown("collective", collective))?,
        wire: wire_class(wire)?,
        sizes,
    }))
}

fn not_below(left: &ModelSizes) -> String {
    format!(
        "the line behind it is none of {} {} from {} on",
        left.collective, left.wire, left.sizes.end
    )
}

fn number(text: &str) -> std::result::Result<usize, String> {
    text.parse()
        .map_err(|_| format!("{text} is no number of bytes or blocks"))
}

fn unknown(what: &str, text: &str) -> String {
    format!("no {what} is called {text}")
}

fn entry(line: &str) -> std::result::Result<TableEntry, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [
        collective,
        wire,
        from,
        to,
        algorithm,
        kernel,
        protocol,
        channels,
        chunk,
        first,
        last,
    ] = words[..]
    else {
        return Err(format!("{} words, where a choice has 11", words.len()));
    };
    let time = |text: &str| match text.parse::<f64>() {
        Ok(us) if us > 0.0 && us.is_finite() => Ok(us * 1e-6),
        _ => Err(format!("{text} is no time in microseconds")),
    };
    let (from, to, channels) = (number(from)?, number(to)?, number(channels)?);
    if from >= to {
        return Err(format!("sizes from {from} to {to} are none"));
    }
    if !(1..=MOST_GPU_CHANNELS).contains(&channels) {
        return Err(format!(
            "{channels} blocks; there are 1 to {MOST_GPU_CHANNELS}"
        ));
    }
    let collective =
        Collective::from_name(collective).ok_or_else(|| unknown("collective", collective))?;
    let algorithm =
        Algorithm::from_name(algorithm).ok_or_else(|| unknown("algorithm", algorithm))?;
    if !crate::schedule::algorithms(collective).contains(&algorithm) {
        return Err(format!("{collective} has no {algorithm}"));
    }
    Ok(TableEntry {
        collective,
        wire: wire_class(wire)?,
        from,
        to,
        variant: KernelVariant {
            algorithm,
            kernel: kernel_protocol(kernel, protocol)?,
            channels,
            chunk: number(chunk)?,
        },
        seconds: [time(first)?, time(last)?],
    })
}

/// Parses the names of a kernel and its protocol.
fn kernel_protocol(kernel: &str, protocol: &str) -> std::result::Result<KernelProtocol, String> {
    let pair = KernelProtocol {
        kernel: Kernel::from_name(kernel).ok_or_else(|| unknown("kernel", kernel))?,
        protocol: Protocol::from_name(protocol).ok_or_else(|| unknown("protocol", protocol))?,
    };
    match KernelProtocol::ALL.contains(&pair) {
        true => Ok(pair),
        false => Err(format!("no {kernel} kernel sends by {protocol}")),
    }
}

fn wire_class(text: &str) -> std::result::Result<WireClass, String> {
    let wrong = || format!("{text} is no codec and bytes of an element, as raw/4 is");
    let (codec, bytes) = text.split_once('/').ok_or_else(wrong)?;
    let mut kinds = CodecKind::ALL.into_iter();
    let known = |bytes: &usize| DType::ALL.iter().any(|dtype| dtype.size() == *bytes);
    Ok(WireClass {
        codec: kinds.find(|kind| kind.name() == codec).ok_or_else(wrong)?,
        element_bytes: bytes.parse().ok().filter(known).ok_or_else(wrong)?,
    })
}
