//! Tables as text.

use super::{Entry, Header, KernelVariant, Left, Table, WireClass};
use crate::config::MOST_GPU_CHANNELS;
use crate::error::{Error, Result};
use crate::types::{Algorithm, CodecKind, Collective, DType, Protocol};
use std::fmt::Write;

/// First line of every table: what it is, and the version of its format.
const FIRST: &str = "cinch tuning 1";

impl Table {
    /// Reads a table:
    ///
    /// ```text
    /// cinch tuning 1
    /// gpu NVIDIA H200
    /// ranks 4
    /// links NVLink
    /// date 2026-11-22
    /// cinch 0.1.0
    /// command cinch tune --device gpu -o h200x4.tune
    /// # collective codec/element-bytes from to algorithm protocol blocks chunk us us
    /// all_reduce raw/4 8 65536 oneshot fused 32 0 3.116 4.871
    /// ```
    ///
    /// A line is for sizes from `from` up to below `to`, in bytes of the larger buffer; the two
    /// times are those at its ends. Lines of one collective and codec follow each other without a
    /// gap. Behind the last, `all_reduce raw/4 model 65536` leaves larger sizes to the model, and before
    /// the first, `all_reduce raw/4 model below 8` smaller ones: where kernels have changed since. Lines
    /// that begin with `#` say nothing.
    ///
    /// # Errors
    /// Invalid argument, with name and line, if it is no table.
    pub fn parse(name: &str, text: &str) -> Result<Table> {
        let wrong = |line: usize, why: String| {
            Error::invalid_argument(format!("tuning table {name}, line {line}: {why}"))
        };
        let mut header = Header::default();
        let mut entries: Vec<(usize, Entry)> = Vec::new();
        let mut all_left: Vec<Left> = Vec::new();
        // Of sizes below a line that is still to come: where that was said.
        let mut below: Option<(usize, Left)> = None;
        let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
        match lines.next() {
            Some((_, line)) if line.trim_end() == FIRST => {}
            _ => return Err(wrong(1, format!("a table begins with \"{FIRST}\""))),
        }
        let mut last = 1;
        for (number, line) in lines {
            last = number;
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some((key, value)) = line.split_once(' ')
                && header
                    .set(key, value.trim())
                    .map_err(|why| wrong(number, why))?
            {
                continue;
            }
            if let Some(left) = left(line).map_err(|why| wrong(number, why))? {
                if left.sizes.start == 0 {
                    if let Some((at, left)) = below.replace((number, left)) {
                        return Err(wrong(at, not_below(&left)));
                    }
                    continue;
                }
                let ends_there = |(_, last): &(usize, Entry)| {
                    (last.collective, last.wire, last.to)
                        == (left.collective, left.wire, left.sizes.start)
                };
                if below.is_some() || !entries.last().is_some_and(ends_there) {
                    let why = format!(
                        "the line before is none of {} {} up to {}",
                        left.collective, left.wire, left.sizes.start
                    );
                    return Err(wrong(number, why));
                }
                all_left.push(left);
                continue;
            }
            let entry = entry(line).map_err(|why| wrong(number, why))?;
            if let Some((at, left)) = below.take() {
                if (left.collective, left.wire, left.sizes.end)
                    != (entry.collective, entry.wire, entry.from)
                {
                    return Err(wrong(at, not_below(&left)));
                }
                all_left.push(left);
            }
            let ended = |left: &Left| {
                (left.collective, left.wire, left.sizes.end)
                    == (entry.collective, entry.wire, usize::MAX)
            };
            if let Some(left) = all_left.iter().find(|left| ended(left)) {
                let why = format!(
                    "{} {} from {} on is left to the model",
                    left.collective, left.wire, left.sizes.start
                );
                return Err(wrong(number, why));
            }
            let same = |(_, other): &&(usize, Entry)| {
                (other.collective, other.wire) == (entry.collective, entry.wire)
            };
            match entries.last() {
                Some(before) if same(&before) && before.1.to != entry.from => {
                    let (at, to) = (before.0, before.1.to);
                    let why = format!(
                        "it begins at {} bytes, but line {at} ends at {to}",
                        entry.from
                    );
                    return Err(wrong(number, why));
                }
                Some(before) if !same(&before) => {
                    if let Some((at, _)) = entries.iter().find(same) {
                        let why = format!(
                            "lines of one collective and codec, as line {at}, are together"
                        );
                        return Err(wrong(number, why));
                    }
                }
                _ => {}
            }
            entries.push((number, entry));
        }
        if let Some((at, left)) = below {
            return Err(wrong(at, not_below(&left)));
        }
        if let Some(key) = header.missing() {
            return Err(wrong(last, format!("there is no line \"{key} ...\"")));
        }
        if entries.is_empty() {
            return Err(wrong(last, "it has no choices".into()));
        }
        Ok(Table::new(name, header, (entries, all_left), text))
    }
}

impl Header {
    /// Takes one line; whether it was one of the header.
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

    /// A table of these choices.
    pub fn write(&self, entries: &[Entry]) -> String {
        let Header {
            gpu,
            ranks,
            links,
            date,
            cinch,
            command,
        } = self;
        let mut text = format!(
            "{FIRST}\ngpu {gpu}\nranks {ranks}\nlinks {links}\ndate {date}\ncinch {cinch}\ncommand {command}\n\
             # collective codec/element-bytes from to algorithm protocol blocks chunk us us\n"
        );
        for entry in entries {
            let [first, last] = entry.seconds.map(|seconds| seconds * 1e6);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{} {} {} {} {} {first:.3} {last:.3}",
                entry.collective, entry.wire, entry.from, entry.to, entry.way
            );
        }
        text
    }
}

/// What a line leaves to the model, if it is such a line.
fn left(line: &str) -> std::result::Result<Option<Left>, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (collective, wire, sizes) = match words[..] {
        [collective, wire, "model", from] => (collective, wire, number(from)?..usize::MAX),
        [collective, wire, "model", "below", to] => (collective, wire, 0..number(to)?),
        _ => return Ok(None),
    };
    Ok(Some(Left {
        collective: Collective::from_name(collective)
            .ok_or_else(|| unknown("collective", collective))?,
        wire: wire_class(wire)?,
        sizes,
    }))
}

fn not_below(left: &Left) -> String {
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

fn entry(line: &str) -> std::result::Result<Entry, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [
        collective,
        wire,
        from,
        to,
        algorithm,
        protocol,
        channels,
        chunk,
        first,
        last,
    ] = words[..]
    else {
        return Err(format!("{} words, where a choice has 10", words.len()));
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
    Ok(Entry {
        collective,
        wire: wire_class(wire)?,
        from,
        to,
        way: KernelVariant {
            algorithm,
            protocol: Protocol::from_name(protocol).ok_or_else(|| unknown("protocol", protocol))?,
            channels,
            chunk: number(chunk)?,
        },
        seconds: [time(first)?, time(last)?],
    })
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
