//! What rank 0 shows and writes.

use super::compare;
use super::options::BenchOptions;
use super::report::{Entry, Figures, Results, write_csv, write_json};
use super::table;
use crate::plot::{Panel, Series, svg};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Where results go: the table to standard output, the rest to files. Other ranks are silent.
#[derive(Default)]
pub struct Output {
    speaks: bool,
    color: bool,
    progress: bool,
    /// Standard output takes nothing any more; files and exit code are still worth having.
    broken: bool,
    /// Why, unless its reader left.
    lost: Option<io::Error>,
    json: Option<PathBuf>,
    csv: Option<PathBuf>,
    plot: Option<PathBuf>,
    compare: Option<Results>,
    pending: Vec<u8>,
}

impl Output {
    /// The speaking rank's output.
    ///
    /// # Errors
    /// A sentence, if the file to compare with cannot be read or is of another call, or a file cannot
    /// be written.
    pub fn new(options: &BenchOptions, nranks: usize) -> Result<Output, String> {
        let read = |path: &PathBuf| compare::read(path, options.collective, nranks);
        let compare = options.compare.as_ref().map(read).transpose()?;
        let files = [&options.json, &options.csv, &options.plot];
        for path in files.into_iter().flatten() {
            // Now, not after the run. The file keeps what it has until then, or is not there.
            check_writable(path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Ok(Output {
            speaks: true,
            color: io::stdout().is_terminal() && !plain,
            progress: io::stderr().is_terminal(),
            broken: false,
            lost: None,
            json: options.json.clone(),
            csv: options.csv.clone(),
            plot: options.plot.clone(),
            compare,
            pending: Vec::new(),
        })
    }

    /// The output of ranks that leave the talking to rank 0.
    pub fn silent() -> Output {
        Output::default()
    }

    /// Versions, ranks and parameters.
    pub fn head(&mut self, options: &BenchOptions, nranks: usize, places: &[(String, u32)]) {
        if !self.speaks {
            return;
        }
        let mut lines = vec![
            format!("cinch {} bench {}", cinch::VERSION, options.collective),
            format!(
                "ranks {nranks} transport {} algo {} codec {} iters {} warmup {} check {}",
                options.transport.0.map_or("auto", |kind| kind.name()),
                options.algo.0.map_or("auto", |algo| algo.name()),
                options.codecs(),
                options.iters,
                options.warmup,
                options.check
            ),
            match options.data.as_slice() {
                [] => format!("data {} seed {}", options.distribution.name(), options.seed),
                files => {
                    let names: Vec<_> = files.iter().map(|f| f.display().to_string()).collect();
                    format!("data {}", names.join(" "))
                }
            },
        ];
        if nranks == 1 {
            lines.push("one rank moves no data; --ranks N starts more".into());
        }
        for (rank, (host, pid)) in places.iter().enumerate() {
            lines.push(format!("rank {rank:>4} pid {pid:>7} on {host}"));
        }
        for line in lines {
            let _ = writeln!(self.pending, "# {line}");
        }
        let _ = table::write_head(&mut self.pending);
        self.flush();
    }

    /// One finished row.
    pub fn row(&mut self, entry: &Entry) {
        if self.speaks {
            let _ = table::write_row(entry, &mut self.pending);
            self.flush();
        }
    }

    /// A remark between rows.
    pub fn note(&mut self, text: &str) {
        if self.speaks {
            for line in text.lines() {
                let _ = writeln!(self.pending, "# {line}");
            }
            self.flush();
        }
    }

    /// What is being measured, where a person is watching.
    pub fn progress(&mut self, index: usize, rows: usize) {
        if self.progress {
            let _ = write!(io::stderr(), "\r\x1b[Krow {} of {rows} ...", index + 1);
        }
    }

    /// Totals, and the files.
    ///
    /// # Errors
    /// A sentence with the name of the file that cannot be written; one, after the files are, if
    /// standard output could not be.
    pub fn finish(&mut self, results: &Results) -> Result<(), String> {
        let entries = &results.results;
        let _ = table::write_foot(entries, self.color, &mut self.pending);
        if let Some(old) = &self.compare {
            let _ = compare::write(old, results, &mut self.pending);
        }
        self.flush();
        if let Some(path) = &self.json {
            save(path, |out| write_json(results, out))?;
        }
        if let Some(path) = &self.csv {
            save(path, |out| write_csv(entries, out))?;
        }
        if let Some(path) = &self.plot {
            let drawing = draw(results);
            save(path, |out| out.write_all(drawing.as_bytes()))?;
        }
        match self.lost.take() {
            Some(error) => Err(format!("standard output: {error}")),
            None => Ok(()),
        }
    }

    fn flush(&mut self) {
        if self.progress {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
        let mut out = io::stdout().lock();
        if !self.broken
            && let Err(error) = out.write_all(&self.pending).and_then(|()| out.flush())
        {
            self.broken = true;
            self.lost = Some(error).filter(|error| error.kind() != io::ErrorKind::BrokenPipe);
        }
        self.pending.clear();
    }
}

/// Where a file is while it is written.
fn part_of(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(".tmp");
    PathBuf::from(part)
}

/// Whether [`save`] will be able to, as far as can be known; leaves nothing behind.
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

/// Writes a file as a whole or not at all.
fn save(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), String> {
    let named = |error: io::Error| format!("{}: {error}", path.display());
    // A device, such as /dev/stdout, is written in place.
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

/// Bandwidth above; below, the error if anything was compressed, else the time.
fn draw(results: &Results) -> String {
    let entries = &results.results;
    let config = &results.config;
    let moves = entries
        .iter()
        .any(|entry| entry.out_of_place.eff_bus_bw > 0.0);
    let upper = match moves {
        true => Panel {
            label: "effective bus bandwidth (GB/s)".into(),
            logarithmic: false,
            series: series(entries, |figures| Some(figures.eff_bus_bw)),
        },
        false => Panel {
            label: "algorithm bandwidth (GB/s)".into(),
            logarithmic: false,
            series: series(entries, |figures| Some(figures.alg_bw)),
        },
    };
    let checked = |entry: &Entry| entry.lossy() && entry.out_of_place.rms_rel_err.is_some();
    let lower = match entries.iter().any(checked) {
        true => Panel {
            label: "RMS error / RMS of result".into(),
            logarithmic: true,
            series: series(entries, |figures| figures.rms_rel_err),
        },
        false => Panel {
            label: "time (microseconds)".into(),
            logarithmic: true,
            series: series(entries, |figures| Some(figures.time_us)),
        },
    };
    let mut transports: Vec<&str> = entries.iter().map(|e| e.transport.as_str()).collect();
    transports.sort_unstable();
    transports.dedup();
    let title = format!("{}, {} ranks", config.collective, config.ranks);
    let subtitle = format!(
        "cinch {}, {}, {} cores, transport {}, median of the slowest rank",
        results.version,
        config.machine.cpu,
        config.machine.cores,
        transports.join(" and ")
    );
    svg(&title, &subtitle, &[upper, lower])
}

/// One line for each kind of row and placement.
fn series(entries: &[Entry], value: impl Fn(&Figures) -> Option<f64>) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for entry in entries {
        for (placement, figures) in entry.placements() {
            let Some(value) = value(figures) else {
                continue;
            };
            let mut name = format!("{} {}", entry.codec, entry.dtype);
            if entry.redop != "none" {
                name += &format!(" {}", entry.redop);
            }
            if entry.root >= 0 {
                name += &format!(" root {}", entry.root);
            }
            name += match placement {
                "in_place" => ", in place",
                _ => ", out of place",
            };
            let point = (entry.size as f64, value);
            match all.iter_mut().find(|series| series.name == name) {
                Some(series) => series.points.push(point),
                None => all.push(Series {
                    name,
                    dashed: placement == "in_place",
                    points: vec![point],
                }),
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{entry, results};
    use super::*;
    use crate::testing::parsed;
    use cinch::Collective;

    fn rows_of(codec: &str) -> Results {
        results((10..20).map(|power| entry(1 << power, codec)).collect())
    }

    #[test]
    fn plots_show_the_error_of_lossy_runs_and_the_time_of_exact_ones() {
        let lossy = draw(&rows_of("linear8:block=256"));
        assert!(lossy.contains("RMS error") && !lossy.contains("microseconds"));
        assert!(lossy.contains("linear8:block=256 f32 sum, in place"));
        let exact = draw(&rows_of("raw"));
        assert!(exact.contains("time (microseconds)") && !exact.contains("RMS error"));
        assert_eq!(exact.matches("<polyline").count(), 4);
    }

    #[test]
    fn files_are_whole() {
        let name = format!("cinch-output-test-{}.json", std::process::id());
        let path = std::env::temp_dir().join(name);
        let results = rows_of("raw");
        save(&path, |out| write_json(&results, out)).unwrap();
        let read = || compare::read(&path, Collective::AllReduce, 4);
        assert!(read().is_ok());
        let failed = save(&path, |out| {
            out.write_all(b"{")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert!(failed.is_err());
        assert!(read().is_ok(), "the old file is gone");
        std::fs::remove_file(&path).unwrap();
        // Nothing is there before there are results, and what is wrong is known before the run.
        let line = |file: &str| format!("all_reduce --json {} --compare {file}", path.display());
        let refused = |file: &str| Output::new(&parsed(&line(file)).unwrap(), 4).err().unwrap();
        assert!(refused("/no/such/file").contains("/no/such/file"));
        let options = parsed(&format!("all_reduce --json {}", path.display())).unwrap();
        drop(Output::new(&options, 4).unwrap());
        assert!(!path.exists() && !part_of(&path).exists());
        let nowhere = parsed("all_reduce --json /no/such/folder/x").unwrap();
        assert!(Output::new(&nowhere, 4).is_err());
        let nowhere = save(Path::new("/no/such/folder/x"), |_| Ok(()));
        assert!(nowhere.unwrap_err().contains("/no/such/folder/x"));
    }
}
