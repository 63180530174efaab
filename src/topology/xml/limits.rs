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
    if text.len() > MAX_BYTES {
        return Err(Error::invalid_argument(format!(
            "a topology file has at most {MAX_BYTES} bytes; this one has {}",
            text.len()
        )));
    }
    let (mut depth, mut elements) = (0usize, 0usize);
    let mut at = 0;
    while let Some(found) = text[at..].find('<') {
        let begin = at + found;
        let rest = &text[begin..];
        let markup = Markup::of(rest);
        at = begin + markup.length(rest);
        match markup {
            Markup::Other(_) => continue,
            Markup::End => depth = depth.saturating_sub(1),
            Markup::Start => {
                elements += 1;
                depth += 1;
            }
        }
        let exceeded = if elements > MAX_ELEMENTS {
            format!("a topology file has at most {MAX_ELEMENTS} elements")
        } else if depth > MAX_DEPTH {
            format!("elements are nested deeper than {MAX_DEPTH} levels")
        } else {
            // An empty element has no end tag.
            let is_empty = markup == Markup::Start && text[..at].ends_with("/>");
            depth -= usize::from(is_empty);
            continue;
        };
        let line = 1 + text[..begin].matches('\n').count();
        return Err(Error::invalid_argument(format!("line {line}: {exceeded}")));
    }
    Ok(())
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
