//! What rank 0 shows and writes; nothing of the other ranks.

use cinch::{Error, Result};
use serde::Serialize;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Where rows go; those of ranks other than 0, nowhere.
#[derive(Default)]
pub struct Output {
    speaks: bool,
    json: Option<File>,
    /// Why standard output takes nothing any more, unless its reader left.
    lost: Option<io::Error>,
}

impl Output {
    /// Of the rank that speaks; rows for machines go to `json`.
    ///
    /// # Errors
    /// Invalid argument if that file cannot be made.
    pub fn new(json: Option<&Path>) -> Result<Output> {
        let create = |path: &Path| {
            File::create(path)
                .map_err(|error| Error::invalid_argument(format!("{}: {error}", path.display())))
        };
        Ok(Output {
            speaks: true,
            json: json.map(create).transpose()?,
            lost: None,
        })
    }

    /// One line on the screen.
    pub fn line(&mut self, text: &str) {
        self.write(|out| writeln!(out, "{text}"));
    }

    /// A reader that left is no failure, and any other is told at the [`Output::end`]: files and exit
    /// code are still worth having.
    pub fn write(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
        if self.speaks && self.lost.is_none() {
            let mut out = io::stdout().lock();
            let written = write(&mut out).and_then(|()| out.flush());
            let failed = written.err();
            self.lost = failed.filter(|error| error.kind() != io::ErrorKind::BrokenPipe);
        }
    }

    /// Ends the output.
    ///
    /// # Errors
    /// Internal if standard output could not be written.
    pub fn end(self) -> Result<()> {
        match self.lost {
            Some(error) => Err(Error::internal(format!("standard output: {error}"))),
            None => Ok(()),
        }
    }

    /// One row for machines, in the file at once: a run that is cut off leaves what it had.
    ///
    /// # Errors
    /// Internal if the file cannot be written.
    pub fn record(&mut self, record: &impl Serialize) -> Result<()> {
        if let Some(file) = &mut self.json {
            let named = |error: io::Error| Error::internal(format!("rows of JSON: {error}"));
            let line = serde_json::to_string(record).map_err(|error| named(error.into()))?;
            writeln!(file, "{line}").map_err(named)?;
        }
        Ok(())
    }
}
