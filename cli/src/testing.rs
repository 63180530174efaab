//! What tests of several commands share.

use clap::{Args, Parser};

#[derive(Parser)]
struct Line<T: Args> {
    #[command(flatten)]
    options: T,
}

/// Options as the command takes them from a line of words.
pub fn parsed<T: Args>(line: &str) -> Result<T, String> {
    let words = ["cinch"].into_iter().chain(line.split_whitespace());
    Line::try_parse_from(words)
        .map(|line| line.options)
        .map_err(|error| error.to_string())
}
