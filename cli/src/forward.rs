//! Forwards the output of ranks, with the rank's number at the start of each line.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time to wait for the rest of the output after the ranks have ended. A process that a rank left
/// behind may keep the pipe open.
const PATIENCE: Duration = Duration::from_millis(500);

/// Longest part of a line, in bytes, that is written at once. The limit keeps an endless line from
/// filling the memory.
const LINE: u64 = 64 << 10;

/// Threads that copy the output of ranks.
pub struct Forwarders {
    threads: Vec<JoinHandle<()>>,
    /// Pipe whose writing end is closed when all ranks have ended. By then all of the ranks' output
    /// is in their pipes.
    ended: (Arc<PipeReader>, Option<PipeWriter>),
}

impl Forwarders {
    /// Creates an instance without threads.
    ///
    /// # Errors
    /// Returns the error of creating a pipe.
    pub fn new() -> io::Result<Forwarders> {
        let (reader, writer) = io::pipe()?;
        Ok(Forwarders {
            threads: Vec::new(),
            ended: (Arc::new(reader), Some(writer)),
        })
    }

    /// Starts a thread that copies lines from a rank's pipe, with the rank at the start of each
    /// line. Each line is one write, so that lines of different ranks do not mix.
    pub fn add(
        &mut self,
        rank: usize,
        from: impl Read + AsFd + Send + 'static,
        mut to: impl Write + Send + 'static,
    ) {
        let from = RankOutput {
            pipe: from,
            ended: self.ended.0.clone(),
            rest: None,
        };
        self.threads.push(std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            loop {
                line.clear();
                let read = from.by_ref().take(LINE).read_until(b'\n', &mut line);
                if !matches!(read, Ok(1..)) {
                    return;
                }
                if line.last() != Some(&b'\n') {
                    line.push(b'\n');
                }
                let mut labelled = format!("[{rank}] ").into_bytes();
                labelled.extend_from_slice(&line);
                // A failed write is ignored. The thread must go on reading, or the rank would block
                // on a full pipe.
                let _ = to.write_all(&labelled).and_then(|()| to.flush());
            }
        }));
    }

    /// Forwards the remaining output of ranks that have ended, however slow its reader is. Calls
    /// `asked` at intervals; once `asked` returns a value, drops the rest of the output.
    ///
    /// # Errors
    /// Returns the errors of `asked`.
    pub fn drain<T>(
        &mut self,
        mut asked: impl FnMut() -> Result<Option<T>, String>,
    ) -> Result<Option<T>, String> {
        self.ended.1 = None;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                if let Some(end) = asked()? {
                    return Ok(Some(end));
                }
            }
            let _ = thread.join();
        }
        Ok(None)
    }
}

/// The reading end of a rank's pipe. It reports the end of input when the pipe is closed, or when
/// all ranks have ended and their output was read.
struct RankOutput<T> {
    pipe: T,
    ended: Arc<PipeReader>,
    /// Set once all ranks have ended: the time left to wait, and how many more bytes the pipe may
    /// hold.
    rest: Option<(Duration, usize)>,
}

impl<T: Read + AsFd> Read for RankOutput<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some((patience, room)) = self.rest else {
                let mut both = [&self.pipe.as_fd(), &self.ended.as_fd()]
                    .map(|fd| PollFd::new(*fd, PollFlags::POLLIN));
                wait(&mut both, PollTimeout::NONE)?;
                if both[1].any() == Some(true) {
                    let size = fcntl(&self.pipe, FcntlArg::F_GETPIPE_SZ)?;
                    self.rest = Some((PATIENCE, size as usize));
                } else if both[0].any() == Some(true) {
                    return self.pipe.read(bytes);
                }
                continue;
            };
            let begin = Instant::now();
            let mut one = [PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN)];
            wait(
                &mut one,
                PollTimeout::try_from(patience).unwrap_or(PollTimeout::ZERO),
            )?;
            let ready = one[0].any() == Some(true);
            let patience = patience.saturating_sub(begin.elapsed());
            if ready {
                let most = room.min(bytes.len());
                let read = self.pipe.read(&mut bytes[..most])?;
                self.rest = Some((patience, room - read));
                return Ok(read);
            }
            if patience.is_zero() {
                return Ok(0);
            }
            self.rest = Some((patience, room));
        }
    }
}

fn wait(entries: &mut [PollFd<'_>], time: PollTimeout) -> io::Result<()> {
    match poll(entries, time) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A slow writer that keeps the written bytes.
    #[derive(Clone, Default)]
    struct Slow(Arc<Mutex<Vec<u8>>>, Duration);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            std::thread::sleep(self.1);
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the forwarded form of `text`. `left_open` states whether the pipe's writing end
    /// stays open.
    fn forwarded(text: &[u8], each: Duration, left_open: bool) -> Vec<u8> {
        let (reader, mut writer) = io::pipe().unwrap();
        let seen = Slow(Arc::default(), each);
        let mut forwarders = Forwarders::new().unwrap();
        writer.write_all(text).unwrap();
        forwarders.add(3, reader, seen.clone());
        let _holder = left_open.then_some(writer);
        let never = || {
            std::thread::sleep(Duration::from_millis(1));
            Ok::<Option<()>, String>(None)
        };
        assert_eq!(forwarders.drain(never), Ok(None));
        seen.0.lock().unwrap().clone()
    }

    #[test]
    fn labelled_lines_keep_their_rank() {
        for left_open in [false, true] {
            let seen = forwarded(b"one\ntwo\nno end", Duration::ZERO, left_open);
            assert_eq!(seen, b"[3] one\n[3] two\n[3] no end\n");
        }
    }

    /// [`PATIENCE`] limits the wait for a process that holds the pipe open, not for a slow reader
    /// of the output.
    #[test]
    fn a_slow_reader_gets_everything() {
        for left_open in [false, true] {
            let seen = forwarded(&b"x\n".repeat(100), PATIENCE / 50, left_open);
            assert_eq!(seen, b"[3] x\n".repeat(100));
        }
    }

    #[test]
    fn drain_returns_early_when_the_check_returns_a_value() {
        let (reader, _held) = io::pipe().unwrap();
        let mut forwarders = Forwarders::new().unwrap();
        forwarders.add(0, reader, Slow::default());
        assert_eq!(forwarders.drain(|| Ok(Some(7))), Ok(Some(7)));
    }
}
