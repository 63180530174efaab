//! Limits of a file's size and shape. They are checked before the file is parsed, because the parser recurses once
//! per level of elements.

use crate::error::{Error, Result};

/// Largest size of a file in bytes.
pub const MAX_BYTES: usize = 8 << 20;

/// Largest number of elements in a file.
const MAX_ELEMENTS: usize = 4096;

/// Largest depth of elements in a file.
const MAX_DEPTH: usize = 64;

/// Checks the limits without a parse. Text that is no XML may pass; the parser refuses it.
///
/// # Errors
/// Invalid argument if the text exceeds a limit. The sentence has the line.
pub(super) fn check(text: &str) -> Result<()> {
    check_size(text.as_bytes())?;
    let (mut depth, mut elements) = (0usize, 0usize);
    let mut at = 0;
    while let Some(found) = text[at..].find('<') {
        let begin = at + found;
        let rest = &text[begin..];
        let markup = Markup::of(rest);
        at = begin + markup.length(rest);
        let refuse = |what: &str| {
            let line = line(text.as_bytes(), begin);
            Err(Error::invalid_argument(format!("line {line}: {what}")))
        };
        match markup {
            Markup::Other(_) if rest.starts_with("<!DOCTYPE") => {
                return refuse(
                    "document types (<!DOCTYPE) are refused in a topology file; remove this one",
                );
            }
            Markup::Other(_) => continue,
            Markup::End => depth = depth.saturating_sub(1),
            Markup::Start => {
                elements += 1;
                depth += 1;
            }
        }
        let exceeded = if elements > MAX_ELEMENTS {
            format!(
                "a topology file has at most {MAX_ELEMENTS} elements; leave out devices that lead to no GPU and no \
                 network device"
            )
        } else if depth > MAX_DEPTH {
            format!(
                "elements are nested deeper than {MAX_DEPTH} levels; leave out bridges with one device behind them"
            )
        } else {
            // An empty element has no end tag.
            let is_empty = markup == Markup::Start && text[..at].ends_with("/>");
            depth -= usize::from(is_empty);
            continue;
        };
        return refuse(&exceeded);
    }
    Ok(())
}

/// Checks the size of a file, of which `bytes` is the content or its beginning.
///
/// # Errors
/// Invalid argument if the file is too long. The sentence has the line that exceeds the limit.
pub(super) fn check_size(bytes: &[u8]) -> Result<()> {
    if bytes.len() <= MAX_BYTES {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "line {}: a topology file has at most {MAX_BYTES} bytes; describe one host, and remove comments",
        line(bytes, MAX_BYTES)
    )))
}

/// Returns the number of the line at byte `at`, from 1.
pub(super) fn line(bytes: &[u8], at: usize) -> usize {
    1 + bytes[..at].iter().filter(|&&byte| byte == b'\n').count()
}

#[derive(Clone, Copy, PartialEq)]
enum Markup {
    Start,
    End,
    /// A comment, a section of characters, an instruction or a declaration, with the text that ends it.
    Other(&'static str),
}

impl Markup {
    fn of(rest: &str) -> Markup {
        let others = [
            ("<!--", "-->"),
            ("<![CDATA[", "]]>"),
            ("<?", "?>"),
            ("<!", ">"),
        ];
        let other = others.iter().find(|(begin, _)| rest.starts_with(begin));
        match other {
            Some((_, end)) => Markup::Other(end),
            None if rest.starts_with("</") => Markup::End,
            None => Markup::Start,
        }
    }

    /// Returns the length of the markup at the beginning of `rest`, at least 1.
    fn length(self, rest: &str) -> usize {
        match self {
            Markup::Other(end) => rest.find(end).map_or(rest.len(), |at| at + end.len()),
            Markup::End => rest.find('>').map_or(rest.len(), |at| at + 1),
            Markup::Start => tag_length(rest),
        }
    }
}

/// Returns the length of a start tag. A `>` in quotes does not end it.
fn tag_length(rest: &str) -> usize {
    let mut quote = None;
    for (at, byte) in rest.bytes().enumerate() {
        match (quote, byte) {
            (Some(open), _) if open == byte => quote = None,
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'>') => return at + 1,
            _ => {}
        }
    }
    rest.len()
}
