//! Output of rank 0: the table on standard output, records and charts in files. Other ranks print
//! nothing.

use super::columns::write_csv;
use super::nccl_tests::options::TableFormat;
use super::options::BenchOptions;
use super::record::Record;
use super::table::TableKind;
use super::{compare, nccl_tests, page, suite};
use cinch::{Error, Result};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Destinations of the results.
#[derive(Default)]
pub struct Output {
    speaks: bool,
    color: bool,
    progress: bool,
    table: TableKind,
    /// Whether writing to standard output has failed. Files and the exit code are still produced
    /// then.
    broken: bool,
    /// The write error of standard output; `None` if the reader closed the pipe, as `head` does.
    lost: Option<io::Error>,
    json: Option<PathBuf>,
    /// The open `--json` file, which is opened for the first record.
    file: Option<File>,
    csv: Option<PathBuf>,
    plot: Option<PathBuf>,
    report: Option<PathBuf>,
    compare: Option<Vec<Record>>,
    /// The options of the run, for the table of nccl-tests.
    nccl_tests: Option<Box<BenchOptions>>,
    /// The options of the run, for the file of `-J`.
    nccl_json: Option<Box<BenchOptions>>,
    /// Host and process of each rank.
    places: Vec<(String, u32)>,
}

impl Output {
    /// Makes the output of rank 0 in a bench over `nranks` ranks.
    ///
    /// # Errors
    /// Returns an invalid-argument error if the file of `--compare` cannot be read or holds another
    /// collective, or if a file cannot be written.
    pub fn new(options: &BenchOptions, table: TableKind, nranks: usize) -> Result<Output> {
        let read = |path: &PathBuf| compare::read(path, options.collective, nranks);
        let folder = match options.suite {
            true => Some(suite::folder(options)?),
            false => None,
        };
        let json = folder.map(|folder| folder.join(suite::ROWS));
        let output = Output {
            table,
            compare: options.compare.first().map(read).transpose()?,
            csv: options.csv.clone(),
            plot: options.plot.clone(),
            report: folder.map(|folder| folder.join(suite::REPORT)),
            nccl_tests: (options.nccl_tests.format == TableFormat::NcclTests)
                .then(|| Box::new(options.clone())),
            nccl_json: (options.nccl_tests.output_file.is_some())
                .then(|| Box::new(options.clone())),
            ..Output::of_rows(json.or(options.json.clone()))?
        };
        let nccl_json = &options.nccl_tests.output_file;
        for path in [&output.csv, &output.plot, &output.report, nccl_json]
            .into_iter()
            .flatten()
        {
            check_writable(path).map_err(|error| unwritable(path, &error))?;
        }
        Ok(output)
    }

    /// Creates an output that prints lines and writes JSON records to `json`, but prints no table.
    ///
    /// # Errors
    /// Returns an invalid-argument error if the file cannot be written.
    pub fn of_rows(json: Option<PathBuf>) -> Result<Output> {
        if let Some(path) = &json {
            // The file is created for the first record, so that a failed start keeps earlier rows.
            check_writable(path).map_err(|error| unwritable(path, &error))?;
        }
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Ok(Output {
            speaks: true,
            color: io::stdout().is_terminal() && !plain,
            progress: io::stderr().is_terminal(),
            json,
            ..Output::default()
        })
    }

    /// Creates the output of a rank that prints nothing.
    pub fn silent() -> Output {
        Output::default()
    }

    /// Prints one line.
    pub fn line(&mut self, text: &str) {
        self.write(|out| writeln!(out, "{text}"));
    }

    /// Prints a remark between rows, with `#` in front of each line.
    pub fn note(&mut self, text: &str) {
        for line in text.lines() {
            self.line(&format!("# {line}"));
        }
    }

    /// Prints the legend and headings of the table of a run whose ranks are processes `places`, by host and id.
    pub fn head(&mut self, places: &[(String, u32)]) {
        self.places = places.to_vec();
        let table = self.table;
        match self.nccl_tests.clone() {
            Some(options) => self.write(|out| nccl_tests::write_head(&options, places, out)),
            None => self.write(|out| table.write_head(out)),
        }
    }

    /// Prints to standard output. [`Output::end`] reports a failure.
    pub fn write(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
        if self.progress {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
        if self.speaks && !self.broken {
            // The text is collected and written at once, so that lines of several processes do not
            // mix.
            let mut text = Vec::new();
            let mut out = io::stdout().lock();
            let written = write(&mut text)
                .and_then(|()| out.write_all(&text))
                .and_then(|()| out.flush());
            if let Err(error) = written {
                self.broken = true;
                self.lost = Some(error).filter(|error| error.kind() != io::ErrorKind::BrokenPipe);
            }
        }
    }

    /// Shows on a terminal which row is being measured.
    pub fn progress(&mut self, index: usize, rows: usize) {
        if self.progress {
            let _ = write!(io::stderr(), "\r\x1b[Krow {} of {rows} ...", index + 1);
        }
    }

    /// Prints a row and appends its record to the file.
    ///
    /// # Errors
    /// Returns an internal error if the file cannot be written.
    pub fn row(&mut self, record: &Record) -> Result<()> {
        let table = self.table;
        match self.nccl_tests.clone() {
            Some(options) => self.write(|out| nccl_tests::write_row(&options, record, out)),
            None => self.write(|out| table.write_row(record, out)),
        }
        self.record(record)
    }

    /// Appends one JSON line to the file without buffering, so that an interrupted run keeps its
    /// rows.
    ///
    /// # Errors
    /// Returns an internal error if the file cannot be written.
    pub fn record(&mut self, record: &impl Serialize) -> Result<()> {
        let Some(path) = &self.json else {
            return Ok(());
        };
        let failed = |error: io::Error| Error::internal(format!("{}: {error}", path.display()));
        if self.file.is_none() {
            self.file = Some(File::create(path).map_err(failed)?);
        }
        if let Some(file) = &mut self.file {
            let line = serde_json::to_string(record).map_err(|error| failed(error.into()))?;
            writeln!(file, "{line}").map_err(failed)?;
        }
        Ok(())
    }

    /// Prints totals and the comparison with an earlier run, and writes CSV, chart and report.
    ///
    /// # Errors
    /// Returns an internal error if a file cannot be written.
    pub fn finish(&mut self, records: &[Record]) -> Result<()> {
        if !self.speaks {
            return Ok(());
        }
        let (table, color) = (self.table, self.color);
        match self.nccl_tests {
            Some(_) => self.write(|out| nccl_tests::write_foot(records, out)),
            None => self.write(|out| table.write_foot(records, color, out)),
        }
        if let Some(old) = self.compare.take() {
            self.write(|out| compare::write(&old, records, out));
        }
        if let Some(path) = &self.csv {
            save(path, |out| write_csv(records, out))?;
        }
        if let Some(path) = &self.plot {
            let drawing = page::drawing(records);
            save(path, |out| out.write_all(drawing.as_bytes()))?;
        }
        if let Some(options) = &self.nccl_json
            && let Some(path) = &options.nccl_tests.output_file
        {
            save(path, |out| {
                nccl_tests::write_json(options, &self.places, records, out)
            })?;
        }
        if let (Some(path), Some(rows)) = (self.report.clone(), self.json.clone()) {
            let text = page::report(records);
            save(&path, |out| out.write_all(text.as_bytes()))?;
            let (rows, path) = (rows.display(), path.display());
            self.note(&format!(
                "{} rows in {rows}, drawn in {path}",
                records.len()
            ));
        }
        Ok(())
    }

    /// Ends the output and reports an earlier failure of standard output.
    ///
    /// # Errors
    /// Returns an internal error if standard output could not be written.
    pub fn end(self) -> Result<()> {
        match self.lost {
            Some(error) => Err(Error::internal(format!("standard output: {error}"))),
            None => Ok(()),
        }
    }
}

fn unwritable(path: &Path, error: &io::Error) -> Error {
    Error::invalid_argument(format!("{}: {error}", path.display()))
}

/// Returns the temporary path under which a file is written.
fn part_of(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(".tmp");
    PathBuf::from(part)
}

/// Checks before the run that a file can probably be written. A file that did not exist does not
/// exist afterwards.
///
/// # Errors
/// Returns the error of opening the file or its temporary file.
pub fn check_writable(path: &Path) -> io::Result<()> {
    let found = path.metadata();
    if found.is_ok() {
        OpenOptions::new().append(true).open(path)?;
    }
    if found.is_ok_and(|found| !found.is_file()) {
        return Ok(());
    }
    let part = part_of(path);
    File::create(&part)?;
    std::fs::remove_file(part)
}

/// Writes a file completely or not at all, through a temporary file.
///
/// # Errors
/// Returns an internal error that names the file.
pub fn save(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
    let named = |error: io::Error| Error::internal(format!("{}: {error}", path.display()));
    // A device such as /dev/stdout cannot be replaced, so it is written directly.
    if path.metadata().is_ok_and(|data| !data.is_file()) {
        let mut out = BufWriter::new(OpenOptions::new().write(true).open(path).map_err(named)?);
        return write(&mut out).and_then(|()| out.flush()).map_err(named);
    }
    let part = part_of(path);
    let mut out = BufWriter::new(File::create(&part).map_err(named)?);
    write(&mut out)
        .and_then(|()| out.flush())
        .and_then(|()| std::fs::rename(&part, path))
        .map_err(|error| {
            let _ = std::fs::remove_file(&part);
            named(error)
        })
}

#[cfg(test)]
mod tests {
    use super::super::record::{read, tests::record};
    use super::*;
    use crate::testing::parsed;

    #[test]
    fn files_are_written_whole_and_not_before_there_are_records() {
        let name = format!("cinch-output-test-{}.json", std::process::id());
        let path = std::env::temp_dir().join(name);
        let made = |line: &str| Output::new(&parsed(line).unwrap(), TableKind::Host, 4);
        let line = format!("all_reduce --json {}", path.display());
        let refused = made(&format!("{line} --compare /no/such/file"))
            .err()
            .unwrap();
        assert!(refused.message().contains("/no/such/file"), "{refused}");
        assert!(made("all_reduce --json /no/such/folder/x").is_err());
        let mut output = made(&line).unwrap();
        assert!(!path.exists() && !part_of(&path).exists());
        output.record(&record(8, "raw")).unwrap();
        output.record(&record(16, "raw")).unwrap();
        assert_eq!(read(&path).unwrap().len(), 2);
        let failed = save(&path, |out| {
            out.write_all(b"{")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert!(failed.is_err());
        assert_eq!(read(&path).unwrap().len(), 2, "the old file is gone");
        std::fs::remove_file(&path).unwrap();
        let nowhere = save(Path::new("/no/such/folder/x"), |_| Ok(()));
        assert!(nowhere.unwrap_err().message().contains("/no/such/folder/x"));
    }
}
