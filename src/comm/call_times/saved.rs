//! Times of calls that rank 0 keeps for later communicators: a file for each set of GPUs, links, codecs and settings. It
//! has a line for each call, such as `time linear8:block=256 f32 65536 1.25e-5`: codec, type, bytes and seconds.

use super::{all_calls, is_time};
use crate::bootstrap::OutOfBandRef;
use crate::error::{Error, ErrorKind, Result};
use crate::plan::{TIMED_DTYPES, TimedCall};
use crate::sys::file;
use crate::sys::fork_safe::ForkSafeOnce;
use crate::sys::log::{self, Level};
use crate::types::{CodecSetting, short_digest};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folder in the user's cache.
const FOLDER: &str = "call-times";

/// Largest size of a file in bytes. Rank 0 sends it to all ranks.
const MAX_BYTES: usize = 16 << 10;

/// Most files in the folder: jobs on changing sets of GPUs would fill it otherwise.
const MOST_FILES: usize = 64;

/// The saved times of a communicator's calls.
#[derive(Debug)]
pub struct SavedTimes<'a> {
    exchange: &'a OutOfBandRef,
    codecs: &'a [CodecSetting],
    /// The file of rank 0; `None` on other ranks, and if the user has no cache.
    file: Option<PathBuf>,
}

impl<'a> SavedTimes<'a> {
    /// Finds the file of a communicator. `own` has all that times on this rank depend on: its GPU, links, settings and
    /// version. All ranks call it together.
    ///
    /// # Errors
    /// Errors of the exchange.
    pub fn new(
        exchange: &'a OutOfBandRef,
        codecs: &'a [CodecSetting],
        own: &str,
        cache: Option<PathBuf>,
    ) -> Result<SavedTimes<'a>> {
        let digests = exchange.all_gather(short_digest(own).as_bytes())?;
        let name = format!("{}.txt", short_digest(digests.join(&b'\n')));
        let cache = cache.filter(|_| exchange.rank() == 0);
        Ok(SavedTimes {
            exchange,
            codecs,
            file: cache.map(|cache| cache.join(FOLDER).join(name)),
        })
    }

    /// Returns the times that rank 0 has saved; `None` if it has none, or if `anew` is true on rank 0. All ranks call it
    /// together, and get the same times.
    ///
    /// # Errors
    /// Errors of the exchange; mismatch if rank 0 sends something else.
    pub fn load(&self, anew: bool) -> Result<Option<Vec<TimedCall>>> {
        let file = self.file.as_deref().filter(|_| !anew);
        let text = file.and_then(|file| self.read(file)).unwrap_or_default();
        let sent = self.exchange.all_gather(text.as_bytes())?;
        let text = String::from_utf8_lossy(&sent[0]);
        if text.is_empty() {
            return Ok(None);
        }
        let timed = parse(&text, self.codecs).map_err(|why| {
            let text = format!("rank 0 sent saved times of calls, but {why}: use one version");
            Error::new(ErrorKind::Mismatch, text)
        })?;
        Ok(Some(timed))
    }

    /// Reads the file. One that is missing or broken costs time, not correctness: calls are timed again.
    fn read(&self, file: &Path) -> Option<String> {
        let broken = |why: String| {
            warn_once(format_args!(
                "calls are timed again: {}: {why}",
                file.display()
            ))
        };
        let text = match file::read_text(file, MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                broken(error.to_string());
                return None;
            }
        };
        match parse(&text, self.codecs) {
            Ok(_) => {
                log::line(
                    Level::Info,
                    format_args!(
                        "auto: codecs decide by the times of {}; CINCH_CALL_TIMES=measured measures them again",
                        file.display()
                    ),
                );
                Some(text)
            }
            Err(why) => {
                broken(why);
                None
            }
        }
    }

    /// Saves measured times, on rank 0. Without the file the next communicator measures again, so a failure is logged
    /// only.
    pub fn save(&self, timed: &[TimedCall]) {
        let Some(file) = &self.file else {
            return;
        };
        let text = text(timed);
        let written = match text.len() {
            0..=MAX_BYTES => file::replace(file, &text, 0o600).map_err(|error| error.to_string()),
            bytes => Err(format!("{bytes} bytes are more than {MAX_BYTES}")),
        };
        match written {
            Ok(()) => {
                log::line(
                    Level::Info,
                    format_args!("the times of calls are saved in {}", file.display()),
                );
                remove_oldest(file);
            }
            Err(why) => warn_once(format_args!(
                "the times of calls are not saved in {}: {why}",
                file.display()
            )),
        }
    }
}

/// Logs a warning about saved times, once in a process: communicators of a user without a home would repeat it.
fn warn_once(text: fmt::Arguments<'_>) {
    static WARNED: ForkSafeOnce<()> = ForkSafeOnce::new();
    let level = match WARNED.try_set(()) {
        true => Level::Warn,
        false => Level::Info,
    };
    log::line(level, text);
}

/// Removes the oldest files beside `kept`, so that [`MOST_FILES`] remain. Other processes may remove the same files.
fn remove_oldest(kept: &Path) {
    let files = kept.parent().and_then(|folder| fs::read_dir(folder).ok());
    let mut files: Vec<_> = files
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "txt") && path != kept)
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .collect();
    files.sort();
    let surplus = (files.len() + 1).saturating_sub(MOST_FILES);
    for (_, path) in files.into_iter().take(surplus) {
        let _ = fs::remove_file(path);
    }
}

fn line(call: &TimedCall) -> String {
    let TimedCall {
        codec,
        dtype,
        bytes,
        seconds,
    } = call;
    format!("time {codec} {dtype} {bytes} {seconds:e}\n")
}

fn text(timed: &[TimedCall]) -> String {
    timed.iter().map(line).collect()
}

/// Reads the times of the calls that decide about `codecs`.
fn parse(text: &str, codecs: &[CodecSetting]) -> Result<Vec<TimedCall>, String> {
    let mut lines = text.lines().zip(1..);
    let timed = all_calls(codecs, &TIMED_DTYPES, |calls| {
        for call in calls {
            let expected = line(call);
            let call_text = expected.trim_end().trim_end_matches("0e0");
            let (found, number) = lines.next().unwrap_or_default();
            let seconds = found
                .strip_prefix(call_text)
                .and_then(|seconds| seconds.parse().ok())
                .filter(|&seconds| is_time(seconds));
            call.seconds = seconds.ok_or_else(|| {
                Error::invalid_argument(format!("line {number} is not `{call_text}SECONDS`"))
            })?;
        }
        Ok(())
    });
    let timed = timed.map_err(|error| error.message().to_string())?;
    match lines.next() {
        None => Ok(timed),
        Some((_, number)) => Err(format!("line {number} is about no call that is timed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::LocalOutOfBand;
    use crate::sync::Fault;
    use std::time::{Duration, SystemTime};

    fn codecs() -> [CodecSetting; 2] {
        ["linear8", "minmax4:block=512"].map(|name| name.parse().unwrap())
    }

    /// Returns times, of which that of the first call without a codec is `raw` seconds.
    fn times(raw: f64) -> Vec<TimedCall> {
        let mut next = raw;
        let timed = all_calls(&codecs(), &TIMED_DTYPES, |calls| {
            for call in calls {
                call.seconds = next;
                next = 1.0 / 3.0 * next.min(1e-3);
            }
            Ok(())
        });
        timed.unwrap()
    }

    #[test]
    fn times_survive_text_and_other_text_is_refused_with_its_line() {
        let codecs = codecs();
        // Two types; three sizes of the second one, and one of the first if it is slow.
        for (raw, calls) in [(2e-3, 3 * 6), (4e-3, 3 * 4)] {
            let timed = times(raw);
            assert_eq!((timed.len(), timed[0].seconds), (calls, raw));
            assert_eq!(parse(&text(&timed), &codecs), Ok(timed));
        }
        let good = text(&times(2e-3));
        let changed = |from: &str, to: &str| good.replacen(from, to, 1);
        for (bad, part) in [
            (
                changed("time raw", "time linear4"),
                "line 1 is not `time raw f32 65536 SECONDS`",
            ),
            (
                changed("time linear8", "time dynamic8"),
                "line 2 is not `time linear8:block=256 f32",
            ),
            (changed(" f32 ", " f16 "), "line 1"),
            (changed(" 65536 ", " 65537 "), "line 1"),
            (changed("2e-3", "NaN"), "line 1"),
            (changed("2e-3", "0"), "line 1"),
            (changed("2e-3", "-1"), "line 1"),
            (changed("2e-3", "4e-3"), "line 4 is not `time raw bf16"),
            (good.clone() + "time raw f32 1 1\n", "line 19"),
            (good.lines().next().unwrap().into(), "line 0"),
        ] {
            let why = parse(&bad, &codecs).unwrap_err();
            assert!(why.contains(part), "{part}: {why}");
        }
    }

    /// Runs `run` as each rank of a world of two whose cache is `cache`, and returns what the ranks return. `own` describes
    /// the ranks.
    fn ranks<T: Send>(
        cache: &Path,
        own: [&str; 2],
        run: impl Fn(&SavedTimes<'_>) -> T + Sync,
    ) -> Vec<T> {
        let faults = [Fault::new(), Fault::new()];
        let world = LocalOutOfBand::world(2, &faults);
        let (codecs, run) = (codecs(), &run);
        std::thread::scope(|scope| {
            let threads: Vec<_> = world
                .into_iter()
                .zip(own)
                .map(|(exchange, own)| {
                    let codecs = &codecs;
                    scope.spawn(move || {
                        let exchange: OutOfBandRef = exchange;
                        let cache = Some(cache.to_path_buf());
                        run(&SavedTimes::new(&exchange, codecs, own, cache).unwrap())
                    })
                })
                .collect();
            let results = threads.into_iter().map(|thread| thread.join().unwrap());
            results.collect()
        })
    }

    #[test]
    fn times_of_rank_0_count_for_the_same_ranks_alone() {
        let cache = std::env::temp_dir().join(format!("cinch-call-times-{}", std::process::id()));
        let load = |anew: [bool; 2]| {
            move |saved: &SavedTimes<'_>| saved.load(anew[saved.exchange.rank()]).unwrap()
        };
        let here = ["GPU a, linear8", "GPU b, linear8"];
        assert_eq!(ranks(&cache, here, load([false; 2])), [None, None]);
        let files = ranks(&cache, here, |saved| {
            saved.save(&times([2e-3, 1e-3][saved.exchange.rank()]));
            saved.file.clone()
        });
        let file = files[0].clone().unwrap();
        assert!(files[1].is_none());
        let both = [Some(times(2e-3)), Some(times(2e-3))];
        assert_eq!(ranks(&cache, here, load([false; 2])), both);
        // Rank 0 decides whether to measure again.
        assert_eq!(ranks(&cache, here, load([false, true])), both);
        assert_eq!(ranks(&cache, here, load([true, false])), [None, None]);
        for other in [[here[1], here[0]], [here[0], "GPU b, dynamic8"]] {
            assert_eq!(ranks(&cache, other, load([false; 2])), [None, None]);
        }
        fs::write(&file, "time raw f32 65536 fast\n").unwrap();
        assert_eq!(ranks(&cache, here, load([false; 2])), [None, None]);
        fs::write(&file, [0xff; 4]).unwrap();
        assert_eq!(ranks(&cache, here, load([false; 2])), [None, None]);
        fs::remove_dir_all(&cache).unwrap();
    }

    #[test]
    fn oldest_files_go_when_there_are_many() {
        let folder = std::env::temp_dir().join(format!("cinch-old-times-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for number in 0..MOST_FILES + 2 {
            let file = fs::File::create(folder.join(format!("{number}.txt"))).unwrap();
            let age = Duration::from_secs(1_000_000 - number as u64);
            file.set_modified(SystemTime::now() - age).unwrap();
        }
        fs::write(folder.join("other"), "").unwrap();
        remove_oldest(&folder.join("0.txt"));
        let is_there = |name: &str| folder.join(name).exists();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), MOST_FILES + 1);
        assert!(is_there("0.txt") && is_there("3.txt") && is_there("other"));
        assert!(!is_there("1.txt") && !is_there("2.txt"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
