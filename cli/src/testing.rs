//! Helpers for the tests of several commands.

use clap::{Args, Parser};

#[derive(Parser)]
struct CommandLine<T: Args> {
    #[command(flatten)]
    options: T,
}

/// Parses a line of words as the command line does.
pub fn parsed<T: Args>(line: &str) -> Result<T, String> {
    let words = ["cinch"].into_iter().chain(line.split_whitespace());
    CommandLine::try_parse_from(words)
        .map(|line| line.options)
        .map_err(|error| error.to_string())
}
