//! Reads and prints measured limits as text: a line for each limit, and comments from `#` on. Bandwidths are in MB/s:
//!
//! | line | meaning |
//! | --- | --- |
//! | `link A B 53700` | each direction between the neighbours A and B carries 53.7 GB/s |
//! | `link A>B 53700` | the direction from A to B carries 53.7 GB/s |
//! | `connect A B 107000` | the switches A and B have a link of 107 GB/s each way beside the tree |
//! | `pool 82000 A>B B>A` | these links carry 82 GB/s together |
//! | `fan A 2 2 2700` | the way out of switch A carries 2.7 GB/s while at least 2 GPUs send through it to at least 2 root ports |
//!
//! A and B are PCI addresses, names of network devices, or names of other nodes with `_` for spaces, such as
//! `socket_0`.

use super::{MeasuredLimit, MeasuredLimits};
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Largest number of bytes of a text.
const MAX_BYTES: usize = 1 << 20;

/// Largest number of limits, and of links in one pool.
const MAX_LIMITS: usize = 4_096;

/// Largest bandwidth in MB/s.
const MAX_MB_S: u32 = 100_000_000;

impl FromStr for MeasuredLimits {
    type Err = Error;

    /// Reads the text form.
    ///
    /// # Errors
    /// Invalid argument, with the line, for a word that is unknown, a number outside its range, a missing or
    /// surplus field, more than 1 MiB, 4,096 limits, or 4,096 links in a pool.
    fn from_str(text: &str) -> Result<MeasuredLimits> {
        if text.len() > MAX_BYTES {
            return Err(Error::invalid_argument(format!(
                "measured limits have at most {MAX_BYTES} bytes; this text has {}",
                text.len()
            )));
        }
        let mut lines = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let content = line.split_once('#').map_or(line, |(content, _)| content);
            let fields: Vec<&str> = content.split_ascii_whitespace().collect();
            if fields.is_empty() {
                continue;
            }
            let refuse = |why| Error::invalid_argument(format!("line {}: {why}", number + 1));
            if lines.len() == MAX_LIMITS {
                return Err(refuse(format!("more than {MAX_LIMITS} limits")));
            }
            lines.push((number + 1, parse(&fields).map_err(refuse)?));
        }
        Ok(MeasuredLimits { lines })
    }
}

fn parse(fields: &[&str]) -> Result<MeasuredLimit, String> {
    match *fields {
        ["link", direction, mb_s] => {
            Ok(MeasuredLimit::Direction(ends(direction)?, bandwidth(mb_s)?))
        }
        ["link", a, b, mb_s] => Ok(MeasuredLimit::Link([name(a)?, name(b)?], bandwidth(mb_s)?)),
        ["connect", a, b, mb_s] => Ok(MeasuredLimit::Connect(
            [name(a)?, name(b)?],
            bandwidth(mb_s)?,
        )),
        ["pool", mb_s, ref directions @ ..]
            if !directions.is_empty() && directions.len() <= MAX_LIMITS =>
        {
            let links: Result<Vec<_>, String> = directions.iter().map(|text| ends(text)).collect();
            Ok(MeasuredLimit::Pool(links?, bandwidth(mb_s)?))
        }
        ["fan", switch, sources, ports, mb_s] => Ok(MeasuredLimit::Fan {
            switch: name(switch)?,
            sources: number(sources, MAX_LIMITS as u32)?,
            ports: number(ports, MAX_LIMITS as u32)?,
            mb_s: bandwidth(mb_s)?,
        }),
        _ => Err(format!(
            "`{}` is none of: link A B MB/S, link A>B MB/S, connect A B MB/S, pool MB/S A>B ..., fan SWITCH SOURCES PORTS MB/S",
            fields.join(" ").chars().take(80).collect::<String>()
        )),
    }
}

fn name(text: &str) -> Result<String, String> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b":._-".contains(&byte);
    if text.len() <= 64 && text.bytes().all(is_name) {
        return Ok(text.into());
    }
    let shown: String = text.chars().take(80).collect();
    Err(format!(
        "`{shown}` is no name of a node: at most 64 letters, digits, or any of : . _ -"
    ))
}

fn ends(text: &str) -> Result<[String; 2], String> {
    match text.split_once('>') {
        Some((from, to)) if !from.is_empty() && !to.is_empty() => Ok([name(from)?, name(to)?]),
        _ => {
            let shown: String = text.chars().take(80).collect();
            Err(format!("`{shown}` is no direction of the form A>B"))
        }
    }
}

fn bandwidth(text: &str) -> Result<u32, String> {
    number(text, MAX_MB_S)
}

/// Reads a number from 1 to `most`.
fn number(text: &str, most: u32) -> Result<u32, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.then(|| text.parse::<u32>().ok()).flatten();
    number
        .filter(|number| (1..=most).contains(number))
        .ok_or_else(|| {
            let shown: String = text.chars().take(80).collect();
            format!("`{shown}` is no number from 1 to {most}")
        })
}

impl fmt::Display for MeasuredLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.limits().try_for_each(|limit| writeln!(f, "{limit}"))
    }
}

impl fmt::Display for MeasuredLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MeasuredLimit::Direction([a, b], mb_s) => write!(f, "link {a}>{b} {mb_s}"),
            MeasuredLimit::Link([a, b], mb_s) => write!(f, "link {a} {b} {mb_s}"),
            MeasuredLimit::Connect([a, b], mb_s) => write!(f, "connect {a} {b} {mb_s}"),
            MeasuredLimit::Pool(directions, mb_s) => {
                write!(f, "pool {mb_s}")?;
                directions
                    .iter()
                    .try_for_each(|[a, b]| write!(f, " {a}>{b}"))
            }
            MeasuredLimit::Fan {
                switch,
                sources,
                ports,
                mb_s,
            } => write!(f, "fan {switch} {sources} {ports} {mb_s}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_and_printed() {
        let text = "link 0000:10:00.0 0000:80:00.0 53700\nlink socket_0>socket_1 40000\n\
                    connect 0000:80:00.0 0000:82:00.0 107000\n\
                    pool 82000 socket_0>socket_1 socket_1>socket_0\nfan 0000:80:00.0 2 2 2700\n";
        let limits: MeasuredLimits = format!("# measured\n\n{text}").parse().unwrap();
        assert_eq!(limits.to_string(), text);
        assert_eq!(limits.limits().count(), 5);
    }

    #[test]
    fn bad_lines_are_refused_with_their_number() {
        let many = "link a b 1\n".repeat(MAX_LIMITS + 1);
        let cases = [
            ("link a b 0", "line 1: `0` is no number from 1"),
            ("\nlink a b 100000001", "line 2: `100000001` is no number"),
            ("link a b +5", "line 1: `+5`"),
            ("link a b 99999999999999999999", "line 1: `9999"),
            ("link a 5", "`a` is no direction"),
            ("link a> 5", "`a>` is no direction"),
            ("link a/b c 5", "`a/b` is no name"),
            ("link a b 5 6", "line 1: `link a b 5 6` is none of"),
            ("pool 5", "line 1: `pool 5` is none of"),
            ("fan a 0 2 5", "`0` is no number"),
            ("speed a b 5", "line 1: `speed a b 5` is none of"),
            (many.as_str(), "line 4097: more than 4096 limits"),
        ];
        for (text, what) in cases {
            let error = text.parse::<MeasuredLimits>().unwrap_err();
            assert!(error.message().contains(what), "{error}");
        }
        let long = " ".repeat(MAX_BYTES + 1);
        assert!(long.parse::<MeasuredLimits>().is_err());
    }
}
